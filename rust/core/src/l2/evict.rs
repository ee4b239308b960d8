//! Making room: the least recent objects go, those being read excepted.
//!
//! A victim is DYING before its file is touched, so that no lookup finds it; its bytes count until
//! its name is gone (D3). The exclusive lock is held until then: a lease that comes later fails.

use std::path::Path;
use std::sync::atomic::Ordering;

use super::publish::temporary_prefix;
use super::table::{Outcome, Snapshot};
use super::{DiskStore, Finish, LOCK_WAIT, count};
use crate::{Result, sys};

/// Victims at a time.
const BATCH: usize = 64;
/// Objects being read that are passed over in one search for room.
const LEASED_MAX: usize = 512;

/// What a search for room ended with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Room {
    Made,
    /// Whatever could go is being read.
    Leased,
    /// Nothing could go.
    Nothing,
}

/// What became of a file that was to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Removed,
    /// There was nothing of that name.
    Missing,
    /// Somebody reads or writes it.
    InUse,
}

impl DiskStore {
    /// Evicts until `bytes` are free (at least one object).
    pub(super) fn make_room(&self, bytes: u64) -> Result<Room> {
        let (mut freed, mut leased) = (0, 0);
        while freed < bytes.max(1) {
            let most = if leased > 0 { BATCH.min(LEASED_MAX) } else { BATCH };
            let victims = self.write_lock(LOCK_WAIT.into(), |writer| {
                self.table.condemn(writer, bytes.max(1) - freed, most)
            })?;
            let Some(victims) = victims else { return Ok(Room::Nothing) };
            if victims.is_empty() {
                return Ok(if leased > 0 { Room::Leased } else { Room::Nothing });
            }
            let (gone, busy) = self.remove_victims(&victims)?;
            freed += gone;
            leased += busy;
            if leased >= LEASED_MAX || (gone == 0 && self.all_leased(leased)) {
                return Ok(if freed >= bytes.max(1) { Room::Made } else { Room::Leased });
            }
        }
        Ok(Room::Made)
    }

    /// Whether as many victims were passed over as there are objects.
    fn all_leased(&self, leased: usize) -> bool {
        leased >= self.table.root().count.load(Ordering::Relaxed) as usize
    }

    /// Removes the files of DYING records that are ours: the bytes freed, and how many are in use.
    pub(super) fn remove_victims(&self, victims: &[Snapshot]) -> Result<(u64, usize)> {
        let (mut bytes, mut busy, mut failure) = (0, 0, None);
        let mut finished = Vec::with_capacity(victims.len());
        for victim in victims {
            let to = match self.remove_victim(victim) {
                Ok(Fate::Removed | Fate::Missing) => {
                    bytes += victim.file_bytes;
                    count(&self.counters.evicted);
                    Outcome::Free
                }
                Ok(Fate::InUse) => {
                    busy += 1;
                    count(&self.counters.leased_skips);
                    Outcome::InUse
                }
                Err(error) => {
                    failure = Some(error);
                    Outcome::InUse
                }
            };
            finished.push(Finish { record: victim.index, word: victim.word, to });
        }
        self.settle(finished);
        failure.map_or(Ok((bytes, busy)), Err)
    }

    fn remove_victim(&self, victim: &Snapshot) -> Result<Fate> {
        let Some(namespace) = self.pool.namespace(victim.namespace) else {
            return Ok(Fate::Missing);
        };
        let path = self.path(&namespace, &victim.info.key);
        remove_idle(&path)
    }

    /// Decides about records whose owners died at work: their files tell what became of them.
    pub(super) fn settle_orphans(&self) -> Result<()> {
        while self.table.has_orphans() {
            let adopted = self
                .write_lock(LOCK_WAIT.into(), |writer| self.table.adopt_orphans(writer, BATCH))?;
            let Some(adopted) = adopted.filter(|adopted| !adopted.is_empty()) else {
                return Ok(());
            };
            let mut finished = Vec::with_capacity(adopted.len());
            for orphan in &adopted {
                let to = match self.settle_orphan(orphan) {
                    Ok(true) => Outcome::Present,
                    Ok(false) => Outcome::Free,
                    Err(error) => {
                        // The bytes count on: an unreadable file may well be there.
                        log::warn!("an object's state is unknown: {error}");
                        Outcome::Present
                    }
                };
                finished.push(Finish { record: orphan.index, word: orphan.word, to });
            }
            log::info!("settled {} objects that dead processes were at", finished.len());
            self.settle(finished);
        }
        Ok(())
    }

    /// Whether the object's file is there, whole; anything else under its name goes.
    fn settle_orphan(&self, orphan: &Snapshot) -> Result<bool> {
        let Some(namespace) = self.pool.namespace(orphan.namespace) else { return Ok(false) };
        let path = self.path(&namespace, &orphan.info.key);
        let dir = path.parent().unwrap_or(&self.dir);
        let prefix = temporary_prefix(&orphan.info.key);
        for entry in sys::object::list(dir)? {
            if entry.name.starts_with(&prefix) {
                sys::file::unlink(&dir.join(entry.name))?;
            }
        }
        let Some(file) = sys::file::open_read(&path, false)? else { return Ok(false) };
        let len = sys::file::stat(&file)?.len;
        let header = super::lease::header_of(&file, &path)?;
        let whole = header.is_ok_and(|header| {
            header.check(&namespace, &orphan.info.key, len).is_ok() && len == orphan.file_bytes
        });
        if !whole {
            sys::file::unlink(&path)?;
        }
        Ok(whole)
    }
}

/// Removes what has the name, unless it is a file that somebody is at.
pub(super) fn remove_idle(path: &Path) -> Result<Fate> {
    // Locked until the name is gone.
    let _file = match sys::file::open_read(path, false) {
        Ok(None) => return Ok(Fate::Missing),
        Ok(Some(file)) if !sys::lock::flock_exclusive(&file)? => return Ok(Fate::InUse),
        Ok(file) => file,
        Err(error) if sys::file::is_unopenable(&error) => None,
        Err(error) => return Err(error),
    };
    Ok(if sys::file::remove(path)? { Fate::Removed } else { Fate::Missing })
}
