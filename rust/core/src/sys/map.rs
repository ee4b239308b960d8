//! Shared mappings of whole files.

use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::file;
use crate::{Error, ErrorKind, Result};

/// The size of a huge page, and the alignment of mappings: only there can one lie.
const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// Huge pages that the kernel may refuse before a range does without: it looks for memory each time.
const REFUSALS_MAX: u32 = 4;

/// A file mapped readable and writable, shared with every process that maps it.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    bytes: u64,
}

// SAFETY: the value is an address range that stays mapped until it is dropped; who may touch which
// bytes is the business of the modules above.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `bytes` bytes of a file.
    pub fn of(file: BorrowedFd<'_>, bytes: u64) -> Result<Self> {
        let length = usize::try_from(bytes).ok().filter(|length| *length > 0).ok_or_else(|| {
            Error::new(ErrorKind::Config, format!("a file of {bytes} bytes can't be mapped"))
        })?;
        let huge = usize::try_from(HUGE_PAGE_BYTES).expect("a small number");
        let failed = |error| Error::io(format!("mapping {bytes} bytes of the pool"), error);
        let nothing = ProtFlags::empty();
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let room = unsafe {
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            rustix::mm::mmap_anonymous(ptr::null_mut(), length + huge, nothing, flags)
        }
        .map_err(failed)?;
        let lead = room.cast::<u8>().align_offset(huge);
        let base = room.wrapping_byte_add(lead);
        // SAFETY: within the room made above, whose other ends are given back.
        let mapped = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            let flags = MapFlags::SHARED | MapFlags::FIXED;
            rustix::mm::mmap(base, length, protection, flags, file, 0)
        };
        let end = base.wrapping_byte_add(length.next_multiple_of(4096));
        let rest = (room as usize + length + huge).next_multiple_of(4096) - end as usize;
        let unused = match mapped {
            Ok(_) => [(room, lead), (end, rest)],
            Err(_) => [(room, length + huge), (end, 0)],
        };
        for (start, bytes) in unused.into_iter().filter(|(_, bytes)| *bytes > 0) {
            // SAFETY: a part of the room that nobody uses.
            unsafe { rustix::mm::munmap(start, bytes) }.map_err(failed)?;
        }
        let base = mapped.map_err(failed)?;
        let base = NonNull::new(base.cast())
            .ok_or_else(|| Error::new(ErrorKind::Io, "the pool was mapped at address 0"))?;
        Ok(Self { base, bytes })
    }

    /// The address of `bytes` bytes at `offset`, which must lie within the mapping.
    pub fn at(&self, offset: u64, bytes: u64) -> *mut u8 {
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.bytes),
            "bytes {offset}+{bytes} are outside of a mapping of {}",
            self.bytes
        );
        let offset = usize::try_from(offset).expect("an offset within a mapping");
        // SAFETY: within the mapping, by the assertion.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// Takes the space of a range of `file`, which is mapped here, and brings it in: in huge pages as
    /// far as the kernel has them, whatever its settings for shared memory. A disk then reads a
    /// MiB to one place instead of 256, which may double its speed.
    ///
    /// # Errors
    /// As [`file::allocate`]; the range, which nobody may use yet, then has no space at all.
    pub fn allocate(&self, file: BorrowedFd<'_>, offset: u64, bytes: u64) -> Result<()> {
        let collapsed = self.make_huge(file, offset, bytes);
        if let Err(error) = file::allocate(file, offset, bytes) {
            if collapsed {
                file::punch(file, offset, bytes)?;
            }
            return Err(error);
        }
        // Page tables only: without it, the first access to each page takes a fault.
        if let Err(error) = self.populate(offset, bytes) {
            log::debug!("{bytes} bytes at {offset} were not populated: {error}");
        }
        Ok(())
    }

    /// Backs a range with huge pages where it can; whether it took any space.
    fn make_huge(&self, file: BorrowedFd<'_>, offset: u64, bytes: u64) -> bool {
        let (mut refusals, mut at) = (0, offset.next_multiple_of(HUGE_PAGE_BYTES));
        let (first, end) = (at, offset + bytes);
        while at + HUGE_PAGE_BYTES <= end && refusals < REFUSALS_MAX {
            // The kernel collapses a range only if there is something in it.
            if file::allocate(file, at, 4096).is_err() {
                break;
            }
            let start = self.at(at, HUGE_PAGE_BYTES).cast();
            let length = usize::try_from(HUGE_PAGE_BYTES).expect("a small number");
            // SAFETY: the range is mapped; collapsing changes no byte.
            if unsafe { libc::madvise(start, length, libc::MADV_COLLAPSE) } != 0 {
                refusals += 1;
            }
            at += HUGE_PAGE_BYTES;
        }
        at > first
    }

    /// Brings the pages of a range in for writing. Space must have been allocated before.
    pub fn populate(&self, offset: u64, bytes: u64) -> Result<()> {
        let start = self.at(offset, bytes);
        let length = usize::try_from(bytes).expect("a length within a mapping");
        // SAFETY: the range is mapped; populating changes no byte.
        let populated =
            unsafe { rustix::mm::madvise(start.cast(), length, Advice::LinuxPopulateWrite) };
        match populated {
            Ok(()) => Ok(()),
            // Kernels before 5.14 don't know the advice: an atomic addition of nothing touches each
            // page for writing and changes no byte, whoever else uses it.
            Err(rustix::io::Errno::INVAL) => {
                for page in (0..length).step_by(4096) {
                    // SAFETY: within the range; a byte is always aligned.
                    let byte = unsafe { AtomicU8::from_ptr(start.add(page)) };
                    byte.fetch_add(0, Ordering::Relaxed);
                }
                Ok(())
            }
            Err(error) => Err(Error::io(format!("bringing {bytes} bytes of the pool in"), error)),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let length = usize::try_from(self.bytes).expect("a length within memory");
        // SAFETY: mapped by `of` with this length; nobody holds the value any more.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), length) } {
            log::error!("unmapping the pool: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::sys::file;

    #[test]
    fn two_mappings_of_one_file_share_their_bytes() {
        let memory = file::memfd("test").unwrap();
        file::set_len(memory.as_fd(), 8192).unwrap();
        file::allocate(memory.as_fd(), 0, 8192).unwrap();
        let one = Mapping::of(memory.as_fd(), 8192).unwrap();
        let two = Mapping::of(memory.as_fd(), 8192).unwrap();
        one.populate(4096, 4096).unwrap();
        // SAFETY: within the mapping; no other thread touches it.
        unsafe { one.at(5000, 1).write(7) };
        // SAFETY: as above.
        assert_eq!(unsafe { two.at(5000, 1).read() }, 7);
    }

    #[test]
    fn allocated_ranges_keep_what_they_hold_and_begin_where_a_huge_page_can() {
        let bytes = 2 * HUGE_PAGE_BYTES + 8192;
        let memory = file::memfd("test").unwrap();
        file::set_len(memory.as_fd(), bytes).unwrap();
        let mapping = Mapping::of(memory.as_fd(), bytes).unwrap();
        assert!((mapping.at(0, 1) as u64).is_multiple_of(HUGE_PAGE_BYTES));
        file::pwrite_all(&memory, &[7; 10_000], HUGE_PAGE_BYTES - 5000).unwrap();
        mapping.allocate(memory.as_fd(), 4096, bytes - 4096).unwrap();
        for (at, value) in [(5001, 0), (5000, 7), (0, 7)] {
            // SAFETY: within the mapping; no other thread touches it.
            assert_eq!(unsafe { mapping.at(HUGE_PAGE_BYTES - at, 1).read() }, value);
        }
    }

    #[test]
    #[should_panic(expected = "outside of a mapping")]
    fn a_range_past_the_end_is_refused() {
        let memory = file::memfd("test").unwrap();
        file::set_len(memory.as_fd(), 4096).unwrap();
        Mapping::of(memory.as_fd(), 4096).unwrap().at(4000, 200);
    }
}
