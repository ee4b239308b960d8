//! A pool that no other process sees.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

use super::layout::Geometry;
use super::place::{self, Place};
use super::{Files, Pool, PoolOptions, join, lock_byte, members};
use crate::sys::lock::LockFile;
use crate::sys::map::Mapping;
use crate::{Error, ErrorKind, Result, sys};

/// A pool in anonymous memory. Its cache directory, if any, is locked for it alone.
pub(super) fn open(options: &PoolOptions) -> Result<Arc<Pool>> {
    let geometry = Geometry::new(&join::sizes(options))?;
    join::check_cgroup(geometry.file_bytes, options)?;
    let id = sys::file::random_bytes();
    let (life, ctl) = locks(options, &id)?;
    let file = File::from(sys::file::memfd("lakecache-pool")?);
    sys::file::set_len(file.as_fd(), geometry.file_bytes)?;
    let mapping = Arc::new(Mapping::of(file.as_fd(), geometry.file_bytes)?);
    mapping.allocate(file.as_fd(), 0, geometry.data_offset)?;
    join::initialise(&mapping, &geometry, &id, options.cache_dir.as_deref())?;
    let Some(member) = members::join(&mapping, &life, options.disk_capacity_bytes)? else {
        return Err(Error::new(ErrorKind::NoSpace, "a new pool has no free member number"));
    };
    let parts = (mapping, geometry, id, member, Files::new(file, life, ctl));
    let pool = Pool::assemble(parts, None);
    pool.start_reserver(options.role)?;
    Ok(pool)
}

fn locks(options: &PoolOptions, id: &[u8; 16]) -> Result<(LockFile, LockFile)> {
    let Some(dir) = &options.cache_dir else {
        // Nobody else locks with this pool: its lock file needs no name.
        let path = std::env::temp_dir().join(format!(".lakecache-{}.lock", place::hex16(id)));
        let both = LockFile::open(&path).and_then(|life| Ok((life, LockFile::open(&path)?)));
        sys::file::unlink(&path)?;
        return both;
    };
    sys::file::create_dirs(dir)?;
    let place = Place::existing(&options.ram_dir, Some(dir))?;
    let (life, ctl) = (LockFile::open(&place.lock_path())?, LockFile::open(&place.lock_path())?);
    let join_file = LockFile::open(&place.lock_path())?;
    let _join = join::take_join_lock(&join_file, &place)?;
    if !life.exclusive_within(lock_byte::USE, join::PATIENCE)? {
        return Err(Error::new(
            ErrorKind::Unavailable,
            format!(
                "other processes use {}, so that a private pool can't have it: share the pool, or \
                 set another cache_dir",
                place.lock_dir.display()
            ),
        ));
    }
    Ok((life, ctl))
}
