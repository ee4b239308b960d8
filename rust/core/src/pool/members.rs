//! Who uses the pool. A member's life is an exclusive lock on its byte of the lock file, held by a
//! description (`life`) that its I/O rings hold too: the byte comes free only once the process is
//! gone *and* its last read into the arena has landed. What a GPU copies for it may land later still
//! (see [`super::death`]): a member that has GPUs copy says so, and is reaped later.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::death::{self, Identity};
use super::layout::{Header, MEMBER_FREE, MEMBER_USED, MEMBERS_MAX, MEMBERS_OFFSET, MemberRecord};
use super::writer::Writer;
use super::{MemberView, Pool, lock_byte};
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
        record.start_time.store(death::own_start_time(), Ordering::Relaxed);
        let joined = Header::of(mapping).clock.0.fetch_add(1, Ordering::SeqCst);
        record.joined.store(joined, Ordering::SeqCst);
        record.gpu_copies.store(0, Ordering::SeqCst);
        record.disk_capacity_bytes.store(limit.unwrap_or(u64::MAX), Ordering::Relaxed);
        record.state.store(MEMBER_USED, Ordering::Release);
        return Ok(Some(member));
    }
    Ok(None)
}

/// The members of a mapped pool, as seen by one that is none.
pub(super) fn views(mapping: &Mapping, lock: &LockFile) -> Result<Vec<MemberView>> {
    let mut views = Vec::new();
    for member in all() {
        let record = record(mapping, member);
        if record.state.load(Ordering::Acquire) != MEMBER_USED {
            continue;
        }
        let limit = record.disk_capacity_bytes.load(Ordering::Relaxed);
        views.push(MemberView {
            pid: record.pid.load(Ordering::Relaxed),
            alive: lock.is_held_elsewhere(byte(member))?,
            disk_capacity_bytes: (limit != u64::MAX).then_some(limit),
        });
    }
    Ok(views)
}

impl MemberRecord {
    fn identity(&self) -> Identity {
        Identity {
            pid: self.pid.load(Ordering::SeqCst),
            start_time: self.start_time.load(Ordering::SeqCst),
            joined: self.joined.load(Ordering::SeqCst),
        }
    }
}

impl Pool {
    /// Says that GPUs copy into the pool's memory for this member, before the first such copy. Their
    /// copies may outlast the process for a moment, so that others reap it later if it is killed,
    /// and [`Pool::leave`] may only be called when none is under way.
    pub fn declare_gpu_copies(&self) {
        record(&self.core.mapping, self.member).gpu_copies.store(1, Ordering::SeqCst);
    }

    /// Whether GPUs copy for this member.
    pub fn has_gpu_copies(&self) -> bool {
        record(&self.core.mapping, self.member).gpu_copies.load(Ordering::SeqCst) != 0
    }

    /// Whether `member` lives, or may still have reads under way into the arena. What is not alive
    /// keeps its pins and half-made objects until it is reaped.
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

    /// Releases what dead members held, as soon as nothing can land in it any more. Does nothing where
    /// the writer lock is not to be had within 100 ms. What is put off is for the next call.
    pub fn reap_dead(&self) {
        // All of them are looked at: the time of each runs from when its death is first seen.
        let due = self.used_members().filter(|&member| self.is_due(member)).count();
        if due == 0 {
            return;
        }
        let wait = super::Wait::Within(std::time::Duration::from_millis(100));
        if let Err(error) = self.write(wait, |writer| self.reap_in(writer)) {
            log::debug!("dead members were not reaped: {error}");
        }
    }

    fn is_due(&self, member: u8) -> bool {
        let record = record(&self.core.mapping, member);
        let who = record.identity();
        member != self.member
            && matches!(self.is_alive(member), Ok(false))
            // The number may have passed to another; if not, it is this one whose byte was free.
            && record.identity() == who
            && self.is_settled(member, who)
    }

    /// Whether nothing that the dead member `who` began can change the pool's memory any more.
    fn is_settled(&self, member: u8, who: Identity) -> bool {
        let record = record(&self.core.mapping, member);
        record.gpu_copies.load(Ordering::SeqCst) == 0
            || self.deaths.is_settled(member, who, Instant::now(), || {
                death::look_up(Path::new("/proc"), who.pid, who.start_time)
            })
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
            let record = record(&self.core.mapping, member);
            if !self.is_settled(member, record.identity()) {
                self.core.files.ctl.unlock(byte(member));
                continue;
            }
            for hooks in self.hooks() {
                hooks.reap(writer, member);
            }
            self.deaths.forget(member);
            let pid = record.pid.load(Ordering::Relaxed);
            record.state.store(MEMBER_FREE, Ordering::Release);
            self.header().reaped.fetch_add(1, Ordering::Relaxed);
            self.core.files.ctl.unlock(byte(member));
            log::info!("released what pool member {member} (process {pid}) held: it is gone");
        }
    }

    /// Gives up membership: what this member still holds is released, and the background thread
    /// ends. The I/O engine must be shut down before, and copies of GPUs be over. The liveness byte
    /// comes free when the last reference to the pool goes.
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
            record(&self.core.mapping, self.member).gpu_copies.store(0, Ordering::SeqCst);
        }
        self.close();
    }

    /// As [`Pool::leave`], where copies of GPUs may be under way: what this member holds stays held
    /// until its process has ended.
    pub(super) fn leave_held(&self) {
        if self.core.is_forked_child() || self.closed.load(Ordering::Acquire) {
            return;
        }
        self.stop_reserver();
        self.close();
    }

    fn close(&self) {
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
