//! Failures on demand, for tests: with the feature `test_utils`, calls of a kind fail from [`set`]
//! until [`clear`], in the whole process. Without it nothing ever fails here, and nothing is counted.

use std::io;

/// What can be made to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// Reading from a file, by whichever engine.
    Read,
    /// Writing to an object's file.
    Write,
    /// Making a file.
    Make,
    /// Waiting for a file's bytes to be on the disk.
    Sync,
    /// Opening a file for direct I/O.
    Direct,
    /// Handing reads to the ring and waiting for them.
    Ring,
    /// Reading a file's header.
    Header,
}

#[cfg(feature = "test_utils")]
mod state {
    use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

    use super::Call;

    static ERRORS: [AtomicI32; 7] = [const { AtomicI32::new(0) }; 7];
    static CALLS: [AtomicU64; 7] = [const { AtomicU64::new(0) }; 7];
    static AVAILABLE: AtomicU64 = AtomicU64::new(u64::MAX);

    /// Makes calls of this kind fail with `errno` from now on.
    pub fn set(call: Call, errno: i32) {
        ERRORS[call as usize].store(errno, Ordering::SeqCst);
    }

    /// Lets calls of this kind work again.
    pub fn clear(call: Call) {
        set(call, 0);
    }

    /// How many calls of this kind there were.
    pub fn calls(call: Call) -> u64 {
        CALLS[call as usize].load(Ordering::SeqCst)
    }

    /// Makes the host's available memory look like `bytes` at most.
    pub fn set_memory_available(bytes: u64) {
        AVAILABLE.store(bytes, Ordering::SeqCst);
    }

    pub(crate) fn errno(call: Call) -> i32 {
        CALLS[call as usize].fetch_add(1, Ordering::SeqCst);
        ERRORS[call as usize].load(Ordering::SeqCst)
    }

    pub(crate) fn memory_available() -> u64 {
        AVAILABLE.load(Ordering::SeqCst)
    }
}

#[cfg(not(feature = "test_utils"))]
mod state {
    pub(crate) fn errno(_call: super::Call) -> i32 {
        0
    }

    pub(crate) fn memory_available() -> u64 {
        u64::MAX
    }
}

pub(crate) use state::memory_available;
#[cfg(feature = "test_utils")]
pub use state::{calls, clear, set, set_memory_available};

/// The failure that a call of this kind is to have.
pub(crate) fn check(call: Call) -> io::Result<()> {
    match state::errno(call) {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}
