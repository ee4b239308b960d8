//! The store under LakeCache: objects of KV-cache bytes kept in shared memory (L1) and on disk (L2).
//!
//! Layers, each knowing only those below it: [`sys`] holds every raw system call; [`io`] reads files
//! into memory; [`pool`] is the shared-memory file with its members, locks and tables; [`l1`] keeps
//! objects in the pool's data area; [`l2`] keeps them as files; [`cache`] joins the tiers.

pub mod cache;
mod error;
pub mod io;
mod key;
pub mod l1;
pub mod l2;
pub mod pool;
pub mod sys;
pub mod units;

pub use error::{Error, ErrorKind, Result};
pub use key::{Namespace, ObjectKey};
