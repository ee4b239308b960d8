//! Placeholder for the system calls that the pool needs, until the `sys` module takes over.
#![allow(clippy::all, clippy::pedantic, missing_docs, reason = "replaced by `sys` as a whole")]

pub mod lock {
    use std::fs::OpenOptions;
    use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::Path;
    use std::time::{Duration, Instant};

    use crate::{Error, Result};

    #[derive(Debug)]
    pub struct LockFile(OwnedFd);

    impl LockFile {
        pub fn open(path: &Path) -> Result<Self> {
            OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
                .open(path)
                .map(|f| Self(f.into()))
                .map_err(|e| Error::io(format!("opening {}", path.display()), e))
        }
        fn set(&self, kind: i32, byte: u64, command: i32) -> std::io::Result<i16> {
            let mut l: libc::flock = unsafe { std::mem::zeroed() };
            l.l_type = kind as i16;
            l.l_whence = libc::SEEK_SET as i16;
            l.l_start = byte as i64;
            l.l_len = 1;
            if unsafe { libc::fcntl(self.0.as_raw_fd(), command, &mut l) } < 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(l.l_type)
        }
        fn attempt(&self, kind: i32, byte: u64) -> Result<bool> {
            match self.set(kind, byte, libc::F_OFD_SETLK) {
                Ok(_) => Ok(true),
                Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
                    Ok(false)
                }
                Err(e) => Err(Error::io("locking", e)),
            }
        }
        pub fn try_exclusive(&self, byte: u64) -> Result<bool> {
            self.attempt(libc::F_WRLCK, byte)
        }
        pub fn try_shared(&self, byte: u64) -> Result<bool> {
            self.attempt(libc::F_RDLCK, byte)
        }
        pub fn exclusive_within(&self, byte: u64, deadline: Duration) -> Result<bool> {
            let end = Instant::now() + deadline;
            loop {
                if self.try_exclusive(byte)? {
                    return Ok(true);
                }
                if Instant::now() >= end {
                    return Ok(false);
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        pub fn unlock(&self, byte: u64) {
            drop(self.set(libc::F_UNLCK, byte, libc::F_OFD_SETLK));
        }
        pub fn is_held_elsewhere(&self, byte: u64) -> Result<bool> {
            self.set(libc::F_WRLCK, byte, libc::F_OFD_GETLK)
                .map(|t| t != libc::F_UNLCK as i16)
                .map_err(|e| Error::io("asking for a lock", e))
        }
        pub fn as_fd(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }
    }
}

pub mod map {
    use std::os::fd::BorrowedFd;
    use std::ptr::NonNull;

    use crate::{Error, Result};

    #[derive(Debug)]
    pub struct Mapping(NonNull<u8>, u64);
    unsafe impl Send for Mapping {}
    unsafe impl Sync for Mapping {}

    impl Mapping {
        pub fn of(fd: BorrowedFd, bytes: u64) -> Result<Self> {
            use rustix::mm::{MapFlags, ProtFlags, mmap};
            let p = unsafe {
                mmap(
                    std::ptr::null_mut(),
                    bytes as usize,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::SHARED,
                    fd,
                    0,
                )
            }
            .map_err(|e| Error::io("mapping", e))?;
            Ok(Self(NonNull::new(p.cast()).expect("mmap"), bytes))
        }
        pub fn base(&self) -> NonNull<u8> {
            self.0
        }
        pub fn len(&self) -> u64 {
            self.1
        }
        pub fn at(&self, offset: u64, bytes: u64) -> *mut u8 {
            assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.1));
            unsafe { self.0.as_ptr().add(offset as usize) }
        }
    }
    impl Drop for Mapping {
        fn drop(&mut self) {
            drop(unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), self.1 as usize) });
        }
    }
}

pub mod file {
    use std::os::fd::BorrowedFd;
    use std::os::fd::OwnedFd;

    use crate::{Error, Result};

    pub fn memfd(name: &str) -> Result<OwnedFd> {
        rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)
            .map_err(|e| Error::io("memfd_create", e))
    }
    pub fn set_len(fd: BorrowedFd, bytes: u64) -> Result<()> {
        rustix::fs::ftruncate(fd, bytes).map_err(|e| Error::io("ftruncate", e))
    }
    pub fn allocate(fd: BorrowedFd, offset: u64, bytes: u64) -> Result<()> {
        rustix::fs::fallocate(fd, rustix::fs::FallocateFlags::empty(), offset, bytes)
            .map_err(|e| Error::io("fallocate", e))
    }
    pub fn random_bytes<const N: usize>() -> [u8; N] {
        use std::hash::{BuildHasher, RandomState};
        std::array::from_fn(|n| RandomState::new().hash_one(n) as u8)
    }
}

pub mod fork {
    pub fn generation() -> u64 {
        u64::from(std::process::id())
    }
}
