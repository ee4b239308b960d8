//! Who uses the pool. A member's life is an exclusive lock on its byte of the lock file, held by a
//! description (`life`) that its I/O rings hold too: the byte comes free only once the process is
//! gone *and* its last read into the arena has landed. Process ids are diagnostics.

use std::sync::atomic::Ordering;

use super::layout::{MEMBER_FREE, MEMBER_USED, MEMBERS_MAX, MEMBERS_OFFSET, MemberRecord};
use super::writer::Writer;
use super::{Pool, lock_byte, place};
use crate::Result;
use crate::sys::lock::LockFile;
use crate::sys::map::Mapping;

/// The record of member `member` in a mapped pool.
pub(super) fn record(mapping: &Mapping, member: u8) -> &MemberRecord {
    assert!(usize::from(member) < MEMBERS_MAX, "member {member}");
    let size = size_of::<MemberRecord>() as u64;
    let offset = MEMBERS_OFFSET + u64::from(member) * size;
    // SAFETY: within the member table, aligned, all atomics, and borrowed from the mapping.
    unsafe { &*mapping.at(offset, size).cast() }
}

#[expect(clippy::cast_possible_truncation, reason = "128 members")]
fn all() -> std::ops::Range<u8> {
    0..MEMBERS_MAX as u8
}

fn byte(member: u8) -> u64 {
    lock_byte::MEMBER_0 + u64::from(member)
}

/// Takes a free member number. Numbers of dead members are not free: their pins still stand, and go
/// when they are reaped. Needs the join lock. `None`: all are taken.
pub(super) fn join(mapping: &Mapping, life: &LockFile, limit: Option<u64>) -> Result<Option<u8>> {
    for member in all() {
        let record = record(mapping, member);
        if record.state.load(Ordering::Acquire) != MEMBER_FREE
            || !life.try_exclusive(byte(member))?
        {
            continue;
        }
        record.pid.store(std::process::id(), Ordering::Relaxed);
        record.start_time.store(place::start_time(), Ordering::Relaxed);
        record.disk_capacity_bytes.store(limit.unwrap_or(u64::MAX), Ordering::Relaxed);
        record.state.store(MEMBER_USED, Ordering::Release);
        return Ok(Some(member));
    }
    Ok(None)
}

impl Pool {
    /// Whether `member` lives, or may still have reads under way into the arena.
    pub fn is_alive(&self, member: u8) -> Result<bool> {
        if member == self.member {
            return Ok(!self.closed.load(Ordering::Acquire));
        }
        if usize::from(member) >= MEMBERS_MAX {
            return Ok(false);
        }
        self.core.files.ctl.is_held_elsewhere(byte(member))
    }

    /// The smallest limit of the live members for the disk tier. A dead member's ends with it.
    pub fn disk_capacity(&self) -> Option<u64> {
        let mut limits: Vec<(u64, u8)> = self
            .used_members()
            .map(|member| {
                let record = record(&self.core.mapping, member);
                (record.disk_capacity_bytes.load(Ordering::Relaxed), member)
            })
            .filter(|&(limit, _)| limit != u64::MAX)
            .collect();
        limits.sort_unstable();
        let alive = |member| member == self.member || self.is_alive(member).unwrap_or(true);
        limits.into_iter().find(|&(_, member)| alive(member)).map(|(limit, _)| limit)
    }

    /// Releases what dead members held, as soon as their last reads have landed. Does nothing where
    /// the writer lock is not to be had within 100 ms.
    pub fn reap_dead(&self) {
        let dead = |member| member != self.member && matches!(self.is_alive(member), Ok(false));
        if !self.used_members().any(dead) {
            return;
        }
        let wait = super::Wait::Within(std::time::Duration::from_millis(100));
        if let Err(error) = self.write(wait, |writer| self.reap_in(writer)) {
            log::debug!("dead members were not reaped: {error}");
        }
    }

    /// Takes each dead member's liveness byte first: nobody but its holder may touch what is its.
    pub(super) fn reap_in(&self, writer: &mut Writer) {
        // Without the tables' hooks, a freed number would inherit the dead member's pins.
        if self.hooks().is_empty() {
            return;
        }
        for member in self.used_members().filter(|&member| member != self.member) {
            if !matches!(self.core.files.ctl.try_exclusive(byte(member)), Ok(true)) {
                continue;
            }
            for hooks in self.hooks() {
                hooks.reap(writer, member);
            }
            let record = record(&self.core.mapping, member);
            let pid = record.pid.load(Ordering::Relaxed);
            record.state.store(MEMBER_FREE, Ordering::Release);
            self.header().reaped.fetch_add(1, Ordering::Relaxed);
            self.core.files.ctl.unlock(byte(member));
            log::info!("released what pool member {member} (process {pid}) held: it is gone");
        }
    }

    /// Gives up membership: what this member still holds is released, and the background thread
    /// ends. The I/O engine must be shut down before. The liveness byte comes free when the last
    /// reference to the pool goes.
    pub fn leave(&self) {
        if self.core.is_forked_child() || self.closed.load(Ordering::Acquire) {
            return;
        }
        self.stop_reserver();
        let wait = super::Wait::Within(std::time::Duration::from_millis(500));
        let released = self.write(wait, |writer| {
            for hooks in self.hooks() {
                hooks.reap(writer, self.member);
            }
            record(&self.core.mapping, self.member).state.store(MEMBER_FREE, Ordering::Release);
        });
        if !matches!(released, Ok(Some(()))) {
            log::debug!("member {} leaves without the writer lock: others reap it", self.member);
        }
        self.closed.store(true, Ordering::Release);
        self.clear_hooks();
    }

    /// Members with a record, dead ones included.
    pub(super) fn used_members(&self) -> impl Iterator<Item = u8> + '_ {
        all().filter(|&member| {
            record(&self.core.mapping, member).state.load(Ordering::Acquire) == MEMBER_USED
        })
    }
}
