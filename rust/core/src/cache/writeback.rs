//! The background: checksums of committed objects, then their way to disk.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::{CacheOptions, Inner, Stats, WritePolicy, checksum_of, open_disk};
use crate::io;
use crate::l1::{Arena, Slot};
use crate::l2::{DiskStore, ObjectInfo, Segment, Written};
use crate::pool::Pool;
use crate::{Error, ErrorKind, Namespace, Result};

/// How often the write-back thread looks for dirty objects that other members left behind.
const RESCAN: Duration = Duration::from_millis(500);

/// How often a member looks for others that died, whose slots and pins are then freed.
const REAP: Duration = Duration::from_secs(2);

/// How long write-back gives way to loads at most, per object.
const YIELD_TO_LOADS: Duration = Duration::from_millis(200);

/// How long objects are written back before their pool is made anew, less than others wait to join.
const RESCUE: Duration = Duration::from_secs(25);

/// Dirty objects claimed at a time.
const BATCH: usize = 4;

#[derive(Default)]
struct Queue {
    commits: VecDeque<Slot>,
    manifests: VecDeque<(Namespace, String)>,
    in_progress: usize,
    // A commit has made something dirty since the write-back thread last looked.
    fresh: bool,
}

struct Shared {
    inner: Arc<Inner>,
    queue: Mutex<Queue>,
    changed: Condvar,
    stopping: AtomicBool,
    draining: AtomicBool,
    writing: AtomicUsize,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The threads and their queue.
pub(super) struct Background {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Background {
    pub(super) fn start(inner: Arc<Inner>) -> Result<Self> {
        let has_disk = inner.disk.is_some();
        let shared = Arc::new(Shared {
            inner,
            queue: Mutex::default(),
            changed: Condvar::new(),
            stopping: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            writing: AtomicUsize::new(0),
        });
        let spawn = |name: &str, body: fn(&Shared)| {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new()
                .name(name.to_owned())
                .spawn(move || body(&shared))
                .map_err(|error| Error::io(format!("starting the thread {name}"), error))
        };
        let mut threads = vec![spawn("lakecache-commit", commit_loop)?];
        if has_disk {
            threads.push(spawn("lakecache-write", write_loop)?);
        }
        Ok(Self { shared, threads: Mutex::new(threads) })
    }

    pub(super) fn commit(&self, slot: Slot) {
        self.shared.lock().commits.push_back(slot);
        self.shared.changed.notify_all();
    }

    /// Has the manifest of a namespace written: whoever names it must not wait for the disk.
    pub(super) fn write_manifest(&self, namespace: &Namespace, json: &str) {
        let mut queue = self.shared.lock();
        queue.manifests.push_back((*namespace, json.to_owned()));
        queue.fresh = true;
        drop(queue);
        self.shared.changed.notify_all();
    }

    pub(super) fn pending(&self) -> usize {
        let queue = self.shared.lock();
        queue.commits.len() + queue.manifests.len() + queue.in_progress
    }

    pub(super) fn flush(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        self.shared.draining.store(true, Ordering::Release);
        self.shared.changed.notify_all();
        let done = loop {
            if self.idle() {
                break true;
            }
            if Instant::now() >= deadline {
                break false;
            }
            let queue = self.shared.lock();
            let step = Duration::from_millis(5);
            drop(self.shared.changed.wait_timeout(queue, step));
        };
        self.shared.draining.store(false, Ordering::Release);
        done
    }

    fn idle(&self) -> bool {
        let inner = &self.shared.inner;
        self.pending() == 0
            && self.shared.writing.load(Ordering::Acquire) == 0
            && (inner.disk.is_none() || inner.arena.gauges().dirty == 0)
    }

    pub(super) fn drain(&self, timeout: Duration) {
        if !self.flush(timeout) {
            log::warn!(
                "LakeCache stops with objects not yet on disk after waiting {timeout:?}; \
                 they stay in memory for the next start",
            );
        }
    }

    pub(super) fn stop(&self) {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.changed.notify_all();
        let threads =
            std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            if thread.join().is_err() {
                log::error!("a background thread of LakeCache panicked");
            }
        }
    }
}

/// Hands the pieces of memory that were reserved since the last call to the engine that reads.
fn register_pieces(inner: &Inner, done: &mut u32) {
    let Some(engine) = &inner.engine else { return };
    while *done < inner.pool.pieces() && inner.pool.piece_reserved(*done) {
        let (address, bytes) = inner.pool.piece(*done);
        // A reserved piece keeps its pages for the pool's life.
        engine.register(io::Segment { address, bytes });
        *done += 1;
    }
}

fn commit_loop(shared: &Shared) {
    let inner = &shared.inner;
    let mut reaped = Instant::now();
    let mut registered = 0;
    loop {
        register_pieces(inner, &mut registered);
        if reaped.elapsed() >= REAP {
            inner.pool.reap_dead();
            reaped = Instant::now();
        }
        let slot = {
            let mut queue = shared.lock();
            loop {
                if let Some(slot) = queue.commits.pop_front() {
                    queue.in_progress += 1;
                    break Some(slot);
                }
                if shared.stopping.load(Ordering::Acquire) {
                    return;
                }
                if reaped.elapsed() >= REAP {
                    break None;
                }
                let (guard, _) = shared
                    .changed
                    .wait_timeout(queue, REAP)
                    .unwrap_or_else(PoisonError::into_inner);
                queue = guard;
            }
        };
        let Some(slot) = slot else { continue };
        publish(inner, slot);
        let mut queue = shared.lock();
        queue.in_progress -= 1;
        queue.fresh = true;
        drop(queue);
        shared.changed.notify_all();
    }
}

fn publish(inner: &Inner, slot: Slot) {
    let Some(meta) = inner.arena.meta(slot) else { return };
    let dirty = inner.write_policy != WritePolicy::SecondUse && inner.is_wanted_on_disk(slot);
    let checksum = checksum_of(&inner.arena, slot);
    if inner.arena.publish(slot, checksum, dirty) {
        Stats::add(&inner.stats.counters.stores, 1);
        Stats::add(&inner.stats.counters.store_bytes, meta.payload_bytes);
        inner.stats.event("store", "memory", meta.key, meta.payload_bytes);
    }
    inner.arena.unpin(slot);
}

fn write_loop(shared: &Shared) {
    let inner = &shared.inner;
    loop {
        let stopping = shared.stopping.load(Ordering::Acquire);
        if !stopping {
            write_manifests(shared);
        }
        let claimed = if stopping { Vec::new() } else { claim(shared) };
        if claimed.is_empty() {
            if stopping {
                return;
            }
            let mut queue = shared.lock();
            if !std::mem::take(&mut queue.fresh) {
                drop(shared.changed.wait_timeout(queue, RESCAN));
            }
            continue;
        }
        for slot in claimed {
            give_way(inner);
            if let Some(disk) = &inner.disk {
                write(&inner.pool, &inner.arena, disk, &inner.stats, slot);
            }
            shared.writing.fetch_sub(1, Ordering::AcqRel);
            shared.changed.notify_all();
        }
    }
}

fn write_manifests(shared: &Shared) {
    let Some(disk) = &shared.inner.disk else { return };
    loop {
        let mut queue = shared.lock();
        let Some((namespace, json)) = queue.manifests.pop_front() else { return };
        queue.in_progress += 1;
        drop(queue);
        if let Err(error) = disk.write_manifest(&namespace, &json) {
            log::warn!("a namespace has no manifest for people to read: {error}");
        }
        shared.lock().in_progress -= 1;
        shared.changed.notify_all();
    }
}

fn claim(shared: &Shared) -> Vec<Slot> {
    let inner = &shared.inner;
    let Some(disk) = &inner.disk else { return Vec::new() };
    if !disk.scan_done() {
        return Vec::new();
    }
    if inner.write_policy == WritePolicy::OnEvict && !shared.draining.load(Ordering::Acquire) {
        let gauges = inner.arena.gauges();
        if gauges.bytes_used < gauges.capacity / 4 * 3 {
            return Vec::new();
        }
    }
    // Counted before the claim is made, so that a flush never sees neither.
    shared.writing.fetch_add(BATCH, Ordering::AcqRel);
    let claimed = inner.arena.dirty(BATCH);
    shared.writing.fetch_sub(BATCH - claimed.len().min(BATCH), Ordering::AcqRel);
    claimed
}

/// Loads go first: a write waits, for a bounded time, until no read is queued.
fn give_way(inner: &Inner) {
    let Some(engine) = &inner.engine else { return };
    let deadline = Instant::now() + YIELD_TO_LOADS;
    while engine.queue_depth() > 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Writes to disk what only `pool`, which is about to be made anew, has in memory. Bounded: others
/// may be waiting to join.
pub(super) fn rescue(pool: &Arc<Pool>, options: &CacheOptions, stats: &Stats) -> Result<()> {
    let Some(dir) = &options.cache_dir else { return Ok(()) };
    let arena = Arena::new(Arc::clone(pool));
    if arena.gauges().dirty == 0 {
        return Ok(());
    }
    let disk = open_disk(pool, options, dir)?;
    disk.start_scan();
    let deadline = Instant::now() + RESCUE;
    disk.wait_scanned(RESCUE);
    while Instant::now() < deadline {
        let claimed = arena.dirty(BATCH);
        if claimed.is_empty() {
            break;
        }
        for slot in claimed {
            write(pool, &arena, &disk, stats, slot);
        }
    }
    disk.close();
    match arena.gauges().dirty {
        0 => Ok(()),
        left => {
            let text = format!("{left} objects were not written within {} s", RESCUE.as_secs());
            Err(Error::new(ErrorKind::Timeout, text))
        }
    }
}

fn write(pool: &Pool, arena: &Arena, disk: &DiskStore, stats: &Stats, slot: Slot) {
    let counters = &stats.counters;
    if !arena.pin(slot) {
        return;
    }
    if let (Some(meta), Some(checksum), Some(spans)) =
        (arena.meta(slot), arena.checksum(slot), arena.spans(slot))
        && !pool.is_memory_only(meta.namespace)
        && let Some(namespace) = pool.namespace(meta.namespace)
    {
        let segments: Vec<_> = spans
            .iter()
            // SAFETY: the object is READY and pinned: its bytes are there and don't change.
            .map(|&(address, bytes)| unsafe { Segment::new(address, bytes) })
            .collect();
        let info = ObjectInfo {
            key: meta.key,
            parent: meta.parent,
            kind: meta.kind,
            first_token: meta.first_token,
            last_token: meta.last_token,
            ranks: meta.ranks,
            payload_bytes: meta.payload_bytes,
        };
        match disk.write(&info, &namespace, checksum, &segments) {
            Ok(Written::Stored) => {
                Stats::add(&counters.writes, 1);
                Stats::add(&counters.write_bytes, meta.payload_bytes);
                stats.event("write", "disk", meta.key, meta.payload_bytes);
            }
            Ok(Written::Exists) => Stats::add(&counters.writes_exist, 1),
            Ok(_) => Stats::add(&counters.writes_no_room, 1),
            Err(error) => {
                Stats::add(&counters.write_errors, 1);
                log::warn!("an object was not written to disk and stays in memory: {error}");
            }
        }
    }
    arena.set_clean(slot);
    arena.unpin(slot);
}
