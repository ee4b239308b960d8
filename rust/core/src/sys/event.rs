//! Wake-ups that a ring can wait for.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::{EventfdFlags, eventfd};

use crate::{Error, Result};

/// An `eventfd`. Blocking on purpose: a ring's read of a non-blocking one would not wait.
#[derive(Debug)]
pub struct Event(OwnedFd);

impl Event {
    /// A new one, not signalled.
    pub fn new() -> Result<Self> {
        eventfd(0, EventfdFlags::CLOEXEC)
            .map(Self)
            .map_err(|error| Error::io("making a wake-up descriptor", error))
    }

    /// Wakes whoever reads it, now or later.
    pub fn signal(&self) {
        let one = 1_u64.to_ne_bytes();
        if let Err(error) = rustix::io::retry_on_intr(|| rustix::io::write(&self.0, &one)) {
            log::error!("waking an I/O thread: {error}");
        }
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Event {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
