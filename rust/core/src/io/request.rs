//! One read request, cut into pieces, and what becomes of each piece's result.
//!
//! A [`Piece`] is owned by one I/O thread at a time. Pieces of a request meet in its [`Transfer`], and
//! the one that ends last gives the [`Ending`], with which `done` is called.

use std::alloc::{self, Layout};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::{BLOCK_BYTES, Done, ReadOutcome, ReadRequest, locked};
use crate::sys;

/// Tries that may bring nothing before a piece gives up.
const FRUITLESS_TRIES: u32 = 64;

/// A pause after the kernel said that it lacks resources just now.
const PAUSE: Duration = Duration::from_millis(1);

/// What the pieces of one request share.
struct Transfer {
    file: Arc<OwnedFd>,
    direct: bool,
    /// Pieces that have not ended.
    left: AtomicUsize,
    /// Bytes of the request that precede the file's end, where a piece met it.
    ended_at: AtomicU64,
    failed: AtomicBool,
    error: Mutex<Option<io::Error>>,
    done: Mutex<Option<Done>>,
}

/// A part of a request that one system call reads.
pub(super) struct Piece {
    transfer: Arc<Transfer>,
    /// Where it begins in the request.
    at: u64,
    /// Where it begins in the file.
    offset: u64,
    address: *mut u8,
    bytes: u32,
    /// Bytes read so far, of the bounce buffer where there is one.
    read: u32,
    fruitless: u32,
    bounce: Option<Bounce>,
}

// SAFETY: the submitter vouches for the memory at `address` until the transfer is done, whichever
// thread fills it; the rest is `Send`.
unsafe impl Send for Piece {}

/// The system call that a piece needs next.
pub(super) struct Read {
    pub(super) file: RawFd,
    pub(super) address: *mut u8,
    pub(super) bytes: u32,
    pub(super) offset: u64,
}

/// What a system call's result made of a piece.
pub(super) enum Progress {
    /// It needs another call.
    Unfinished(Piece),
    /// It has ended.
    Ended,
    /// It has ended as the last one of its request.
    Last(Ending),
}

/// How a request ended, of which its submitter is still to be told.
pub(super) struct Ending {
    done: Done,
    result: io::Result<ReadOutcome>,
}

enum End {
    Full,
    FileEnded,
    Failed(io::Error),
}

impl Piece {
    /// Cuts a request. An empty one is done at once and gives no piece.
    pub(super) fn cut(request: ReadRequest, piece_bytes: u32) -> Vec<Self> {
        let ReadRequest { file, direct, offset, segments, done } = request;
        let transfer = Arc::new(Transfer {
            file,
            direct,
            left: AtomicUsize::new(0),
            ended_at: AtomicU64::new(u64::MAX),
            failed: AtomicBool::new(false),
            error: Mutex::new(None),
            done: Mutex::new(Some(done)),
        });
        let mut pieces = Vec::new();
        let mut at = 0;
        for segment in segments {
            let mut within = 0;
            while within < segment.bytes {
                let bytes = piece_length(segment.bytes - within, piece_bytes);
                // The segment's length is one of memory, so its parts are as well.
                let address = segment.address.wrapping_add(usize::try_from(within).unwrap_or(0));
                pieces.push(Self::new(&transfer, at, offset + at, address, bytes));
                within += u64::from(bytes);
                at += u64::from(bytes);
            }
        }
        transfer.left.store(pieces.len(), Ordering::Release);
        if pieces.is_empty()
            && let Some(ending) = transfer.conclude()
        {
            ending.tell();
        }
        pieces
    }

    fn new(t: &Arc<Transfer>, at: u64, offset: u64, address: *mut u8, bytes: u32) -> Self {
        let aligned = |value: u64| value.is_multiple_of(BLOCK_BYTES);
        let odd = !aligned(address as u64) || !aligned(offset) || !aligned(u64::from(bytes));
        let bounce = (t.direct && odd).then(|| Bounce::around(offset, bytes));
        let transfer = Arc::clone(t);
        Self { transfer, at, offset, address, bytes, read: 0, fruitless: 0, bounce }
    }

    /// The bytes that it occupies while it is in flight.
    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.bytes)
    }

    /// Whether reading it has no use any more, because another piece of its request failed.
    pub(super) fn is_moot(&self) -> bool {
        self.transfer.failed.load(Ordering::Relaxed)
    }

    /// The file that it reads.
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.transfer.file.as_fd()
    }

    /// What to read next. Never nothing.
    pub(super) fn next_read(&self) -> Read {
        let (address, bytes, offset) = match &self.bounce {
            Some(bounce) => (bounce.address(), bounce.bytes, bounce.offset(self.offset)),
            None => (self.address, self.bytes, self.offset),
        };
        Read {
            file: self.transfer.file.as_raw_fd(),
            address: address.wrapping_add(self.read as usize),
            bytes: bytes - self.read,
            offset: offset + u64::from(self.read),
        }
    }

    /// Takes a system call's result.
    pub(super) fn completed(mut self, result: io::Result<u32>) -> Progress {
        match result {
            Ok(0) => self.end(End::FileEnded),
            Ok(read) => self.advance(read),
            Err(error) => {
                let again = match error.kind() {
                    io::ErrorKind::Interrupted => true,
                    io::ErrorKind::WouldBlock => {
                        std::thread::sleep(PAUSE);
                        true
                    }
                    _ => false,
                };
                self.fruitless += 1;
                if again && self.fruitless < FRUITLESS_TRIES {
                    return Progress::Unfinished(self);
                }
                self.end(End::Failed(error))
            }
        }
    }

    fn advance(mut self, read: u32) -> Progress {
        self.read += read;
        if self.read >= self.lead() + self.bytes {
            return self.end(End::Full);
        }
        let rest = u64::from(self.read) % BLOCK_BYTES;
        if !self.transfer.direct || rest == 0 {
            return Progress::Unfinished(self);
        }
        // Direct reads can't go on inside a block. Mostly the file ends here, which its length
        // proves; else the block is read again.
        match sys::file::stat(&*self.transfer.file) {
            Ok(stat) if stat.len <= self.next_read().offset => self.end(End::FileEnded),
            Ok(_) if self.fruitless < FRUITLESS_TRIES => {
                self.fruitless += 1;
                self.read -= u32::try_from(rest).unwrap_or(0);
                Progress::Unfinished(self)
            }
            Ok(_) => {
                self.end(End::Failed(io::Error::other("a direct read kept ending in a block")))
            }
            Err(error) => self.end(End::Failed(io::Error::other(error))),
        }
    }

    /// Ends it unread: with `error`, or without a word because its request failed already.
    pub(super) fn refuse(self, error: Option<io::Error>) {
        if let Progress::Last(ending) = self.end(error.map_or(End::Full, End::Failed)) {
            ending.tell();
        }
    }

    fn lead(&self) -> u32 {
        self.bounce.as_ref().map_or(0, |bounce| bounce.lead)
    }

    fn end(self, end: End) -> Progress {
        let got = self.read.saturating_sub(self.lead()).min(self.bytes);
        if let Some(bounce) = &self.bounce {
            // SAFETY: `got` bytes after the lead were read into the bounce buffer, the submitter
            // vouches for `bytes` bytes at `address`, and a fresh allocation overlaps neither.
            unsafe {
                bounce.address().add(bounce.lead as usize).copy_to(self.address, got as usize);
            };
        }
        let transfer = &self.transfer;
        match end {
            End::Full => {}
            End::FileEnded => {
                transfer.ended_at.fetch_min(self.at + u64::from(got), Ordering::AcqRel);
            }
            End::Failed(error) => {
                locked(&transfer.error).get_or_insert(error);
                transfer.failed.store(true, Ordering::Release);
            }
        }
        if transfer.left.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(ending) = transfer.conclude()
        {
            return Progress::Last(ending);
        }
        Progress::Ended
    }
}

impl Transfer {
    fn conclude(&self) -> Option<Ending> {
        let done = locked(&self.done).take()?;
        let result = match (locked(&self.error).take(), self.ended_at.load(Ordering::Acquire)) {
            (Some(error), _) => Err(error),
            (None, u64::MAX) => Ok(ReadOutcome::Complete),
            (None, read) => Ok(ReadOutcome::Short { read }),
        };
        Some(Ending { done, result })
    }
}

impl Ending {
    /// Tells the submitter, who may take a checksum now.
    pub(super) fn tell(self) {
        let Self { done, result } = self;
        if catch_unwind(AssertUnwindSafe(|| done(result))).is_err() {
            log::error!("a read's completion panicked; the I/O thread goes on");
        }
    }
}

/// The next piece of a segment's rest: whole blocks first, an odd end by itself.
fn piece_length(rest: u64, piece_bytes: u32) -> u32 {
    let whole = rest - rest % BLOCK_BYTES;
    let bytes = if whole == 0 { rest } else { whole };
    u32::try_from(bytes).unwrap_or(u32::MAX).min(piece_bytes)
}

/// Aligned memory around a piece that direct I/O can't read in place.
struct Bounce {
    memory: NonNull<u8>,
    layout: Layout,
    /// Bytes before the piece's first.
    lead: u32,
    bytes: u32,
}

impl Bounce {
    fn around(offset: u64, bytes: u32) -> Self {
        let block = u32::try_from(BLOCK_BYTES).unwrap_or(4096);
        let lead = u32::try_from(offset % BLOCK_BYTES).unwrap_or(0);
        let bytes = (lead + bytes).next_multiple_of(block);
        let layout = Layout::from_size_align(bytes as usize, block as usize)
            .unwrap_or_else(|_| Layout::new::<[u8; 4096]>());
        // SAFETY: the size is at least one block.
        let memory = unsafe { alloc::alloc(layout) };
        let Some(memory) = NonNull::new(memory) else { alloc::handle_alloc_error(layout) };
        Self { memory, layout, lead, bytes }
    }

    fn address(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    /// Where its first byte is in the file.
    fn offset(&self, piece: u64) -> u64 {
        piece - u64::from(self.lead)
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        // SAFETY: allocated by `around` with this layout; the kernel is done with it (I1).
        unsafe { alloc::dealloc(self.memory.as_ptr(), self.layout) };
    }
}
