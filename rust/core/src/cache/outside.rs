//! What operators ask of a store that others have open, or nobody: what its disk allows, and to
//! empty it.

use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use crate::io::{self, EngineChoice, EngineOptions};
use crate::l2::{self, Removed};
use crate::pool::Pool;
use crate::{Result, sys};

/// What a cache directory's file system and the kernel allow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskAbilities {
    /// The engine that `io_engine: auto` gives.
    pub io_engine: &'static str,
    /// Why it is not the best one.
    pub io_engine_reason: Option<String>,
    /// Whether files can be read with direct I/O.
    pub direct: bool,
    /// Whether files can be made without a name.
    pub unnamed: bool,
    /// Bytes of the file system.
    pub total_bytes: u64,
    /// Of these, what may still be used.
    pub free_bytes: u64,
    /// Of these, what stays free in any case.
    pub reserve_bytes: u64,
}

/// What was removed, see [`clear`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cleared {
    /// Memory of the pool; `None`: there was no pool, or it was to stay.
    pub memory_bytes: Option<u64>,
    /// From the disk.
    pub disk: Removed,
}

/// Tries what an engine would do in `cache_dir`: unnamed files are made and read.
pub fn disk_abilities(cache_dir: &Path) -> Result<DiskAbilities> {
    sys::file::dir_is_ours(cache_dir)?;
    let unnamed = sys::file::unnamed_in(cache_dir, false)?.is_some();
    let life = sys::file::memfd("lakecache-probe")?;
    let options = EngineOptions { pread_threads: 1, ..EngineOptions::default() };
    let opened = io::open_engine(EngineChoice::Auto, cache_dir, life.as_fd(), &options)?;
    opened.engine.shutdown(Duration::from_secs(1));
    let space = sys::limits::fs_space(cache_dir)?;
    Ok(DiskAbilities {
        io_engine: opened.engine.kind().name(),
        io_engine_reason: opened.reason,
        direct: opened.direct,
        unnamed,
        total_bytes: space.total,
        free_bytes: space.free,
        reserve_bytes: space.total / super::FREE_SPACE_RESERVE,
    })
}

/// Removes the pool (`memory`) and the objects (`disk`) of `cache_dir`, or the user's memory-only
/// pool. `None`: nothing was ever kept there.
///
/// # Errors
/// [`crate::ErrorKind::Unavailable`] while anybody uses it.
pub fn clear(
    ram_dir: &Path,
    cache_dir: Option<&Path>,
    memory: bool,
    disk: bool,
) -> Result<Option<Cleared>> {
    Pool::while_unused(ram_dir, cache_dir, |unused| {
        let memory_bytes = if memory { unused.remove_pool()? } else { None };
        let mut cleared = Cleared { memory_bytes, ..Cleared::default() };
        if disk && cache_dir.is_some() {
            cleared.disk = l2::remove_contents(unused.dir())?;
        }
        Ok(cleared)
    })
}
