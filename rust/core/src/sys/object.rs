//! What object files need besides [`super::file`]: vectored writes from shared memory, temporaries
//! with a name, directory listings with sizes, and files that change as a whole.

use std::fs::{self, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;

use super::fault::{self, Call};
use crate::{Error, Result};

/// Buffers in one system call: the kernel's limit.
const BUFFERS_MAX: usize = 1024;

/// One name in a directory.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The name; names that are not UTF-8 are left out of listings.
    pub name: String,
    /// Whether it is a directory.
    pub is_dir: bool,
    /// Length in bytes (0 for directories).
    pub len: u64,
    /// Last change, in nanoseconds.
    pub modified: i64,
    /// Its inode.
    pub inode: u64,
}

/// Writes all buffers, one after the other, from `offset` on.
///
/// # Safety
/// Each address must be readable for its number of bytes until the call returns. Other processes
/// may read the memory too, but nobody may write it.
pub unsafe fn pwritev_all(
    file: impl AsFd,
    parts: &[(*const u8, usize)],
    mut offset: u64,
) -> io::Result<()> {
    fault::check(Call::Write)?;
    let vector = |&(address, bytes): &(*const u8, usize)| libc::iovec {
        iov_base: address.cast_mut().cast(),
        iov_len: bytes,
    };
    let mut vectors: Vec<libc::iovec> = parts.iter().map(vector).collect();
    let mut rest = &mut vectors[..];
    while let Some(first) = rest.first_mut() {
        if first.iov_len == 0 {
            rest = &mut rest[1..];
            continue;
        }
        let count = i32::try_from(rest.len().min(BUFFERS_MAX)).map_err(io::Error::other)?;
        let at = libc::off_t::try_from(offset).map_err(io::Error::other)?;
        let descriptor = file.as_fd().as_raw_fd();
        // SAFETY: the vectors lie within what the caller vouched for.
        let written = unsafe { libc::pwritev(descriptor, rest.as_ptr(), count, at) };
        let Ok(mut written) = usize::try_from(written) else {
            let error = io::Error::last_os_error();
            if error.kind() == io::ErrorKind::Interrupted {
                continue;
            }
            return Err(error);
        };
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        offset += written as u64;
        while written > 0 {
            let step = written.min(rest[0].iov_len);
            let left = rest[0].iov_len - step;
            rest[0].iov_base = rest[0].iov_base.cast::<u8>().wrapping_add(step).cast();
            rest[0].iov_len = left;
            written -= step;
            if left == 0 {
                rest = &mut rest[1..];
            }
        }
    }
    Ok(())
}

/// A new file of that name, for writing.
pub fn create_new(path: &Path, direct: bool) -> io::Result<OwnedFd> {
    super::file::check_make(direct)?;
    let flags = libc::O_NOFOLLOW | if direct { libc::O_DIRECT } else { 0 };
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).mode(0o600).custom_flags(flags);
    options.open(path).map(OwnedFd::from)
}

/// Gives a file its final name; `false` when that is taken.
pub fn rename_new(from: &Path, to: &Path) -> Result<bool> {
    let failed = |error: Errno| Error::io(format!("naming {}", to.display()), error);
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(true),
        Err(Errno::EXIST) => Ok(false),
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
            if super::file::inode_of(to)?.is_some() {
                return Ok(false);
            }
            rustix::fs::rename(from, to).map_err(failed).map(|()| true)
        }
        Err(error) => Err(failed(error)),
    }
}

/// Replaces a small file as a whole: readers see the old or the new bytes.
pub fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    /// A sweep of left-over temporaries can only win before the lock is taken.
    const ATTEMPTS: usize = 4;
    let mut result = replace_once(path, bytes);
    for _ in 1..ATTEMPTS {
        match &result {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            _ => break,
        }
        result = replace_once(path, bytes);
    }
    result.map_err(|error| Error::io(format!("writing {}", path.display()), error))
}

fn replace_once(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let random: [u8; 8] = super::file::random_bytes();
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".{name}.{:016x}.tmp", u64::from_le_bytes(random)));
    let file = create_new(&temporary, false)?;
    // A scan removes temporaries that nobody has locked.
    super::lock::flock_exclusive(&file).map_err(io::Error::other)?;
    let written = super::file::pwrite_all(&file, bytes, 0)
        .and_then(|()| rustix::fs::fdatasync(&file).map_err(io::Error::from))
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let left = super::file::unlink(&temporary);
        log::debug!("the temporary of {name} is gone: {left:?}");
    }
    written
}

/// A whole file; `None` where there is none, or it is longer than `most`.
pub fn read_whole(path: &Path, most: u64) -> Result<Option<Vec<u8>>> {
    let Some(file) = super::file::open_read(path, false)? else { return Ok(None) };
    if super::file::stat(&file)?.len > most {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    fs::File::from(file)
        .take(most)
        .read_to_end(&mut bytes)
        .map_err(|error| Error::io(format!("reading {}", path.display()), error))?;
    Ok(Some(bytes))
}

/// Waits until a file's bytes are on the disk.
pub fn sync_data(file: impl AsFd) -> io::Result<()> {
    fault::check(Call::Sync)?;
    Ok(rustix::fs::fdatasync(file)?)
}

/// Removes an empty directory; whether it is gone.
pub fn remove_dir(path: &Path) -> bool {
    rustix::fs::rmdir(path).is_ok()
}

/// The names in a directory with their sizes. Empty where there is none; names that vanish
/// meanwhile and links are left out.
pub fn list(path: &Path) -> Result<Vec<Entry>> {
    let Some(directory) = Directory::open(path)? else { return Ok(Vec::new()) };
    let names = directory.names()?;
    Ok(names.iter().filter_map(|(name, _)| directory.stat(name)).collect())
}

/// An open directory: names in it are found without walking its path again.
#[derive(Debug)]
pub struct Directory<'a> {
    directory: OwnedFd,
    path: &'a Path,
}

impl<'a> Directory<'a> {
    /// Opens a directory; `None` where there is none.
    pub fn open(path: &'a Path) -> Result<Option<Self>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(directory) => Ok(Some(Self { directory, path })),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(Error::io(format!("listing {}", path.display()), error)),
        }
    }

    /// The names in it, and whether each is known to be that of a regular file.
    pub fn names(&self) -> Result<Vec<(String, bool)>> {
        let failed = |error: Errno| Error::io(format!("listing {}", self.path.display()), error);
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.directory).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            if !matches!(name, "." | "..") {
                names.push((name.to_owned(), entry.file_type() == FileType::RegularFile));
            }
        }
        Ok(names)
    }

    /// What a name is; `None` where it vanished, and for what is neither file nor directory.
    pub fn stat(&self, name: &str) -> Option<Entry> {
        let stat = rustix::fs::statat(&self.directory, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        entry_of(name, &stat)
    }

    /// Opens a file to read it, and says what it is; `None` where it vanished.
    pub fn open_file(&self, name: &str) -> Result<Option<(OwnedFd, Entry)>> {
        let failed =
            |error: Errno| Error::io(format!("opening {}", self.path.join(name).display()), error);
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(&self.directory, name, flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        let stat = rustix::fs::fstat(&file).map_err(failed)?;
        Ok(entry_of(name, &stat).map(|entry| (file, entry)))
    }
}

fn entry_of(name: &str, stat: &Stat) -> Option<Entry> {
    let kind = FileType::from_raw_mode(stat.st_mode);
    if !matches!(kind, FileType::Directory | FileType::RegularFile) {
        return None;
    }
    let is_dir = kind == FileType::Directory;
    Some(Entry {
        name: name.to_owned(),
        is_dir,
        len: if is_dir { 0 } else { u64::try_from(stat.st_size).unwrap_or(0) },
        modified: stat.st_mtime * 1_000_000_000 + i64::try_from(stat.st_mtime_nsec).unwrap_or(0),
        inode: stat.st_ino,
    })
}
