//! Objects in the pool's data area: found without a lock, pinned, filled, published and evicted.
//!
//! An [`Arena`] is one member's view. An object is named by its key for lookups and by a [`Slot`]
//! (entry and generation) from then on; a slot whose object went is [`SlotState::Gone`], for ever.
//! Lookups, states, pins and publication take no lock and make no system call.

mod check;
mod entry;
mod extent;
mod pins;
mod table;

use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub use self::entry::{EXTENTS_MAX, Extent};
pub use self::extent::{Extents, Hints};

use self::entry::{CLAIMED, DIRTY, Entry, State, Word, claimant, claimed_by};
use self::pins::Pins;
use self::table::{Made, Table};
use crate::pool::index::prefetch_line;
use crate::pool::{Pool, Wait, Writer};
use crate::units::PAGE_BYTES;
use crate::{Error, ErrorKind, ObjectKey, Result};

/// Answers "not there" are asked again so often while writers are at work.
const MISS_RETRIES: usize = 3;
/// Uses noted and not yet in the list, at most.
const PENDING_MAX: usize = 8192;
/// So many are worth an attempt to get the writer lock.
const PENDING_DRAIN: usize = 256;
const CLEAR_WAIT: Duration = Duration::from_secs(5);

/// One object's place: the entry, and which of its successive objects is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot {
    /// The entry's number.
    pub entry: u32,
    /// Rises with each object in the entry.
    pub generation: u64,
}

/// What has become of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotState {
    /// Its bytes are still to come.
    Filling,
    /// Readable; its bytes never change.
    Ready,
    /// The object is not there any more, or never will be.
    Gone,
}

/// Where a new object's bytes come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// From the engine: no use to anybody until READY.
    Store,
    /// From disk: others may join the load.
    Load,
}

/// What an object is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectMeta {
    /// Its name.
    pub key: ObjectKey,
    /// The namespace's number in the pool.
    pub namespace: u16,
    /// Chunk or state.
    pub kind: u8,
    /// The object before it in the chain.
    pub parent: Option<ObjectKey>,
    /// The first token it covers.
    pub first_token: u32,
    /// The token behind the last.
    pub last_token: u32,
    /// Number of ranks whose parts it holds.
    pub ranks: u16,
    /// Bytes of all parts.
    pub payload_bytes: u64,
}

/// What [`Arena::reserve`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reserve {
    /// A FILLING slot, pinned by us.
    Slot(Slot),
    /// The object is there or on its way; not pinned.
    Exists(Slot),
    /// Too much is pinned, being filled or not yet written back, or the object is too large.
    NoRoom,
    /// The writer lock was not to be had.
    Busy,
}

/// How the arena is filled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct L1Gauges {
    /// Bytes of all extents.
    pub bytes_used: u64,
    /// Bytes of the data area.
    pub capacity: u64,
    /// Bytes of the data area that have memory already.
    pub bytes_reserved: u64,
    /// Objects, in whatever state.
    pub entries: u64,
    /// Objects that some member pins.
    pub pinned: u64,
    /// Objects being filled.
    pub filling: u64,
    /// Objects still to be written back.
    pub dirty: u64,
    /// Objects evicted for others since the pool was made.
    pub evictions: u64,
    /// Objects discarded because their bytes had changed, since the pool was made.
    pub damaged: u64,
}

impl L1Gauges {
    /// The gauges by name.
    pub fn named(&self) -> [(&'static str, u64); 9] {
        [
            ("memory_bytes_used", self.bytes_used),
            ("memory_capacity_bytes", self.capacity),
            ("memory_bytes_reserved", self.bytes_reserved),
            ("memory_entries", self.entries),
            ("memory_pinned", self.pinned),
            ("memory_filling", self.filling),
            ("memory_dirty", self.dirty),
            ("memory_evictions", self.evictions),
            ("memory_objects_damaged", self.damaged),
        ]
    }
}

/// Under the writer lock, at the next occasion.
#[derive(Debug, Clone, Copy)]
enum Pending {
    Touch(Slot),
    Bury(u32),
}

/// One member's view of the objects in memory. One for each [`Pool`]: it counts the member's pins.
pub struct Arena {
    pool: Arc<Pool>,
    table: Arc<Table>,
    pins: Pins,
    pending: Mutex<Vec<Pending>>,
}

impl Arena {
    /// The arena of `pool`, which must not have one already.
    pub fn new(pool: Arc<Pool>) -> Self {
        let table = Arc::new(Table::new(&pool));
        pool.add_hooks(Arc::clone(&table) as _);
        Self { pool, table, pins: Pins::default(), pending: Mutex::default() }
    }

    /// Appends for each key its slot, if its object is there: READY, or FILLING from disk. Stores
    /// in progress count as absent.
    pub fn lookup(&self, keys: &[ObjectKey], out: &mut Vec<Option<(Slot, SlotState)>>) {
        let base = out.len();
        let before = self.pool.epoch();
        self.lookup_once(keys, out);
        for _ in 0..MISS_RETRIES {
            // An index that changes meanwhile can hide an object from us.
            let moved = self.pool.epoch() != before || before % 2 == 1;
            if !moved || out[base..].iter().all(Option::is_some) {
                return;
            }
            let missing: Vec<_> = (0..keys.len()).filter(|n| out[base + n].is_none()).collect();
            let asked: Vec<_> = missing.iter().map(|&n| keys[n]).collect();
            let mut found = Vec::with_capacity(asked.len());
            self.lookup_once(&asked, &mut found);
            for (n, found) in missing.into_iter().zip(found) {
                out[base + n] = found;
            }
        }
    }

    fn lookup_once(&self, keys: &[ObjectKey], out: &mut Vec<Option<(Slot, SlotState)>>) {
        let table = &*self.table;
        let hashes: Vec<u64> = keys.iter().map(ObjectKey::hash64).collect();
        let words = vec![Cell::new(0); keys.len()];
        let mut entries = Vec::with_capacity(keys.len());
        table.index.find_many(
            &hashes,
            |i| prefetch_line(std::ptr::from_ref(table.entry(i))),
            |n, i| {
                let entry = table.entry(i);
                let word = entry.load();
                // The key is read between two readings of the word: it is the word's.
                let found = entry.has_key(&keys[n].words()) && entry.load() == word;
                words[n].set(word.0);
                found
            },
            &mut entries,
        );
        out.extend(entries.into_iter().zip(&words).map(|(entry, word)| {
            let (entry, word) = (entry?, Word(word.get()));
            let slot = Slot { entry, generation: word.generation() };
            match word.state() {
                State::Ready => Some((slot, SlotState::Ready)),
                State::Filling if word.is_load() => Some((slot, SlotState::Filling)),
                _ => None,
            }
        }));
    }

    /// What has become of `slot`.
    pub fn state(&self, slot: Slot) -> SlotState {
        match self.word_of(slot).map(Word::state) {
            Some(State::Filling) => SlotState::Filling,
            Some(State::Ready) => SlotState::Ready,
            // For those who have it pinned: the evictor will see that.
            Some(State::Evicting) if self.is_pinned_here(slot) => SlotState::Ready,
            _ => SlotState::Gone,
        }
    }

    /// Whether the object's bytes are still to come from an engine: it may yet be given up.
    pub fn is_being_stored(&self, slot: Slot) -> bool {
        self.word_of(slot).is_some_and(|word| word.state() == State::Filling && !word.is_load())
    }

    /// Keeps the object's memory until [`Arena::unpin`]; false if it is gone, and in a forked child,
    /// whose copies of pins are not its own. Pins count.
    pub fn pin(&self, slot: Slot) -> bool {
        if self.pool.is_forked_child() {
            return false;
        }
        let entry = self.table.entry(slot.entry);
        self.pins.pin(slot.entry, slot.generation, entry, self.pool.member())
    }

    /// Takes one of our pins off. The last one frees an object that is dying.
    pub fn unpin(&self, slot: Slot) {
        if self.pool.is_forked_child() {
            return;
        }
        let entry = self.table.entry(slot.entry);
        if self.pins.unpin(slot.entry, slot.generation, entry, self.pool.member()) {
            self.settle(slot.entry);
        }
    }

    /// Makes a FILLING slot for an object, pinned by us. The least recent objects go for it, but
    /// none that is pinned, being filled or not yet written back.
    pub fn reserve(&self, meta: &ObjectMeta, purpose: Purpose, wait: Wait) -> Result<Reserve> {
        if meta.payload_bytes == 0 || meta.payload_bytes > self.pool.data_pages() * PAGE_BYTES {
            return Ok(Reserve::NoRoom);
        }
        let made = self.write(wait, |writer| {
            let member = writer.pool().member();
            let made = self.table.make(writer, meta, purpose, member);
            if let Made::New(i, generation) = made {
                self.pins.adopt(i, generation, self.table.entry(i), member);
            }
            made
        })?;
        let reserve = match made {
            None => Reserve::Busy,
            Some(Made::NoRoom) => Reserve::NoRoom,
            Some(Made::Exists(entry, generation)) => Reserve::Exists(Slot { entry, generation }),
            Some(Made::New(entry, generation)) => Reserve::Slot(Slot { entry, generation }),
        };
        if let Reserve::Slot(slot) = reserve {
            self.zero_tail(slot, meta.payload_bytes);
        }
        Ok(reserve)
    }

    /// Makes a filled object readable by all. `dirty`: to be written back before it may be evicted.
    /// False: it died meanwhile.
    pub fn publish(&self, slot: Slot, checksum: u64, dirty: bool) -> bool {
        let Some(word) = self.word_of(slot).filter(|word| word.state() == State::Filling) else {
            return false;
        };
        let entry = self.table.entry(slot.entry);
        entry.checksum.store(checksum, Ordering::Relaxed);
        entry.flags.store(if dirty { DIRTY } else { 0 }, Ordering::SeqCst);
        entry.advance(word, word.with_state(State::Ready))
    }

    /// Gives a FILLING object up: it dies now, or once its last pin goes.
    pub fn abandon(&self, slot: Slot) {
        self.give_up(slot, State::Filling);
    }

    /// Takes a READY object whose bytes have changed out of use: nobody finds or pins it any more, and
    /// it dies now, or once its last pin goes. True: it was this call that did so.
    pub fn discard(&self, slot: Slot) -> bool {
        let discarded = self.give_up(slot, State::Ready);
        if discarded {
            self.table.count_discard();
        }
        discarded
    }

    /// Offset in the mapping and length of each run of the object's memory, padded to whole pages.
    pub fn extents(&self, slot: Slot) -> Option<Vec<(u64, u64)>> {
        self.read(slot, |entry| {
            let base = self.pool.data_offset();
            entry
                .extents()
                .map(|extent| (base + extent.first * PAGE_BYTES, extent.pages * PAGE_BYTES))
                .collect()
        })
    }

    /// Address in this process and length of each run of the payload, in order. Valid while the
    /// caller has the object pinned.
    pub fn spans(&self, slot: Slot) -> Option<Vec<(*mut u8, u64)>> {
        self.read(slot, |entry| {
            let base = self.pool.data_offset();
            let mut left = entry.payload_bytes();
            entry
                .extents()
                .map(|extent| {
                    let bytes = left.min(extent.pages * PAGE_BYTES);
                    left -= bytes;
                    (self.address(base + extent.first * PAGE_BYTES, bytes), bytes)
                })
                .collect()
        })
    }

    /// What the object is.
    pub fn meta(&self, slot: Slot) -> Option<ObjectMeta> {
        self.read(slot, Entry::meta)
    }

    /// The checksum it was published with; 0 while FILLING.
    pub fn checksum(&self, slot: Slot) -> Option<u64> {
        self.read(slot, |entry| entry.checksum.load(Ordering::Relaxed))
    }

    /// The address of `bytes` bytes at `offset` in the mapping, see [`Arena::extents`].
    pub fn address(&self, offset: u64, bytes: u64) -> *mut u8 {
        self.pool.mapping().at(offset, bytes)
    }

    /// Claims at most `max` objects for write-back by this member, dead members' too.
    pub fn dirty(&self, max: usize) -> Vec<Slot> {
        let mut alive = [None; 256];
        let mut claimed = Vec::new();
        for i in 0..self.table.high_water() {
            if claimed.len() == max {
                break;
            }
            let entry = self.table.entry(i);
            let flags = entry.flags.load(Ordering::SeqCst);
            let word = entry.load();
            if flags & DIRTY == 0 || word.state() != State::Ready {
                continue;
            }
            if let Some(member) = claimant(flags) {
                let known = &mut alive[usize::from(member)];
                if *known.get_or_insert_with(|| self.pool.is_alive(member).unwrap_or(true)) {
                    continue;
                }
            }
            let mine = claimed_by(self.pool.member());
            let order = Ordering::SeqCst;
            if entry.flags.compare_exchange(flags, mine, order, order).is_ok() {
                claimed.push(Slot { entry: i, generation: entry.load().generation() });
            }
        }
        claimed
    }

    /// Ends a write-back, successful or not: the object may be evicted.
    pub fn set_clean(&self, slot: Slot) {
        self.change_flags(slot, |_| 0);
    }

    /// Wants the object, which the caller has pinned, written back before it is evicted.
    pub fn mark_dirty(&self, slot: Slot) {
        self.change_flags(slot, |flags| if flags & CLAIMED == 0 { DIRTY } else { flags });
    }

    /// Notes the use of a chain of objects, root first: the root ends as the most recent one.
    pub fn touch(&self, keys_root_first: &[ObjectKey]) {
        let mut found = Vec::with_capacity(keys_root_first.len());
        self.lookup(keys_root_first, &mut found);
        let mut pending = self.pending();
        let room = PENDING_MAX.saturating_sub(pending.len());
        // Beyond the bound the deepest are forgotten, whose order matters least.
        let skip = found.iter().flatten().count().saturating_sub(room);
        let slots = found.iter().rev().flatten().skip(skip);
        pending.extend(slots.map(|(slot, _)| Pending::Touch(*slot)));
        let many = pending.len() >= PENDING_DRAIN;
        drop(pending);
        if many {
            self.write_if_free(|_| ());
        }
    }

    /// Frees every object that is READY, clean and not pinned; the bytes freed.
    pub fn clear(&self) -> u64 {
        let cleared = self.write(Wait::Within(CLEAR_WAIT), |writer| {
            let used = || self.table.root().bytes.load(Ordering::Relaxed);
            let before = used();
            for i in self.table.list().iter_from_tail() {
                if !self.table.bury(writer, i) {
                    self.table.evict(writer, i);
                }
            }
            before - used()
        });
        cleared.ok().flatten().unwrap_or(0)
    }

    /// How the arena is filled. Walks the entries: not for every step.
    pub fn gauges(&self) -> L1Gauges {
        let root = self.table.root();
        let mut gauges = L1Gauges {
            bytes_used: root.bytes.load(Ordering::Relaxed),
            capacity: self.pool.data_pages() * PAGE_BYTES,
            bytes_reserved: self.table.reserved_pages(&self.pool) * PAGE_BYTES,
            entries: u64::from(root.count.load(Ordering::Relaxed)),
            evictions: self.table.evictions(),
            damaged: self.table.discards(),
            ..L1Gauges::default()
        };
        for i in 0..self.table.high_water() {
            let entry = self.table.entry(i);
            let state = entry.load().state();
            if state == State::Empty {
                continue;
            }
            gauges.pinned += u64::from(entry.is_pinned());
            gauges.filling += u64::from(state == State::Filling);
            gauges.dirty += u64::from(state == State::Ready && entry.is_dirty());
        }
        gauges
    }

    fn pending(&self) -> MutexGuard<'_, Vec<Pending>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_pinned_here(&self, slot: Slot) -> bool {
        self.table.entry(slot.entry).is_pinned_by(self.pool.member())
    }

    fn word_of(&self, slot: Slot) -> Option<Word> {
        let word = self.table.entry(slot.entry).load();
        (word.generation() == slot.generation).then_some(word)
    }

    /// Lets an object die that is in this state.
    fn give_up(&self, slot: Slot, state: State) -> bool {
        let Some(word) = self.word_of(slot).filter(|word| word.state() == state) else {
            return false;
        };
        let given_up = self.table.entry(slot.entry).advance(word, word.with_state(State::Dying));
        if given_up {
            self.settle(slot.entry);
        }
        given_up
    }

    /// What `f` reads of the slot's entry, if it is the slot's before and after.
    fn read<R>(&self, slot: Slot, f: impl FnOnce(&Entry) -> R) -> Option<R> {
        let there = || self.word_of(slot).filter(|word| word.state() != State::Empty);
        there()?;
        let result = f(self.table.entry(slot.entry));
        there().map(|_| result)
    }

    fn change_flags(&self, slot: Slot, change: impl Fn(u64) -> u64) {
        let entry = self.table.entry(slot.entry);
        let mut flags = entry.flags.load(Ordering::SeqCst);
        while self.state(slot) == SlotState::Ready {
            let order = Ordering::SeqCst;
            match entry.flags.compare_exchange(flags, change(flags), order, order) {
                Ok(_) => return,
                Err(other) => flags = other,
            }
        }
    }

    /// The last page's bytes behind the payload are zero, so that files don't hold stale bytes.
    fn zero_tail(&self, slot: Slot, payload_bytes: u64) {
        let padding = payload_bytes.next_multiple_of(PAGE_BYTES) - payload_bytes;
        let Some((offset, bytes)) = self.extents(slot).and_then(|extents| extents.last().copied())
        else {
            return;
        };
        let tail = self.address(offset + bytes - padding, padding);
        // SAFETY: the padding lies in an extent of a slot that we fill and have pinned.
        unsafe { tail.write_bytes(0, usize::try_from(padding).unwrap_or_default()) };
    }

    /// Buries a dying entry if the writer lock is free, else at the next occasion.
    fn settle(&self, i: u32) {
        let buried = self.write_if_free(|writer| {
            self.table.bury(writer, i);
        });
        let mut pending = self.pending();
        // Where it is full, the entry is found by the next search for room.
        if !buried && pending.len() < PENDING_MAX {
            pending.push(Pending::Bury(i));
        }
    }

    /// [`Pool::write`] after what is pending.
    fn write<R>(&self, wait: Wait, f: impl FnOnce(&mut Writer) -> R) -> Result<Option<R>> {
        self.pool.write(wait, |writer| {
            for pending in std::mem::take(&mut *self.pending()) {
                match pending {
                    Pending::Touch(slot) => {
                        self.table.refresh(writer, slot.entry, slot.generation);
                    }
                    Pending::Bury(i) => {
                        self.table.bury(writer, i);
                    }
                }
            }
            f(writer)
        })
    }

    /// False: not done, because somebody has the lock or the pool is closed.
    fn write_if_free(&self, f: impl FnOnce(&mut Writer)) -> bool {
        self.write(Wait::Try, f).is_ok_and(|done| done.is_some())
    }

    /// Finds anything that contradicts the invariants; for tests and diagnosis.
    pub fn check(&self) -> std::result::Result<(), String> {
        let busy = || Error::new(ErrorKind::Timeout, "the writer lock was not to be had");
        self.write(CHECK_WAIT, |writer| check::check(&self.table, writer))
            .and_then(|checked| checked.ok_or_else(busy))
            .map_err(|error| error.to_string())?
    }
}

const CHECK_WAIT: Wait = Wait::Within(Duration::from_secs(10));

#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod tests;
