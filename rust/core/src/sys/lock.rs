//! Kernel locks: the only proof of life that this crate accepts.
//!
//! Byte-range locks are of the open-file-description kind (OFD): they belong to one opening of the
//! file, so that two openings in one process exclude each other, and the kernel frees them when the
//! last descriptor of that opening is gone.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;

use super::fork;
use crate::{Error, Result};

/// How long a waiting locker rests between tries.
const RETRY: Duration = Duration::from_micros(200);

/// One opening of a lock file. Closed in a forked child, so that the child keeps no lock alive.
#[derive(Debug)]
pub struct LockFile {
    file: OwnedFd,
    path: PathBuf,
    _closed_in_child: fork::Guard,
}

impl LockFile {
    /// Opens `path`, made with mode 0600 if it is missing; refuses a symbolic link.
    pub fn open(path: &Path) -> Result<Self> {
        let file: OwnedFd = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
            .open(path)
            .map_err(|error| Error::io(format!("opening the lock file {}", path.display()), error))?
            .into();
        let guard = fork::close_in_child(file.as_fd());
        Ok(Self { file, path: path.to_owned(), _closed_in_child: guard })
    }

    /// Takes `byte` for us alone, if nobody else has it.
    pub fn try_exclusive(&self, byte: u64) -> Result<bool> {
        self.attempt(libc::F_WRLCK, byte)
    }

    /// Takes `byte` together with other sharers, if nobody has it exclusively.
    pub fn try_shared(&self, byte: u64) -> Result<bool> {
        self.attempt(libc::F_RDLCK, byte)
    }

    /// Tries for `byte` until `deadline` has passed; `false` then.
    pub fn exclusive_within(&self, byte: u64, deadline: Duration) -> Result<bool> {
        let end = Instant::now() + deadline;
        loop {
            if self.try_exclusive(byte)? {
                return Ok(true);
            }
            if Instant::now() >= end {
                return Ok(false);
            }
            std::thread::sleep(RETRY);
        }
    }

    /// Gives `byte` back.
    pub fn unlock(&self, byte: u64) {
        if let Err(error) = self.control(libc::F_OFD_SETLK, libc::F_UNLCK, byte) {
            log::error!("unlocking byte {byte} of {}: {error}", self.path.display());
        }
    }

    /// Whether another opening holds `byte` in any way.
    pub fn is_held_elsewhere(&self, byte: u64) -> Result<bool> {
        let kind = self
            .control(libc::F_OFD_GETLK, libc::F_WRLCK, byte)
            .map_err(|error| self.failed("asking for", byte, error))?;
        Ok(i32::from(kind) != libc::F_UNLCK)
    }

    /// Whether the path still names the file that was opened.
    pub fn is_in_place(&self) -> Result<bool> {
        let opened = super::file::stat(&self.file)?;
        Ok(super::file::inode_of(&self.path)? == Some((opened.device, opened.inode)))
    }

    /// The descriptor, to be registered where its life must extend.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn attempt(&self, kind: i32, byte: u64) -> Result<bool> {
        match self.control(libc::F_OFD_SETLK, kind, byte) {
            Ok(_) => Ok(true),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
                Ok(false)
            }
            Err(error) => Err(self.failed("locking", byte, error)),
        }
    }

    fn failed(&self, what: &str, byte: u64, error: io::Error) -> Error {
        Error::io(format!("{what} byte {byte} of {}", self.path.display()), error)
    }

    fn control(&self, command: i32, kind: i32, byte: u64) -> io::Result<i16> {
        let small = |value: i32| i16::try_from(value).map_err(io::Error::other);
        let mut lock = libc::flock {
            l_type: small(kind)?,
            l_whence: small(libc::SEEK_SET)?,
            l_start: libc::off_t::try_from(byte).map_err(io::Error::other)?,
            l_len: 1,
            l_pid: 0,
        };
        loop {
            // SAFETY: the descriptor is open and `lock` is a valid `struct flock` for the call.
            let status = unsafe { libc::fcntl(self.file.as_raw_fd(), command, &raw mut lock) };
            if status == 0 {
                return Ok(lock.l_type);
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }
}

/// Locks a whole file together with other sharers (`flock`), if nobody has it exclusively.
pub fn flock_shared(file: impl AsFd) -> Result<bool> {
    flock(file, FlockOperation::NonBlockingLockShared)
}

/// Locks a whole file for us alone (`flock`), if nobody else has it.
pub fn flock_exclusive(file: impl AsFd) -> Result<bool> {
    flock(file, FlockOperation::NonBlockingLockExclusive)
}

fn flock(file: impl AsFd, operation: FlockOperation) -> Result<bool> {
    match rustix::io::retry_on_intr(|| rustix::fs::flock(&file, operation)) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(Error::io("locking an object file", error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_openings_in_one_process_exclude_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let (one, two) = (LockFile::open(&path).unwrap(), LockFile::open(&path).unwrap());
        assert!(one.try_exclusive(3).unwrap());
        assert!(!two.try_exclusive(3).unwrap() && !two.try_shared(3).unwrap());
        assert!(two.is_held_elsewhere(3).unwrap() && !two.is_held_elsewhere(4).unwrap());
        assert!(two.try_exclusive(4).unwrap());
        assert!(!two.exclusive_within(3, Duration::from_millis(2)).unwrap());
        one.unlock(3);
        assert!(two.exclusive_within(3, Duration::from_secs(5)).unwrap());
        drop(two);
        assert!(!one.is_held_elsewhere(3).unwrap());
    }

    #[test]
    fn a_symbolic_link_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/dev/null", dir.path().join("lock")).unwrap();
        let error = LockFile::open(&dir.path().join("lock")).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ELOOP));
    }
}
