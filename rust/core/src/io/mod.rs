//! Reads files straight into memory. Knows descriptors and addresses, nothing of objects or pools.
//!
//! Two engines behind one trait: a ring of `io_uring`, and a pool of threads that call `pread`, which
//! keeps direct I/O (the larger part of the gain) where `io_uring` is forbidden. [`open_engine`]
//! chooses by doing a real read.
//!
//! Ownership: a request's memory and file belong to the engine from [`Engine::submit`] until its
//! `done` is called, on an I/O thread, exactly once. Nobody else may reuse the memory before that,
//! not even after [`Engine::shutdown`] ran out of time: the kernel may still write to it (I1). Let
//! `done` own what keeps the memory mapped.

mod finish;
mod jobs;
mod pread;
mod probe;
mod queue;
mod request;
mod ring;
#[cfg(test)]
mod tests;
mod uring;

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::Result;

pub use probe::{Opened, open_engine};

/// Alignment of memory, offset and length that every direct read of ours has.
pub const BLOCK_BYTES: u64 = 4096;

/// A range of memory to fill. Whoever submits it vouches that it is mapped for writing and that
/// nobody reads or writes it until the request is done.
#[derive(Debug, Clone, Copy)]
pub struct Segment {
    /// Where it begins, best at a multiple of [`BLOCK_BYTES`].
    pub address: *mut u8,
    /// How long it is, best a multiple of [`BLOCK_BYTES`]: odd ends go through a copy.
    pub bytes: u64,
}

// SAFETY: an address and a length; the submitter vouches for the memory, on whatever thread.
unsafe impl Send for Segment {}

/// How a read ended that did not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadOutcome {
    /// Every byte is there.
    Complete,
    /// The file provably ends after `read` bytes of the request.
    Short {
        /// How many bytes there are.
        read: u64,
    },
}

/// Told how a read ended. Runs on an I/O thread, in no order, beside others: it may checksum, it must
/// not wait.
pub type Done = Box<dyn FnOnce(std::io::Result<ReadOutcome>) + Send>;

/// Blocking work for a few threads of its own.
pub type Job = Box<dyn FnOnce() + Send>;

/// A range of a file to be read into segments, in order.
pub struct ReadRequest {
    /// The file; kept open until the read is done.
    pub file: Arc<OwnedFd>,
    /// Whether it was opened for direct I/O.
    pub direct: bool,
    /// Where in the file the first segment's bytes begin.
    pub offset: u64,
    /// Where the bytes go.
    pub segments: Vec<Segment>,
    /// Told how it ended, exactly once if `submit` took the request.
    pub done: Done,
}

/// Which engine reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineKind {
    /// A ring of `io_uring`.
    IoUring,
    /// Threads that call `pread`.
    Pread,
}

impl EngineKind {
    /// Its name in settings and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::IoUring => "io_uring",
            Self::Pread => "pread",
        }
    }
}

/// Which engine is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EngineChoice {
    /// `io_uring` where a probe succeeds, else `pread`.
    #[default]
    Auto,
    /// `io_uring` or an error.
    IoUring,
    /// `pread`.
    Pread,
}

/// Sizes of an engine.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Threads of the `pread` engine.
    pub pread_threads: usize,
    /// Threads of the ring that call `done`; each takes a checksum at more than 10 GB/s.
    pub done_threads: usize,
    /// Threads for [`Engine::run`].
    pub job_threads: usize,
    /// Bytes that the ring has in flight at most.
    pub bytes_in_flight: u64,
    /// The largest single read; larger ones are cut.
    pub piece_bytes: u32,
    /// Requests that wait at most; beyond it `submit` refuses.
    pub queued_requests: usize,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            pread_threads: 16,
            done_threads: 2,
            job_threads: 4,
            bytes_in_flight: 64 << 20,
            piece_bytes: 1 << 20,
            queued_requests: 16 << 10,
        }
    }
}

/// Reads files and runs blocking jobs, on threads of its own.
pub trait Engine: Send + Sync {
    /// Takes a read and returns at once. On an error `done` is not called.
    fn submit(&self, request: ReadRequest) -> Result<()>;

    /// Takes a blocking job and returns at once; gives it back when too many wait or after shutdown.
    fn run(&self, job: Job) -> std::result::Result<(), Job>;

    /// Tells that reads will often go to this memory, all of which is backed by pages that stay the
    /// same as long as the engine lives (never give their space back: the kernel would go on
    /// writing to the old pages). A ring pins it where it may, in its own time, which saves the CPU
    /// much of a read's work.
    fn register(&self, _memory: Segment) {}

    /// Bytes pinned so far.
    fn registered_bytes(&self) -> u64 {
        0
    }

    /// Which engine it is.
    fn kind(&self) -> EngineKind;

    /// Pieces of reads that wait or are in flight.
    fn queue_depth(&self) -> usize;

    /// Refuses new work, ends waiting reads with an error, drops waiting jobs, and waits until no read
    /// and no job is in progress or `deadline` has passed.
    fn shutdown(&self, deadline: Duration);
}

/// Locks, whatever a panicking thread left behind: every critical section here is a few moves.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
