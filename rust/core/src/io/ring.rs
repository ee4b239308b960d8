//! One `io_uring`: its making, its submissions and its completions. Used by one thread only.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, opcode, squeue};

use super::Segment;
use super::request::Read;
use crate::sys::event::Event;
use crate::sys::fault::{self, Call};
use crate::{Error, ErrorKind, Result};

/// Reads in flight at most. The submission queue is twice as long, and the completion queue longer
/// still, so neither overflows.
pub(super) const DEPTH: u32 = 128;

/// Entries of the submission queue.
const SUBMISSIONS: u32 = DEPTH * 2;

const EVENT: u64 = u64::MAX;

/// `IORING_ENTER_GETEVENTS`.
const ENTER_GETEVENTS: u32 = 1;

/// The kernel's limit of one registered buffer.
const BUFFER_BYTES: u64 = 1 << 30;

/// Registered buffers at most, of 16 384 that the kernel allows.
const BUFFERS: u32 = 4096;

/// One thing that the kernel has ended.
pub(super) enum Completion {
    /// Somebody signalled the event.
    Event,
    /// The read with this number.
    Read {
        /// As given to [`Ring::push`].
        slot: u32,
        /// Bytes read.
        result: io::Result<u32>,
    },
}

pub(super) struct Ring {
    /// Dropped first: closing it makes the kernel's use of what follows end, or so long as a read is
    /// in flight its pages stay the kernel's.
    uring: IoUring,
    /// What the event's read fills; at a fixed address.
    counter: Box<u64>,
    armed: bool,
    /// Whether waits can have a timeout (Linux 5.11).
    timed: bool,
    /// What the latest entries carry, as many as the submission queue can hold.
    pushed: VecDeque<u64>,
    /// Registered memory, in the order of addresses: start, end and number.
    buffers: Vec<(u64, u64, u16)>,
    /// Whether more memory may be registered.
    registering: bool,
}

impl Ring {
    /// Makes a ring that holds `life` from before its first read until after its last.
    pub(super) fn new(life: RawFd) -> Result<Self> {
        let ring = build().map_err(|error| Error::io("making a ring (io_uring_setup)", error))?;
        // In the ring's table the open file lives as long as any read of the ring, even after this
        // process was killed: its lock tells others that the kernel may still write (I1).
        ring.submitter()
            .register_files(&[life])
            .map_err(|error| Error::io("registering the liveness lock", error))?;
        let mut probe = Probe::new();
        ring.submitter()
            .register_probe(&mut probe)
            .map_err(|error| Error::io("asking which operations the ring has", error))?;
        if !probe.is_supported(opcode::Read::CODE) {
            return Err(Error::new(
                ErrorKind::Unavailable,
                "the ring has no reads (Linux 5.6 has)",
            ));
        }
        let registering = ring.submitter().register_buffers_sparse(BUFFERS).is_ok();
        let timed = ring.params().is_feature_ext_arg();
        let counter = Box::new(0);
        let (pushed, buffers) = (VecDeque::new(), Vec::new());
        Ok(Self { uring: ring, counter, armed: false, timed, pushed, buffers, registering })
    }

    /// Reads one block and waits for it; for the probe, before anything else is in flight.
    pub(super) fn read_one(&mut self, file: &OwnedFd, to: Segment) -> Result<u32> {
        let bytes = u32::try_from(to.bytes).unwrap_or(u32::MAX);
        let read = Read { file: file.as_raw_fd(), address: to.address, bytes, offset: 0 };
        for _ in 0..8 {
            if !self.push(&read, 0) {
                break;
            }
            let result = loop {
                self.submit_and_wait(Duration::from_secs(1))?;
                if let Some(Completion::Read { result, .. }) = self.next() {
                    break result;
                }
            };
            match result {
                Err(error) if is_passing(&error) => {}
                result => return result.map_err(|e| Error::io("reading through the ring", e)),
            }
        }
        Err(Error::new(ErrorKind::Unavailable, "the ring takes no read"))
    }

    /// Queues a read; `false` when the submission queue is full. The caller keeps the memory and the
    /// file untouched until the completion with this slot has come.
    pub(super) fn push(&mut self, read: &Read, slot: u32) -> bool {
        let Read { file, address, bytes, offset } = *read;
        let entry = match self.buffer_of(address as u64, bytes) {
            Some(buffer) => {
                opcode::ReadFixed::new(Fd(file), address, bytes, buffer).offset(offset).build()
            }
            None => opcode::Read::new(Fd(file), address, bytes).offset(offset).build(),
        };
        self.push_entry(&entry.user_data(u64::from(slot)))
    }

    /// Keeps a read of the event in flight.
    pub(super) fn arm(&mut self, event: &Event) -> Result<()> {
        if self.armed {
            return Ok(());
        }
        let to: *mut u64 = &raw mut *self.counter;
        let entry = opcode::Read::new(Fd(event.as_raw_fd()), to.cast(), 8).build();
        if !self.push_entry(&entry.user_data(EVENT)) {
            return Err(Error::new(ErrorKind::Io, "the ring has no room for its wake-up"));
        }
        self.armed = true;
        Ok(())
    }

    /// Whether a read of the event is in flight.
    pub(super) fn is_armed(&self) -> bool {
        self.armed
    }

    fn push_entry(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: the entry's memory and descriptor stay valid until its completion: a piece owns
        // both and is kept, in its slot, by the thread that owns the ring, which reaps before it
        // drops; the event's counter belongs to the ring.
        let pushed = unsafe { self.uring.submission().push(entry) }.is_ok();
        if pushed {
            if self.pushed.len() == SUBMISSIONS as usize {
                self.pushed.pop_front();
            }
            self.pushed.push_back(entry.get_user_data());
        }
        pushed
    }

    /// Submits what is queued and waits for a completion, at most for `timeout` where the kernel can.
    pub(super) fn submit_and_wait(&mut self, timeout: Duration) -> Result<()> {
        let result = if let Err(error) = fault::check(Call::Ring) {
            Err(error)
        } else if self.timed {
            let time = Timespec::from(timeout);
            self.uring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&time))
        } else {
            self.uring.submit_and_wait(1)
        };
        match result {
            Ok(_) => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::ETIME) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            // The kernel is short of something, or completions must be reaped first.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => {
                std::thread::sleep(Duration::from_millis(1));
                Ok(())
            }
            Err(error) => Err(Error::io("waiting for reads (io_uring_enter)", error)),
        }
    }

    /// The slots of reads that were pushed and that the kernel never took; for a ring that failed
    /// and from which only [`Ring::collect`] is called from then on.
    pub(super) fn never_submitted(&mut self) -> Vec<u32> {
        let left = self.uring.submission().len().min(self.pushed.len());
        let slots = self.pushed.split_off(self.pushed.len() - left);
        slots.into_iter().filter_map(|data| u32::try_from(data).ok()).collect()
    }

    /// Lets the kernel post completions, if it still does, and submits nothing; for a ring that
    /// failed.
    pub(super) fn collect(&mut self) {
        let collect = fault::check(Call::Ring).and_then(|()| {
            // SAFETY: no argument, and nothing is submitted.
            unsafe { self.uring.submitter().enter::<()>(0, 0, ENTER_GETEVENTS, None) }
        });
        if let Err(error) = collect {
            log::debug!("collecting from a failed ring: {error}");
        }
    }

    /// The next completion, if there is one.
    pub(super) fn next(&mut self) -> Option<Completion> {
        let entry = self.uring.completion().next()?;
        if entry.user_data() == EVENT {
            self.armed = false;
            return Some(Completion::Event);
        }
        let result = u32::try_from(entry.result())
            .map_err(|_| io::Error::from_raw_os_error(-entry.result()));
        let result = fault::check(Call::Read).and(result);
        Some(Completion::Read {
            slot: u32::try_from(entry.user_data()).unwrap_or(u32::MAX),
            result,
        })
    }

    /// Registers memory, as far as the limit of locked memory allows; reads elsewhere go on as
    /// before. The bytes registered.
    pub(super) fn register(&mut self, memory: Segment) -> u64 {
        let mut registered = 0;
        let (mut start, end) = (memory.address as u64, memory.address as u64 + memory.bytes);
        while self.registering && start < end {
            let bytes = (end - start).min(BUFFER_BYTES);
            match self.register_one(start, bytes) {
                Ok(()) => registered += bytes,
                Err(error) => {
                    self.registering = false;
                    log::info!(
                        "reads use more CPU than they need to: memory can't be registered \
                         ({error}); a higher limit of locked memory (ulimit -l) allows it"
                    );
                }
            }
            start += bytes;
        }
        registered
    }

    fn register_one(&mut self, start: u64, bytes: u64) -> io::Result<()> {
        let number = u16::try_from(self.buffers.len()).map_err(io::Error::other)?;
        if u32::from(number) >= BUFFERS {
            return Err(io::Error::other("too many buffers"));
        }
        let memory = libc::iovec {
            iov_base: start as *mut libc::c_void,
            iov_len: usize::try_from(bytes).map_err(io::Error::other)?,
        };
        // SAFETY: the memory is the submitter's to vouch for; the kernel pins its pages, so that even
        // after an unmapping it writes to nothing else.
        unsafe {
            self.uring.submitter().register_buffers_update(u32::from(number), &[memory], None)
        }?;
        let at = self.buffers.partition_point(|(from, _, _)| *from < start);
        self.buffers.insert(at, (start, start + bytes, number));
        Ok(())
    }

    fn buffer_of(&self, address: u64, bytes: u32) -> Option<u16> {
        let after = self.buffers.partition_point(|(start, _, _)| *start <= address);
        let (_, end, number) = self.buffers.get(after.checked_sub(1)?)?;
        (address + u64::from(bytes) <= *end).then_some(*number)
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring keeps its descriptor open as long as it lives.
        unsafe { BorrowedFd::borrow_raw(self.uring.as_raw_fd()) }
    }
}

fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}

/// The best ring that this kernel makes: completions handled by the waiting thread itself (6.1),
/// or without interrupting it (5.19), or any.
fn build() -> io::Result<IoUring> {
    let mut last = io::Error::from_raw_os_error(libc::EINVAL);
    for attempt in 0..3 {
        let mut builder = IoUring::builder();
        // A forked child gets no mapping of the ring, which would keep it, and the lock, alive.
        builder.dontfork();
        match attempt {
            0 => builder.setup_single_issuer().setup_defer_taskrun(),
            1 => builder.setup_coop_taskrun(),
            _ => &mut builder,
        };
        match builder.build(SUBMISSIONS) {
            Ok(ring) => return Ok(ring),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}
