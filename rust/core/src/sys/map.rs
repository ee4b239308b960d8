//! Shared mappings of whole files.

use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::{Error, ErrorKind, Result};

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
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe {
            rustix::mm::mmap(ptr::null_mut(), length, protection, MapFlags::SHARED, file, 0)
        }
        .map_err(|error| Error::io(format!("mapping {bytes} bytes of the pool"), error))?;
        let base = NonNull::new(base.cast())
            .ok_or_else(|| Error::new(ErrorKind::Io, "the pool was mapped at address 0"))?;
        Ok(Self { base, bytes })
    }

    /// The address of the first byte.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// The length in bytes.
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// Never: an empty file can't be mapped.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
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
    #[should_panic(expected = "outside of a mapping")]
    fn a_range_past_the_end_is_refused() {
        let memory = file::memfd("test").unwrap();
        file::set_len(memory.as_fd(), 4096).unwrap();
        Mapping::of(memory.as_fd(), 4096).unwrap().at(4000, 200);
    }
}
