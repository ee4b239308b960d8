//! A pool seen from outside, by who is no member: what there is, who uses it, and a time without
//! users in which it may be removed.

use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use super::join::{self, Found, JoinLock};
use super::layout::Header;
use super::place::{self, Place};
use super::reserve::{lacking, reserved_bytes};
use super::sweep::remove_dir_if_empty;
use super::{Geometry, Pool, PoolOptions, Table, lock_byte, members};
use crate::sys::lock::{LockFile, flock_exclusive};
use crate::sys::map::Mapping;
use crate::{Error, ErrorKind, Result};

/// What can be seen of a pool without becoming a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolView {
    /// The pool's file.
    pub path: PathBuf,
    /// Bytes of the whole file.
    pub file_bytes: u64,
    /// Of these, what the tables take.
    pub metadata_bytes: u64,
    /// Of the data bytes, those that have memory.
    pub reserved_bytes: u64,
    /// Of those, what objects take.
    pub used_bytes: u64,
    /// Objects in memory.
    pub objects: u32,
    /// The smallest limit of the live members for the disk tier.
    pub disk_capacity_bytes: Option<u64>,
    /// Whoever has a record, the dead that are not reaped yet included.
    pub members: Vec<MemberView>,
}

/// One opening of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemberView {
    /// Its process, as that one numbers itself.
    pub pid: u32,
    /// Whether its lock is held.
    pub alive: bool,
    /// Its limit for the disk tier.
    pub disk_capacity_bytes: Option<u64>,
}

/// The place of a pool that nobody uses, nor can begin to use until this is dropped.
pub struct Unused<'a> {
    place: &'a Place,
    _join: JoinLock<'a>,
}

impl Pool {
    /// Whether anybody uses `cache_dir` (or the user's memory-only pool), and the pool, if there is
    /// one that this version knows. Changes nothing and waits for nobody.
    pub fn look(ram_dir: &Path, cache_dir: Option<&Path>) -> Result<(bool, Option<PoolView>)> {
        let place = Place::existing(ram_dir, cache_dir)?;
        if !was_used(&place)? {
            return Ok((false, None));
        }
        let lock = LockFile::open(&place.lock_path())?;
        Ok((lock.is_held_elsewhere(lock_byte::USE)?, view(&place, &lock)?))
    }

    /// What a pool with these options would lack now: it would be reserved later, or never. Where it
    /// has memory already, that counts as there. `ram_dir` must exist.
    ///
    /// # Errors
    /// As [`Pool::open`] where it can never fit.
    pub fn lacks(options: &PoolOptions) -> Result<Option<String>> {
        let geometry = Geometry::new(&join::sizes(options))?;
        join::check_fits(&geometry, options)?;
        let (_, pool) = Self::look(&options.ram_dir, options.cache_dir.as_deref())?;
        let had = pool.map_or(0, |pool| pool.metadata_bytes + pool.reserved_bytes);
        lacking(geometry.file_bytes.saturating_sub(had), Some(&options.ram_dir))
    }

    /// Calls `work` at a time when nobody uses `cache_dir` (or the user's memory-only pool); whoever
    /// starts meanwhile waits for its end. `None`: nothing was ever kept there.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] with the numbers of the processes that use it.
    pub fn while_unused<T>(
        ram_dir: &Path,
        cache_dir: Option<&Path>,
        work: impl FnOnce(&Unused<'_>) -> Result<T>,
    ) -> Result<Option<T>> {
        let place = Place::existing(ram_dir, cache_dir)?;
        if !was_used(&place)? {
            return Ok(None);
        }
        let lock = LockFile::open(&place.lock_path())?;
        let join = join::take_join_lock(&lock, &place)?;
        if !join::within_patience(|| lock.is_held_elsewhere(lock_byte::USE).map(|held| !held))? {
            return Err(in_use(&place, &lock));
        }
        work(&Unused { place: &place, _join: join }).map(Some)
    }
}

impl Unused<'_> {
    /// Where the pool's lock is kept: the cache directory as the kernel names it.
    pub fn dir(&self) -> &Path {
        &self.place.lock_dir
    }

    /// Removes the pool, of whatever version; the memory freed. `None`: there was none.
    pub fn remove_pool(&self) -> Result<Option<u64>> {
        let Some(path) = pool_path(self.place)? else { return Ok(None) };
        let Some(file) = place::open_pool_file(&path)? else { return Ok(None) };
        if !join::within_patience(|| flock_exclusive(&file))? {
            let text = format!("the pool {} is in use: stop its engines first", path.display());
            return Err(Error::new(ErrorKind::Unavailable, text));
        }
        let bytes = file.metadata().map_or(0, |found| found.blocks() * 512);
        place::unlink_same(&file, &path)?;
        if self.place.cache_dir.is_some() {
            remove_dir_if_empty(path.parent());
        }
        Ok(Some(bytes))
    }
}

/// Whether a pool was ever opened there.
fn was_used(place: &Place) -> Result<bool> {
    let path = place.lock_path();
    path.try_exists().map_err(|error| Error::io(format!("looking for {}", path.display()), error))
}

fn pool_path(place: &Place) -> Result<Option<PathBuf>> {
    Ok(place.stored_pool_id()?.map(|id| place.pool_dir(&id).join("pool")))
}

fn view(place: &Place, lock: &LockFile) -> Result<Option<PoolView>> {
    let Some(path) = pool_path(place)? else { return Ok(None) };
    let Some(file) = place::open_pool_file(&path)? else { return Ok(None) };
    let Found::Pool(head) = join::read_header(&file)? else { return Ok(None) };
    let geometry = head.geometry;
    let mapping = Mapping::of(file.as_fd(), geometry.data_offset)?;
    let members = members::views(&mapping, lock)?;
    let alive = members.iter().filter(|member| member.alive);
    let root = &Header::of(&mapping).roots[Table::L1 as usize];
    Ok(Some(PoolView {
        path,
        file_bytes: geometry.file_bytes,
        metadata_bytes: geometry.data_offset,
        reserved_bytes: reserved_bytes(&mapping, &geometry),
        used_bytes: root.bytes.load(Ordering::Relaxed),
        objects: root.count.load(Ordering::Relaxed),
        disk_capacity_bytes: alive.filter_map(|member| member.disk_capacity_bytes).min(),
        members,
    }))
}

fn in_use(place: &Place, lock: &LockFile) -> Error {
    let seen = view(place, lock).ok().flatten();
    let mut pids: Vec<u32> = seen
        .iter()
        .flat_map(|pool| &pool.members)
        .filter(|member| member.alive)
        .map(|member| member.pid)
        .collect();
    pids.sort_unstable();
    pids.dedup();
    let numbers: Vec<_> = pids.iter().map(u32::to_string).collect();
    let who = match &numbers[..] {
        [] => "a process whose pool cannot be seen from here: stop it".to_owned(),
        [pid] => format!("process {pid}: stop it"),
        _ => format!("processes {}: stop them", numbers.join(", ")),
    };
    let text = format!("{} is in use by {who} first", place.lock_dir.display());
    Error::new(ErrorKind::Unavailable, text)
}
