//! Every raw system call of the crate, behind safe functions that name what they were doing.

pub mod event;
pub mod fault;
pub mod file;
pub mod fork;
pub mod limits;
pub mod lock;
pub mod map;
pub mod object;
