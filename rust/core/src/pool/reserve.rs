//! Memory for the data area, piece by piece in the background: a tmpfs file costs up to half a
//! second for each GiB, and memory that was promised but is not there is a crash (SIGBUS).
//!
//! One member at a time reserves, under a lock of its own. A piece that would leave the host, the
//! container or the tmpfs too little is put off and tried again later.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Core, Geometry, Pool, Role, lock_byte, piece_word, sweep};
use crate::sys::map::Mapping;
use crate::units::PAGE_BYTES;
use crate::{ErrorKind, Result, sys};

const MEMORY_KEPT_BYTES: u64 = 2 << 30;
const MEMORY_KEPT_PERCENT: u64 = 5;
/// Left to others who use the same tmpfs: so much, or an eighth of a small one.
const TMPFS_KEPT_BYTES: u64 = 64 << 20;
const TMPFS_KEPT_SHARE: u64 = 8;
/// Before a piece that was put off is tried again.
const RETRY: Duration = Duration::from_secs(5);
/// Before looking whether the member that reserves has finished, or died.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// What one step came to.
enum Outcome {
    /// All pieces are reserved.
    Complete,
    /// One was reserved now.
    Reserved,
    /// There is no room for the next one now.
    PutOff,
    /// Another member is at it.
    Elsewhere,
}

/// The state of one handle's reservations.
#[derive(Debug, Default)]
pub(super) struct Reserver {
    signal: Signal,
    put_off: AtomicBool,
    put_offs: AtomicU64,
    warned: AtomicBool,
}

#[derive(Debug, Default)]
struct Signal {
    stop: Mutex<bool>,
    changed: Condvar,
}

impl Signal {
    fn lock(&self) -> MutexGuard<'_, bool> {
        self.stop.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True: told to end.
    fn wait(&self, time: Duration) -> bool {
        let stop = self.lock();
        if *stop {
            return true;
        }
        *self.changed.wait_timeout(stop, time).unwrap_or_else(PoisonError::into_inner).0
    }
}

impl Reserver {
    pub(super) fn put_offs(&self) -> (bool, u64) {
        (self.put_off.load(Ordering::Relaxed), self.put_offs.load(Ordering::Relaxed))
    }
}

impl Pool {
    /// Bytes of the data area that are reserved.
    pub fn reserved_bytes(&self) -> u64 {
        self.core.reserved_bytes()
    }

    /// Starts the background thread of an engine's member.
    pub(super) fn start_reserver(&self, role: Role) -> Result<()> {
        if role != Role::Engine {
            return Ok(());
        }
        let core = self.core.clone();
        let thread = std::thread::Builder::new()
            .name("lakecache-pool".into())
            .spawn(move || core.reserve_all())
            .map_err(|error| crate::Error::io("starting the pool's thread", error))?;
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(())
    }

    /// Ends the background thread, at most one step from now.
    pub(super) fn stop_reserver(&self) {
        *self.core.reserver.signal.lock() = true;
        self.core.reserver.signal.changed.notify_all();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            log::error!("the pool's thread panicked");
        }
    }
}

/// Bytes of the data area of a mapped pool that have memory.
pub(super) fn reserved_bytes(mapping: &Mapping, geometry: &Geometry) -> u64 {
    let reserved =
        |&piece: &u32| piece_word(mapping, geometry, piece).load(Ordering::Acquire) & 1 == 1;
    (0..geometry.pieces).filter(reserved).map(|piece| geometry.piece(piece).1).sum()
}

/// Why `bytes` cannot be reserved now; for a pool with a file, on the file system of `path` too.
pub(super) fn lacking(bytes: u64, path: Option<&Path>) -> Result<Option<String>> {
    let kept = |of: u64| MEMORY_KEPT_BYTES.max(of / 100 * MEMORY_KEPT_PERCENT);
    let short = |free: u64, kept: u64| free < bytes.saturating_add(kept);
    let available = sys::limits::mem_available();
    if short(available, kept(available)) {
        let text = format!("the host has {} MiB of memory available", mib(available));
        return Ok(Some(format!("{text}, of which {} are left alone", mib(kept(available)))));
    }
    if let Some(cgroup) = sys::limits::cgroup_limit() {
        let free = cgroup.limit.saturating_sub(cgroup.used_without_inactive_file);
        if short(free, kept(cgroup.limit)) {
            let text = format!("the container's memory limit leaves {} MiB", mib(free));
            let kept = mib(kept(cgroup.limit));
            return Ok(Some(format!("{text}, of which {kept} are left alone")));
        }
    }
    if let Some(path) = path {
        let space = sys::limits::fs_space(path)?;
        // A tmpfs without a size limit reports a total of zero.
        let kept = TMPFS_KEPT_BYTES.min(space.total / TMPFS_KEPT_SHARE);
        if space.total > 0 && short(space.free, kept) {
            let (path, free) = (path.display(), mib(space.free));
            let text = format!("the file system of {path} has {free} MiB free");
            return Ok(Some(format!("{text}, of which {} are left alone", mib(kept))));
        }
    }
    Ok(None)
}

fn mib(bytes: u64) -> u64 {
    bytes >> 20
}

impl Core {
    fn reserve_step(&self) -> Result<Outcome> {
        if self.next_piece().is_none() {
            return Ok(self.reserved_all());
        }
        if !self.files.ctl.try_exclusive(lock_byte::RESERVER)? {
            return Ok(Outcome::Elsewhere);
        }
        let outcome = match self.next_piece() {
            Some(piece) => self.reserve_piece(piece),
            None => Ok(self.reserved_all()),
        };
        self.files.ctl.unlock(lock_byte::RESERVER);
        outcome
    }

    fn reserved_bytes(&self) -> u64 {
        reserved_bytes(&self.mapping, &self.geometry)
    }

    fn next_piece(&self) -> Option<u32> {
        (0..self.geometry.pieces).find(|&piece| !self.piece_reserved(piece))
    }

    fn reserved_all(&self) -> Outcome {
        self.reserver.put_off.store(false, Ordering::Relaxed);
        Outcome::Complete
    }

    fn reserve_piece(&self, piece: u32) -> Result<Outcome> {
        let (offset, bytes) = self.geometry.piece(piece);
        let mut short = lacking(bytes, self.path.as_deref())?;
        if short.is_some() && self.release_idle_pool() {
            short = lacking(bytes, self.path.as_deref())?;
        }
        if let Some(reason) = short {
            return Ok(self.put_off(&reason));
        }
        match self.mapping.allocate(self.files.file.as_fd(), offset, bytes) {
            Err(error) if error.kind() == ErrorKind::NoSpace => {
                return Ok(self.put_off(&error.to_string()));
            }
            result => result?,
        }
        piece_word(&self.mapping, &self.geometry, piece).store(1, Ordering::Release);
        self.reserver.put_off.store(false, Ordering::Relaxed);
        Ok(Outcome::Reserved)
    }

    fn put_off(&self, reason: &str) -> Outcome {
        self.reserver.put_off.store(true, Ordering::Relaxed);
        self.reserver.put_offs.fetch_add(1, Ordering::Relaxed);
        if !self.reserver.warned.swap(true, Ordering::Relaxed) {
            log::warn!(
                "only {} of {} MiB of shared memory could be reserved, so that less or nothing is \
                 kept: {reason}. It is tried again every {} s. Free memory, enlarge what is too \
                 small (see docs/operations.md), or lower cpu_bytes",
                mib(self.reserved_bytes()),
                mib(self.geometry.data_pages * PAGE_BYTES),
                RETRY.as_secs()
            );
        }
        Outcome::PutOff
    }

    fn release_idle_pool(&self) -> bool {
        let ram_dir = self.path.as_ref().and_then(|path| path.parent()?.parent());
        ram_dir.is_some_and(sweep::remove_idle)
    }

    fn reserve_all(&self) {
        loop {
            let pause = match self.reserve_step() {
                Ok(Outcome::Complete) => return,
                Ok(Outcome::Reserved) => Duration::ZERO,
                Ok(Outcome::Elsewhere) => LOOK_AGAIN,
                Ok(Outcome::PutOff) => RETRY,
                Err(error) => {
                    log::warn!("reserving a piece of the pool failed, trying again later: {error}");
                    RETRY
                }
            };
            if self.reserver.signal.wait(pause) {
                return;
            }
        }
    }
}
