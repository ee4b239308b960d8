//! Files and directories that hold what prompts contain: mode 0600 and 0700, links never followed.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FallocateFlags, FileType, MemfdFlags, Mode, OFlags};
use rustix::io::Errno;

use super::fault::{self, Call};
use crate::{Error, ErrorKind, Result};

/// What a descriptor points to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileStat {
    /// The device it is on.
    pub device: u64,
    /// Its inode.
    pub inode: u64,
    /// Whether it is a regular file.
    pub is_file: bool,
    /// Its length in bytes.
    pub len: u64,
    /// Names it has; 0 once it was unlinked.
    pub nlink: u64,
}

fn failed(what: &str, path: &Path, error: impl Into<io::Error>) -> Error {
    Error::io(format!("{what} {}", path.display()), error)
}

/// The user on whose behalf files are made.
pub fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Makes a directory and those above it, each new one with mode 0700.
pub fn create_dirs(path: &Path) -> Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(|error| failed("making the directory", path, error))
}

/// Refuses a directory that another user owns or may write to.
pub fn dir_is_ours(path: &Path) -> Result<()> {
    let meta = fs::symlink_metadata(path).map_err(|error| failed("looking at", path, error))?;
    let us = user();
    if meta.is_dir() && meta.uid() == us && meta.mode() & 0o022 == 0 {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Config,
        format!(
            "{} must be a directory of user {us} that no other user may write to; it belongs to user \
             {} with mode {:o}: remove it or choose another place",
            path.display(),
            meta.uid(),
            meta.mode() & 0o7777
        ),
    ))
}

/// Opens a file for reading and writing, made with mode 0600 if it is missing. Whether it was made
/// is told by its length of 0.
pub fn open_or_create(path: &Path) -> Result<OwnedFd> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
        .map(OwnedFd::from)
        .map_err(|error| failed("opening", path, error))
}

/// Opens a file for reading; `None` where there is none. A pipe in its place doesn't block.
pub fn open_read(path: &Path, direct: bool) -> Result<Option<OwnedFd>> {
    check_direct(direct).map_err(|error| failed("opening", path, error))?;
    let kept = if direct { libc::O_DIRECT } else { 0 };
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | kept;
    match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => {
            // io_uring would answer EAGAIN to reads that have to wait.
            rustix::fs::fcntl_setfl(&file, OFlags::from_bits_retain(kept.cast_unsigned()))
                .map_err(|error| Error::io(format!("opening {}", path.display()), error))?;
            Ok(Some(file.into()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed("opening", path, error)),
    }
}

/// Whether [`open_read`] failed because of what has the name, and will fail again for as long as that
/// has it; not because of the disk, nor for want of descriptors or memory.
pub fn is_unopenable(error: &Error) -> bool {
    matches!(
        error.errno(),
        Some(libc::ELOOP | libc::EACCES | libc::EPERM | libc::ENXIO | libc::ENODEV)
    )
}

/// An anonymous file in memory.
pub fn memfd(name: &str) -> Result<OwnedFd> {
    rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)
        .map_err(|error| Error::io("making a file in memory", error))
}

/// Sets a file's length.
pub fn set_len(file: BorrowedFd<'_>, bytes: u64) -> Result<()> {
    rustix::fs::ftruncate(file, bytes)
        .map_err(|error| Error::io(format!("setting a file's length to {bytes}"), error))
}

/// Takes the space of a range, so that using it later can't fail.
pub fn allocate(file: BorrowedFd<'_>, offset: u64, bytes: u64) -> Result<()> {
    rustix::io::retry_on_intr(|| {
        rustix::fs::fallocate(file, FallocateFlags::empty(), offset, bytes)
    })
    .map_err(|error| Error::io(format!("reserving {bytes} bytes at {offset}"), error))
}

/// Gives the space of a range back; the file's length stays.
pub fn punch(file: BorrowedFd<'_>, offset: u64, bytes: u64) -> Result<()> {
    rustix::io::retry_on_intr(|| {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(file, flags, offset, bytes)
    })
    .map_err(|error| Error::io(format!("giving {bytes} bytes at {offset} back"), error))
}

/// A file without a name in `dir`, for [`link_fd`] to name; `None` where the file system has none.
pub fn unnamed_in(dir: &Path, direct: bool) -> Result<Option<OwnedFd>> {
    check_make(direct).map_err(|error| failed("making a file in", dir, error))?;
    let mut flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    if direct {
        flags |= OFlags::DIRECT;
    }
    match rustix::fs::open(dir, flags, Mode::from_raw_mode(0o600)) {
        Ok(file) => Ok(Some(file)),
        Err(Errno::OPNOTSUPP | Errno::ISDIR) => Ok(None),
        Err(error) => Err(failed("making a file in", dir, error)),
    }
}

/// Names an unnamed file. `false` when the name is taken.
pub fn link_fd(file: BorrowedFd<'_>, to: &Path) -> Result<bool> {
    let by_number = format!("/proc/self/fd/{}", file.as_raw_fd());
    match rustix::fs::linkat(CWD, by_number, CWD, to, AtFlags::SYMLINK_FOLLOW) {
        Ok(()) => Ok(true),
        Err(Errno::EXIST) => Ok(false),
        Err(error) => Err(failed("naming", to, error)),
    }
}

/// Writes a whole buffer at `offset`.
pub fn pwrite_all(file: impl AsFd, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let written = rustix::io::retry_on_intr(|| rustix::io::pwrite(&file, bytes, offset))?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        bytes = &bytes[written..];
        offset += written as u64;
    }
    Ok(())
}

/// Reads until the buffer is full or the file ends; the number of bytes read.
pub fn pread_full(file: impl AsFd, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    fault::check(Call::Header)?;
    let mut done = 0;
    while done < buffer.len() {
        let rest = &mut buffer[done..];
        let at = offset + done as u64;
        let read = rustix::io::retry_on_intr(|| rustix::io::pread(&file, &mut *rest, at))?;
        if read == 0 {
            break;
        }
        done += read;
    }
    Ok(done)
}

/// Reads once, at most `bytes` bytes, into memory that other processes may share, which is why it
/// takes an address and not a slice.
///
/// # Safety
/// The `bytes` bytes at `address` must be mapped for writing until the call returns.
pub unsafe fn pread_at(
    file: BorrowedFd<'_>,
    address: *mut u8,
    bytes: u32,
    offset: u64,
) -> io::Result<u32> {
    fault::check(Call::Read)?;
    let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
    // SAFETY: the caller keeps the range mapped.
    let read = unsafe { libc::pread(file.as_raw_fd(), address.cast(), bytes as usize, offset) };
    u32::try_from(read).map_err(|_| io::Error::last_os_error())
}

fn check_direct(direct: bool) -> io::Result<()> {
    if direct { fault::check(Call::Direct) } else { Ok(()) }
}

/// What [`fault`] says about making a file.
pub(super) fn check_make(direct: bool) -> io::Result<()> {
    fault::check(Call::Make).and_then(|()| check_direct(direct))
}

/// Switches an open file to direct I/O; `false` where its file system has none.
pub fn set_direct(file: impl AsFd) -> Result<bool> {
    match check_direct(true).map_err(|_| Errno::INVAL).and_then(|()| switch_direct(file, true)) {
        Ok(()) => Ok(true),
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(false),
        Err(error) => Err(Error::io("switching a file to direct I/O", error)),
    }
}

/// Switches an open file back to reads through the page cache.
pub fn clear_direct(file: impl AsFd) -> Result<()> {
    switch_direct(file, false)
        .map_err(|error| Error::io("switching a file to reads through the page cache", error))
}

fn switch_direct(file: impl AsFd, direct: bool) -> rustix::io::Result<()> {
    let mut flags = rustix::fs::fcntl_getfl(&file)?;
    flags.set(OFlags::DIRECT, direct);
    rustix::fs::fcntl_setfl(&file, flags)
}

/// What a descriptor points to.
pub fn stat(file: impl AsFd) -> Result<FileStat> {
    let stat = rustix::fs::fstat(file).map_err(|error| Error::io("looking at a file", error))?;
    Ok(FileStat {
        device: stat.st_dev,
        inode: stat.st_ino,
        is_file: FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile,
        len: u64::try_from(stat.st_size).unwrap_or(0),
        nlink: stat.st_nlink,
    })
}

/// Removes a name; `false` where there was none.
pub fn unlink(path: &Path) -> Result<bool> {
    match rustix::fs::unlink(path) {
        Ok(()) => Ok(true),
        Err(Errno::NOENT) => Ok(false),
        Err(error) => Err(failed("removing", path, error)),
    }
}

/// Removes whatever has the name, a directory only if it is empty; `false` where there was nothing.
pub fn remove(path: &Path) -> Result<bool> {
    match unlink(path) {
        Err(error) if error.errno() == Some(libc::EISDIR) && super::object::remove_dir(path) => {
            Ok(true)
        }
        other => other,
    }
}

/// Device and inode that a name points to now; `None` where there is none.
pub fn inode_of(path: &Path) -> Result<Option<(u64, u64)>> {
    match fs::symlink_metadata(path) {
        Ok(meta) => Ok(Some((meta.dev(), meta.ino()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed("looking at", path, error)),
    }
}

/// Bytes of the kernel's random source.
pub fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let mut done = 0;
    while done < N {
        // SAFETY: the range is ours to write and N - done bytes long.
        let got = unsafe { libc::getrandom(bytes[done..].as_mut_ptr().cast(), N - done, 0) };
        // Only a signal can interrupt the call for so few bytes.
        done += usize::try_from(got).unwrap_or(0);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn an_unnamed_file_is_published_once() {
        let dir = tempfile::tempdir().unwrap();
        create_dirs(&dir.path().join("a/b")).unwrap();
        let mode = fs::metadata(dir.path().join("a/b")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        let path = dir.path().join("a/b/object");
        let Some(file) = unnamed_in(path.parent().unwrap(), false).unwrap() else { return };
        pwrite_all(&file, b"bytes", 4).unwrap();
        assert_eq!(stat(&file).unwrap().nlink, 0);
        assert!(link_fd(file.as_fd(), &path).unwrap());
        let second = unnamed_in(path.parent().unwrap(), false).unwrap().unwrap();
        assert!(!link_fd(second.as_fd(), &path).unwrap());
        let mut buffer = [1; 16];
        assert_eq!(pread_full(&file, &mut buffer, 0).unwrap(), 9);
        assert_eq!(&buffer[..9], b"\0\0\0\0bytes");
        let found = stat(&file).unwrap();
        assert_eq!(inode_of(&path).unwrap(), Some((found.device, found.inode)));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(unlink(&path).unwrap() && !unlink(&path).unwrap());
        assert!(open_read(&path, false).unwrap().is_none());
    }

    #[test]
    fn a_directory_that_others_may_write_to_is_not_ours() {
        let dir = tempfile::tempdir().unwrap();
        dir_is_ours(dir.path()).unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let error = dir_is_ours(dir.path()).unwrap_err();
        assert!(error.to_string().contains("777"), "{error}");
    }

    #[test]
    fn random_bytes_differ() {
        assert_ne!(random_bytes::<16>(), random_bytes::<16>());
    }
}
