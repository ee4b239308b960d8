//! Removing pools that nobody uses. A live member holds its pool file's shared `flock`; whoever has
//! the exclusive one and finds the file still in place may unlink it.

use std::fs::File;
use std::io::ErrorKind as IoKind;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::join::{self, Found};
use super::place;
use crate::sys::lock::flock_exclusive;

const POOLS_MAX: usize = 4096;

/// A pool file under `ram_dir`.
struct Candidate {
    path: PathBuf,
    file: File,
    modified: SystemTime,
    /// As its header records; `None`: memory only.
    cache_dir: Option<PathBuf>,
    mount_namespace: u64,
}

/// The published pools under `ram_dir` whose directories are ours, oldest first.
fn candidates(ram_dir: &Path) -> Vec<Candidate> {
    let Ok(entries) = std::fs::read_dir(ram_dir) else { return Vec::new() };
    let mut found: Vec<Candidate> = entries
        .flatten()
        .take(POOLS_MAX)
        .filter(|entry| crate::sys::file::dir_is_ours(&entry.path()).is_ok())
        .filter_map(|entry| {
            let path = entry.path().join("pool");
            let file = place::open_pool_file(&path).ok()??;
            let Ok(Found::Pool(head)) = join::read_header(&file) else { return None };
            let modified = file.metadata().and_then(|found| found.modified()).ok()?;
            let (cache_dir, mount_namespace) = (head.cache_dir, head.mount_namespace);
            Some(Candidate { path, file, modified, cache_dir, mount_namespace })
        })
        .collect();
    found.sort_by_key(|candidate| candidate.modified);
    found
}

/// Removes pools whose cache directory is gone, as seen in the mount namespace that recorded it.
pub(super) fn remove_orphans(ram_dir: &Path) {
    let namespace = place::mount_namespace();
    for pool in candidates(ram_dir) {
        let gone = pool.cache_dir.as_deref().is_some_and(|dir| {
            // Any other error, such as a missing permission, proves nothing.
            matches!(std::fs::symlink_metadata(dir), Err(error) if error.kind() == IoKind::NotFound)
        });
        if gone && namespace != 0 && pool.mount_namespace == namespace && pool.remove() {
            log::info!("removed the pool {}: its cache directory is gone", pool.path.display());
        }
    }
}

/// Removes the oldest pool of ours that nobody holds. False: there is none.
pub(super) fn remove_idle(ram_dir: &Path) -> bool {
    let removed = candidates(ram_dir).into_iter().find(Candidate::remove);
    if let Some(pool) = &removed {
        log::warn!("removed the idle pool {}: its memory is needed", pool.path.display());
    }
    removed.is_some()
}

impl Candidate {
    /// False: someone holds it, or it is another file by now.
    fn remove(&self) -> bool {
        let removed = matches!(flock_exclusive(&self.file), Ok(true))
            && place::is_same_file(&self.file, &self.path)
            && place::unlink_same(&self.file, &self.path).is_ok();
        if removed {
            remove_dir_if_empty(self.path.parent());
        }
        removed
    }
}

/// A memory-only pool's directory stays, because of its lock file.
pub(super) fn remove_dir_if_empty(dir: Option<&Path>) {
    if let Some(error) = dir.and_then(|dir| std::fs::remove_dir(dir).err()) {
        log::debug!("a pool's directory stays: {error}");
    }
}
