//! The writer lock: one writer at a time over all processes, and how a dead one is noticed.
//!
//! Order: threads of this handle take turns; then the lock file's writer byte excludes other
//! handles and processes; then the epoch in the header becomes odd, and even again once the change
//! is complete. The kernel frees a dead writer's byte silently; the odd epoch tells its successor
//! that lists, indexes and counts may be half-changed, and they are rebuilt from the entries.

use std::sync::atomic::{Ordering, fence};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{Pool, lock_byte};
use crate::Result;

/// How long to wait for the writer lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Not at all.
    Try,
    /// At most so long.
    Within(Duration),
}

/// Proof that this thread holds the writer lock, and what writers need of the pool.
pub struct Writer<'pool> {
    pool: &'pool Pool,
}

/// Keeps a table's derived structures right when members die. Registered with
/// [`Pool::add_hooks`] before the pool's first use.
pub trait TableHooks: Send + Sync {
    /// Derives indexes, lists, counts and bitmaps from the entries anew: a writer died at work.
    fn rebuild(&self, writer: &mut Writer);
    /// Releases what the dead member held: its pins, its half-made entries.
    fn reap(&self, writer: &mut Writer, dead_member: u8);
}

impl Writer<'_> {
    /// The pool.
    pub fn pool(&self) -> &Pool {
        self.pool
    }
}

/// A mutex whose taker can give up.
#[derive(Debug, Default)]
pub(super) struct Turn {
    taken: Mutex<bool>,
    freed: Condvar,
}

struct TurnGuard<'a>(&'a Turn);

impl Turn {
    fn take(&self, until: Option<Instant>) -> Option<TurnGuard<'_>> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        while *taken {
            let left = until?.checked_duration_since(Instant::now())?;
            taken = self.freed.wait_timeout(taken, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        *taken = true;
        Some(TurnGuard(self))
    }
}

impl Drop for TurnGuard<'_> {
    fn drop(&mut self) {
        *self.0.taken.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.0.freed.notify_one();
    }
}

/// The writer byte, freed on drop.
struct ByteGuard<'a>(&'a Pool);

impl Drop for ByteGuard<'_> {
    fn drop(&mut self) {
        self.0.core.files.ctl.unlock(lock_byte::WRITER);
    }
}

impl Pool {
    /// Calls `f` with the writer lock. `None`: not got within `wait`. A table that a dead writer
    /// left half-changed is rebuilt first; the first call also reaps members that died before this
    /// one joined. Not reentrant: `f` must not call this again.
    pub fn write<R>(&self, wait: Wait, f: impl FnOnce(&mut Writer) -> R) -> Result<Option<R>> {
        self.check_usable()?;
        let until = match wait {
            Wait::Try => None,
            Wait::Within(time) => Some(Instant::now() + time),
        };
        let Some(_turn) = self.turn.take(until) else { return Ok(None) };
        let held = match until {
            None => self.core.files.ctl.try_exclusive(lock_byte::WRITER)?,
            Some(until) => {
                let left = until.saturating_duration_since(Instant::now());
                self.core.files.ctl.exclusive_within(lock_byte::WRITER, left)?
            }
        };
        if !held {
            return Ok(None);
        }
        let _byte = ByteGuard(self);
        let mut writer = Writer { pool: self };
        if !self.recover(&mut writer) {
            return Ok(None);
        }
        if self.reap_due.load(Ordering::Relaxed) && !self.hooks().is_empty() {
            self.reap_due.store(false, Ordering::Relaxed);
            self.step_epoch();
            self.reap_in(&mut writer);
            self.step_epoch();
        }
        // A panic in `f` unwinds past the second step: the epoch stays odd and the next writer
        // rebuilds.
        self.step_epoch();
        let result = f(&mut writer);
        self.step_epoch();
        Ok(Some(result))
    }

    /// False: the tables are broken and this handle has no hooks to rebuild them.
    fn recover(&self, writer: &mut Writer) -> bool {
        let header = self.header();
        if header.epoch.0.load(Ordering::Acquire).is_multiple_of(2) {
            return true;
        }
        let hooks = self.hooks();
        if hooks.is_empty() {
            return false;
        }
        log::warn!("a process died while it changed the pool: rebuilding its tables");
        for hooks in hooks {
            hooks.rebuild(writer);
        }
        header.recoveries.fetch_add(1, Ordering::Relaxed);
        self.step_epoch();
        true
    }

    /// The fences order the change between the two steps for readers that check the epoch.
    fn step_epoch(&self) {
        fence(Ordering::SeqCst);
        self.header().epoch.0.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }
}
