//! Where a pool's files lie, and the small files that tie a cache directory to its pool.
//!
//! ```text
//! <cache_dir>/lock                 byte locks, see `lock_byte`; never deleted
//! <cache_dir>/pool-id              names the pool's directory under ram_dir
//! <cache_dir>/pool-incarnation     which file of that name the live members use
//! <ram_dir>/<pool id>/pool         the pool
//! <ram_dir>/memory-<uid>/...       all four, without a cache directory
//! ```

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind as IoKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::sys;
use crate::{Error, ErrorKind, Result};

const POOL_ID_FILE: &str = "pool-id";
const INCARNATION_FILE: &str = "pool-incarnation";

/// The directories of one pool.
#[expect(clippy::struct_field_names, reason = "named as the settings are")]
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) ram_dir: PathBuf,
    /// Holds the lock file and the small files.
    pub(super) lock_dir: PathBuf,
    /// Absolute; `None`: memory only.
    pub(super) cache_dir: Option<PathBuf>,
}

impl Place {
    /// Creates the directories where they are missing.
    pub(super) fn prepare(ram_dir: &Path, cache_dir: Option<&Path>) -> Result<Self> {
        make_ram_dir(ram_dir)?;
        let lock_dir = match cache_dir {
            Some(dir) => dir.to_path_buf(),
            None => memory_only_dir(ram_dir),
        };
        sys::file::create_dirs(&lock_dir)?;
        if cache_dir.is_none() {
            sys::file::dir_is_ours(&lock_dir)?;
        }
        Self::existing(ram_dir, cache_dir)
    }

    /// As [`Place::prepare`], of directories that exist.
    pub(super) fn existing(ram_dir: &Path, cache_dir: Option<&Path>) -> Result<Self> {
        let cache_dir = cache_dir.map(|dir| {
            let what = || format!("resolving the cache directory {}", dir.display());
            std::fs::canonicalize(dir).map_err(|error| Error::io(what(), error))
        });
        let cache_dir = cache_dir.transpose()?;
        let lock_dir = cache_dir.clone().unwrap_or_else(|| memory_only_dir(ram_dir));
        Ok(Self { ram_dir: ram_dir.to_path_buf(), lock_dir, cache_dir })
    }

    pub(super) fn lock_path(&self) -> PathBuf {
        self.lock_dir.join("lock")
    }

    /// The pool's id; a new one is stored where there is none. Needs the join lock.
    pub(super) fn pool_id(&self) -> Result<[u8; 16]> {
        if let Some(id) = self.stored_pool_id()? {
            return Ok(id);
        }
        self.new_pool_id()
    }

    /// A new id, stored. Needs the join lock.
    pub(super) fn new_pool_id(&self) -> Result<[u8; 16]> {
        let id = sys::file::random_bytes();
        self.replace_file(POOL_ID_FILE, &hex16(&id))?;
        Ok(id)
    }

    /// The stored id, if there is one that can be read as such.
    pub(super) fn stored_pool_id(&self) -> Result<Option<[u8; 16]>> {
        Ok(self.read_file(POOL_ID_FILE)?.and_then(|text| unhex16(text.trim())))
    }

    pub(super) fn incarnation(&self) -> Result<Option<u64>> {
        let text = self.read_file(INCARNATION_FILE)?;
        Ok(text.and_then(|text| u64::from_str_radix(text.trim(), 16).ok()))
    }

    pub(super) fn set_incarnation(&self, incarnation: u64) -> Result<()> {
        self.replace_file(INCARNATION_FILE, &format!("{incarnation:016x}"))
    }

    /// The directory of the pool file, which must be ours.
    pub(super) fn pool_dir(&self, id: &[u8; 16]) -> PathBuf {
        match &self.cache_dir {
            Some(_) => self.ram_dir.join(hex16(id)),
            None => self.lock_dir.clone(),
        }
    }

    fn read_file(&self, name: &str) -> Result<Option<String>> {
        let path = self.lock_dir.join(name);
        match std::fs::read(&path) {
            Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
            Err(error) if error.kind() == IoKind::NotFound => Ok(None),
            Err(error) => Err(Error::io(format!("reading {}", path.display()), error)),
        }
    }

    fn replace_file(&self, name: &str, text: &str) -> Result<()> {
        let path = self.lock_dir.join(name);
        let temporary = self.lock_dir.join(format!(".{name}.new"));
        let write = || -> io::Result<()> {
            use std::io::Write;
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(true).mode(0o600);
            let mut file = options.custom_flags(libc::O_NOFOLLOW).open(&temporary)?;
            writeln!(file, "{text}")?;
            std::fs::rename(&temporary, &path)
        };
        write().map_err(|error| Error::io(format!("writing {}", path.display()), error))
    }
}

fn memory_only_dir(ram_dir: &Path) -> PathBuf {
    ram_dir.join(format!("memory-{}", sys::file::user()))
}

/// Several users share it, as they do `/tmp`; each pool's directory is its user's alone.
fn make_ram_dir(ram_dir: &Path) -> Result<()> {
    let failed = |error| Error::io(format!("creating ram_dir {}", ram_dir.display()), error);
    match std::fs::metadata(ram_dir) {
        Ok(found) if found.is_dir() => return Ok(()),
        Ok(_) => {
            let text = format!("ram_dir {} is not a directory", ram_dir.display());
            return Err(Error::new(ErrorKind::Config, text));
        }
        Err(error) if error.kind() == IoKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    std::fs::create_dir_all(ram_dir).map_err(failed)?;
    std::fs::set_permissions(ram_dir, PermissionsExt::from_mode(0o1777)).map_err(failed)
}

/// Opens an existing pool file. `None`: there is none.
pub(super) fn open_pool_file(path: &Path) -> Result<Option<File>> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC);
    match options.open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == IoKind::NotFound => Ok(None),
        Err(error) => Err(Error::io(format!("opening the pool {}", path.display()), error)),
    }
}

/// Creates a pool file that does not exist.
pub(super) fn create_pool_file(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).mode(0o600);
    options
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(path)
        .map_err(|error| Error::io(format!("creating the pool {}", path.display()), error))
}

/// Whether `path` still names the file that `file` is.
pub(super) fn is_same_file(file: &File, path: &Path) -> bool {
    let identity = |found: &std::fs::Metadata| (found.dev(), found.ino());
    match (file.metadata(), std::fs::symlink_metadata(path)) {
        (Ok(ours), Ok(named)) => identity(&ours) == identity(&named),
        _ => false,
    }
}

/// Unlinks `path` if it still names `file`.
pub(super) fn unlink_same(file: &File, path: &Path) -> Result<()> {
    if !is_same_file(file, path) {
        return Ok(());
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != IoKind::NotFound => {
            Err(Error::io(format!("removing the pool {}", path.display()), error))
        }
        _ => Ok(()),
    }
}

/// Identifies this process's mount namespace; 0 where that cannot be known.
pub(super) fn mount_namespace() -> u64 {
    std::fs::metadata("/proc/self/ns/mnt").map_or(0, |found| found.ino())
}

pub(super) fn hex16(id: &[u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(*id))
}

pub(super) fn unhex16(text: &str) -> Option<[u8; 16]> {
    let plain = text.len() == 32 && text.bytes().all(|c| c.is_ascii_hexdigit());
    plain.then(|| u128::from_str_radix(text, 16).ok()).flatten().map(u128::to_be_bytes)
}
