//! A lease on the leading objects of a chain: held from before a hit is reported until its bytes
//! were taken.
//!
//! A memory object is leased by a pin, a disk object by the open, locked file that its read needs
//! anyway. Files are opened on the I/O engine's threads; [`Lease::poll`] says when that is over. Reads
//! begin with [`Lease::start`], into slots reserved as room allows: a chain larger than the memory
//! tier streams through it while its reader releases what it has taken.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Inner, LOAD_DEADLINE, Stats, WritePolicy, checksum_of};
use crate::ObjectKey;
use crate::io::{ReadOutcome, ReadRequest, Segment};
use crate::l1::{ObjectMeta, Purpose, Reserve, Slot, SlotState};
use crate::l2::format::{HEADER_BYTES, Page};
use crate::l2::{Damage, DiskLease, Header};
use crate::pool::Wait;
use crate::units::{PAGE_BYTES, align_up};

/// Files opened by one job of the I/O engine.
const OPENS_PER_JOB: usize = 32;

/// Reads begun by the thread that asks, which may be the engine's: some ten microseconds each. The
/// others are begun by the I/O engine's threads.
const READS_AT_ONCE: usize = 16;

/// How long a lease leaves its file alone because somebody computes the object again and stores it:
/// longer than that takes, and short for a reader whose writer was stopped or killed.
const STORE_WAIT: Duration = Duration::from_millis(500);

/// Where a leased object is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    /// In the arena.
    Memory,
    /// In a file; for a lease also one that is being read from its file for another.
    Disk,
}

#[derive(Debug)]
enum Item {
    /// Its file is being opened.
    Opening,
    /// Pinned in memory.
    Memory(Slot),
    /// Its file is open and locked.
    Disk(DiskLease),
    /// Being read, or read, into a slot that we pin.
    Loading(Slot),
    /// Not there, or not any more.
    Absent,
    /// Given back.
    Released,
}

#[derive(Debug)]
struct State {
    items: Vec<Item>,
    from_disk: Vec<bool>,
    handed_out: Vec<bool>,
    opens_pending: usize,
    /// Reading begins at this index; `None` until started.
    next: Option<usize>,
    started: Instant,
    /// Items from here on are not wanted.
    end: usize,
    failed: Option<usize>,
    /// When the reader last took something or a read was begun.
    progress: Instant,
    closed: bool,
}

struct Shared {
    inner: Arc<Inner>,
    keys: Vec<ObjectKey>,
    state: Mutex<State>,
    /// Reads are begun by a job, or will be.
    in_background: AtomicBool,
}

/// Leases on the leading keys of a chain that are present. Dropping it gives everything back.
pub struct Lease {
    shared: Arc<Shared>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lease {
    pub(super) fn take(inner: &Arc<Inner>, keys: &[ObjectKey]) -> Self {
        let (present, _) = inner.lookup(keys);
        let keys = &keys[..present];
        let mut found = Vec::with_capacity(present);
        inner.arena.lookup(keys, &mut found);
        let items: Vec<_> = found
            .iter()
            .map(|found| match found {
                Some((slot, _)) if inner.arena.pin(*slot) => Item::Memory(*slot),
                _ if inner.engine.is_some() => Item::Opening,
                _ => Item::Absent,
            })
            .collect();
        let opening: Vec<_> = (0..present).filter(|&i| matches!(items[i], Item::Opening)).collect();
        for (key, item) in keys.iter().zip(&items) {
            if let Item::Memory(slot) = item {
                note_memory_hit(inner, *key, *slot);
            }
        }
        let shared = Arc::new(Shared {
            inner: Arc::clone(inner),
            keys: keys.to_vec(),
            state: Mutex::new(State {
                from_disk: items
                    .iter()
                    .zip(&found)
                    .map(|(item, found)| comes(item, *found))
                    .collect(),
                items,
                handed_out: vec![false; present],
                opens_pending: opening.len(),
                next: None,
                started: Instant::now(),
                end: present,
                failed: None,
                progress: Instant::now(),
                closed: false,
            }),
            in_background: AtomicBool::new(false),
        });
        for batch in opening.chunks(OPENS_PER_JOB) {
            shared.open_in_background(batch.to_vec());
        }
        Self { shared }
    }

    /// How many leading keys are held, or `None` while files are still being opened.
    pub fn poll(&self) -> Option<usize> {
        let state = self.shared.lock();
        if state.opens_pending > 0 { None } else { Some(state.held()) }
    }

    /// Stops waiting for files still being opened and settles for the leading keys held now.
    pub fn settle(&self) -> usize {
        let mut state = self.shared.lock();
        let held = state
            .items
            .iter()
            .position(|item| matches!(item, Item::Absent | Item::Opening))
            .unwrap_or(state.items.len())
            .min(state.end);
        drop(state.cut(&self.shared.inner, held));
        held
    }

    /// Gives back everything from the key of index `count` on.
    pub fn truncate(&self, count: usize) {
        let mut state = self.shared.lock();
        let files = state.cut(&self.shared.inner, count);
        drop(state);
        drop(files);
    }

    /// Which tier serves each key.
    pub fn tiers(&self) -> Vec<Tier> {
        let state = self.shared.lock();
        state.from_disk.iter().map(|disk| if *disk { Tier::Disk } else { Tier::Memory }).collect()
    }

    /// Begins to read what is on disk.
    pub fn start(&self) {
        let mut state = self.shared.lock();
        state.next = Some(0);
        state.started = Instant::now();
        state.progress = state.started;
        drop(state);
        self.shared.pump();
    }

    /// The slots not handed out before, as (index, slot): readable now or as soon as their read is
    /// complete.
    pub fn slots(&self) -> Vec<(usize, Slot)> {
        self.shared.pump();
        let mut state = self.shared.lock();
        let Some(_) = state.next else { return Vec::new() };
        let mut slots = Vec::new();
        for index in 0..state.items.len() {
            if let (Item::Memory(slot) | Item::Loading(slot), false) =
                (&state.items[index], state.handed_out[index])
            {
                slots.push((index, *slot));
                state.handed_out[index] = true;
            }
        }
        slots
    }

    /// The lowest index that can't arrive any more: damaged, unreadable, or out of time.
    pub fn failed(&self) -> Option<usize> {
        self.shared.lock().failed
    }

    /// Gives one object back, after its bytes were taken.
    pub fn release(&self, index: usize) {
        let mut state = self.shared.lock();
        if index < state.items.len() {
            state.give_back(&self.shared.inner, index);
            state.progress = Instant::now();
        }
        drop(state);
        self.shared.pump();
    }

    /// Gives everything back. Idempotent. Reads in flight complete into the arena on their own.
    pub fn close(&self) {
        // A thread that held the lock when a child was forked is not there to let go of it.
        if self.shared.inner.pool.is_forked_child() {
            return;
        }
        let mut state = self.shared.lock();
        state.closed = true;
        let files = state.cut(&self.shared.inner, 0);
        drop(state);
        drop(files);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.close();
    }
}

/// Whether an object's bytes are still to come from its file.
fn comes(item: &Item, found: Option<(Slot, SlotState)>) -> bool {
    matches!(item, Item::Opening) || matches!(found, Some((_, SlotState::Filling)))
}

fn note_memory_hit(inner: &Inner, key: ObjectKey, slot: Slot) {
    Stats::add(&inner.stats.counters.memory_hits, 1);
    let bytes = inner.arena.meta(slot).map_or(0, |meta| meta.payload_bytes);
    inner.stats.event("hit", "memory", key, bytes);
    if inner.write_policy == WritePolicy::SecondUse && inner.is_wanted_on_disk(slot) {
        inner.arena.mark_dirty(slot);
    }
}

impl State {
    fn held(&self) -> usize {
        let absent = |item: &Item| matches!(item, Item::Absent);
        self.items.iter().position(absent).unwrap_or(self.items.len()).min(self.end)
    }

    /// Takes the items from `count` on out; the open files among them are the caller's to close,
    /// outside of the lock.
    fn cut(&mut self, inner: &Inner, count: usize) -> Vec<Item> {
        self.end = self.end.min(count);
        (count..self.items.len()).filter_map(|index| self.give_back(inner, index)).collect()
    }

    fn give_back(&mut self, inner: &Inner, index: usize) -> Option<Item> {
        match std::mem::replace(&mut self.items[index], Item::Released) {
            Item::Memory(slot) | Item::Loading(slot) => {
                inner.arena.unpin(slot);
                None
            }
            file @ Item::Disk(_) => Some(file),
            _ => None,
        }
    }

    fn fail(&mut self, index: usize) {
        self.failed = Some(self.failed.map_or(index, |failed| failed.min(index)));
    }
}

impl Shared {
    fn open_in_background(self: &Arc<Self>, indices: Vec<usize>) {
        let Some(engine) = &self.inner.engine else { return };
        let shared = Arc::clone(self);
        let batch = indices.clone();
        let job = Box::new(move || shared.open(&batch));
        if engine.run(job).is_err() {
            let mut state = self.lock();
            state.opens_pending -= indices.len();
            for index in indices {
                state.items[index] = Item::Absent;
            }
        }
    }

    fn open(&self, indices: &[usize]) {
        let Some(disk) = &self.inner.disk else { return };
        let counters = &self.inner.stats.counters;
        for &index in indices {
            let key = &self.keys[index];
            // A lease that was closed or cut meanwhile needs no file.
            let wanted = matches!(self.lock().items[index], Item::Opening);
            let opened = if wanted { disk.lease(key) } else { Ok(None) };
            let item = match opened {
                Ok(Some(file)) => {
                    Stats::add(&counters.disk_hits, 1);
                    Item::Disk(file)
                }
                Ok(None) => {
                    if wanted {
                        Stats::add(&counters.lease_races, 1);
                    }
                    Item::Absent
                }
                Err(error) => {
                    Stats::add(&counters.read_errors, 1);
                    log::warn!("a stored object could not be opened and counts as a miss: {error}");
                    Item::Absent
                }
            };
            let mut state = self.lock();
            state.opens_pending -= 1;
            let unwanted = if matches!(state.items[index], Item::Opening) {
                std::mem::replace(&mut state.items[index], item)
            } else {
                item
            };
            drop(state);
            drop(unwanted);
        }
    }

    /// Begins reads in order, as far as there is room; of many, the rest in the background.
    fn pump(self: &Arc<Self>) {
        if self.in_background.load(Ordering::Acquire) || !self.begin_reads(READS_AT_ONCE) {
            return;
        }
        let Some(engine) = &self.inner.engine else { return };
        if self.in_background.swap(true, Ordering::AcqRel) {
            return;
        }
        let shared = Arc::clone(self);
        let job = Box::new(move || {
            shared.begin_reads(usize::MAX);
            shared.in_background.store(false, Ordering::Release);
        });
        if engine.run(job).is_err() {
            // The next call goes on.
            self.in_background.store(false, Ordering::Release);
        }
    }

    /// Begins at most so many reads; whether that many were begun, so that there may be more.
    fn begin_reads(self: &Arc<Self>, most: usize) -> bool {
        let mut begun = 0;
        while begun < most {
            let mut state = self.lock();
            let Some(next) = state.next else { return false };
            let end = state.held();
            if state.closed || state.failed.is_some() || next >= end {
                return false;
            }
            if !matches!(state.items[next], Item::Disk(_)) {
                state.next = Some(next + 1);
                continue;
            }
            let Item::Disk(file) = &state.items[next] else { return false };
            let meta = meta_of(file);
            match self.inner.arena.reserve(&meta, Purpose::Load, Wait::Try) {
                Ok(Reserve::Slot(slot)) => {
                    let item = std::mem::replace(&mut state.items[next], Item::Loading(slot));
                    state.next = Some(next + 1);
                    state.progress = Instant::now();
                    drop(state);
                    begun += 1;
                    if let Item::Disk(file) = item {
                        self.read(next, slot, file);
                    }
                }
                Ok(Reserve::Exists(slot)) if self.inner.arena.is_being_stored(slot) => {
                    if state.started.elapsed() < STORE_WAIT {
                        return false;
                    }
                    // Its bytes are in our file, and whoever fills it may never get on.
                    self.inner.arena.abandon(slot);
                }
                Ok(Reserve::Exists(slot)) if self.inner.arena.pin(slot) => {
                    let file = std::mem::replace(&mut state.items[next], Item::Memory(slot));
                    state.next = Some(next + 1);
                    drop(state);
                    drop(file);
                }
                Ok(_) => {
                    if state.progress.elapsed() > LOAD_DEADLINE {
                        Stats::add(&self.inner.stats.counters.load_deadlines, 1);
                        state.fail(next);
                    }
                    return false;
                }
                Err(error) => {
                    log::warn!("a load found no slot and counts as a miss: {error}");
                    state.fail(next);
                    return false;
                }
            }
        }
        true
    }

    fn read(self: &Arc<Self>, index: usize, slot: Slot, file: DiskLease) {
        let inner = &self.inner;
        let counters = &inner.stats.counters;
        let (Some(engine), Some(extents)) = (&inner.engine, inner.arena.extents(slot)) else {
            return self.end_read(index, slot);
        };
        let mut header = Page::zeroed();
        let mut segments = vec![Segment { address: header.0.as_mut_ptr(), bytes: HEADER_BYTES }];
        let mut left = align_up(file.info.payload_bytes, PAGE_BYTES);
        for (offset, bytes) in extents {
            let bytes = bytes.min(left);
            left -= bytes;
            if bytes > 0 {
                segments.push(Segment { address: inner.arena.address(offset, bytes), bytes });
            }
        }
        Stats::add(&counters.disk_payload_reads, 1);
        let key = self.keys[index];
        inner.stats.event("read", "disk", key, file.info.payload_bytes);
        let shared = Arc::clone(self);
        let request = ReadRequest {
            file: Arc::clone(&file.file),
            direct: file.direct,
            offset: 0,
            segments,
            done: Box::new(move |outcome| shared.complete(index, slot, &file, &header, outcome)),
        };
        if let Err(error) = engine.submit(request) {
            Stats::add(&counters.read_errors, 1);
            log::warn!("a read could not be queued and counts as a miss: {error}");
            self.end_read(index, slot);
        }
    }

    /// Runs on an I/O thread once the kernel is done with the slot's memory.
    fn complete(
        &self,
        index: usize,
        slot: Slot,
        file: &DiskLease,
        header: &Page,
        outcome: std::io::Result<ReadOutcome>,
    ) {
        let inner = &self.inner;
        let counters = &inner.stats.counters;
        let key = self.keys[index];
        let verdict = match outcome {
            Err(error) => {
                Stats::add(&counters.read_errors, 1);
                log::warn!("reading object {key:?} failed, it counts as a miss: {error}");
                return self.end_read(index, slot);
            }
            Ok(ReadOutcome::Short { .. }) => Err(Damage::Truncated),
            Ok(ReadOutcome::Complete) => self.verify(slot, file, header),
        };
        match verdict {
            Ok(checksum) => {
                Stats::add(&counters.disk_read_bytes, file.info.payload_bytes);
                if inner.arena.publish(slot, checksum, false) {
                    Stats::add(&counters.promotions, 1);
                    inner.stats.event("promote", "memory", key, file.info.payload_bytes);
                }
            }
            Err(damage) => {
                Stats::add(&counters.damaged, 1);
                inner.stats.event("damaged", "disk", key, file.info.payload_bytes);
                if let Some(disk) = &inner.disk {
                    disk.quarantine(file, damage);
                }
                self.end_read(index, slot);
            }
        }
    }

    fn verify(&self, slot: Slot, file: &DiskLease, page: &Page) -> Result<u64, Damage> {
        let header = file.check(Header::parse(&page.0)?)?;
        if self.inner.checksum && checksum_of(&self.inner.arena, slot) != header.payload_checksum {
            return Err(Damage::Payload);
        }
        Ok(header.payload_checksum)
    }

    /// The slot gets no bytes: it dies, and the lease ends before it.
    fn end_read(&self, index: usize, slot: Slot) {
        self.inner.arena.abandon(slot);
        self.lock().fail(index);
    }
}

fn meta_of(file: &DiskLease) -> ObjectMeta {
    let info = &file.info;
    ObjectMeta {
        key: info.key,
        namespace: file.namespace_id,
        kind: info.kind,
        parent: info.parent,
        first_token: info.first_token,
        last_token: info.last_token,
        ranks: info.ranks,
        payload_bytes: info.payload_bytes,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use crate::cache::testing::{LONG, open, put};

    /// Goal: however many objects are read, the engine's thread begins few of the reads itself.
    #[test]
    fn whoever_asks_begins_a_few_reads_and_leaves_the_rest_to_others() {
        let dir = tempfile::tempdir().unwrap();
        let cache = open(dir.path());
        let keys: Vec<_> = (0..100).map(|number| ObjectKey([number; 32])).collect();
        for &key in &keys {
            put(&cache, key);
        }
        let until = Instant::now() + LONG;
        assert!(cache.clear_memory() > 0);
        let lease = cache.lease(&keys).unwrap();
        while lease.poll().is_none() {
            assert!(Instant::now() < until);
        }
        let in_state = |wanted: fn(&Item) -> bool| {
            lease.shared.lock().items.iter().filter(|item| wanted(item)).count()
        };
        lease.shared.lock().next = Some(0);
        assert!(lease.shared.begin_reads(3));
        assert_eq!(in_state(|item| matches!(item, Item::Disk(_))), 97);
        lease.shared.pump();
        while in_state(|item| matches!(item, Item::Loading(_))) < 100 {
            // What found the lock taken is begun at the next call.
            lease.slots();
            assert!(Instant::now() < until && lease.failed().is_none());
        }
        assert!(!lease.shared.begin_reads(1));
        drop(lease);
        cache.close(LONG);
    }
}
