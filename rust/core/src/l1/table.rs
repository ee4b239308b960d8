//! The table of objects under the writer lock: making, burying, evicting, reaping and rebuilding.
//!
//! Every entry that is not EMPTY is in the LRU list; those FILLING or READY are in the index as
//! well. A DYING one may still be in the index (who gave it up did not get the lock); whoever meets
//! it under the lock buries it: out of the index, and freed at once or, while pinned, kept at the
//! tail of the list, where every search for room begins.

use std::cmp::Reverse;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::entry::{DIRTY, Entry, Extent, State, Word, claimant};
use super::extent::{Extents, Hints};
use super::{ObjectMeta, Purpose};
use crate::ObjectKey;
use crate::pool::index::Index;
use crate::pool::list::{Links, List};
use crate::pool::{NONE, Pool, Region, Table as PoolTable, TableHooks, TableRoot, Writer};
use crate::units::{PAGE_BYTES, pages_for};

/// Entries that one search for room looks at.
const WALK_MAX: usize = 16 << 10;

/// `spare` words of the root.
const HIGH_WATER: usize = 0;
const FREES: usize = 1;
const EVICTIONS: usize = 2;
const DISCARDS: usize = 3;

/// What [`Table::make`] did.
pub(super) enum Made {
    New(u32, u64),
    Exists(u32, u64),
    NoRoom,
}

/// A view of the table's shared memory, without the pool itself: the pool holds this as its hooks.
pub(super) struct Table {
    entries: NonNull<Entry>,
    count: u32,
    bitmap: NonNull<AtomicU64>,
    bitmap_words: usize,
    pages: u64,
    piece_pages: u64,
    hints: Hints,
    root: NonNull<TableRoot>,
    /// Keeps the pool mapped, too.
    pub(super) index: Index,
}

// SAFETY: all that the pointers reach is atomic, and mapped as long as `index` lives.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

impl Links for Table {
    fn prev(&self, i: u32) -> &AtomicU32 {
        &self.entry(i).prev
    }
    fn next(&self, i: u32) -> &AtomicU32 {
        &self.entry(i).next
    }
}

impl Table {
    pub(super) fn new(pool: &Pool) -> Self {
        let (entries, entries_bytes) = pool.region(Region::L1Entries);
        let (bitmap, bitmap_bytes) = pool.region(Region::ExtentBitmap);
        let count = pool.l1_entries();
        assert!(entries_bytes >= u64::from(count) * size_of::<Entry>() as u64);
        Self {
            entries: NonNull::new(entries.cast()).expect("a mapped region"),
            count,
            bitmap: NonNull::new(bitmap.cast()).expect("a mapped region"),
            bitmap_words: usize::try_from(bitmap_bytes / 8).expect("a mapped region"),
            pages: pool.data_pages(),
            piece_pages: pool.piece_pages(),
            hints: Hints::new(pool.pieces()),
            root: NonNull::from(pool.root(PoolTable::L1)),
            index: pool.index(PoolTable::L1),
        }
    }

    pub(super) fn entry(&self, i: u32) -> &Entry {
        assert!(i < self.count, "entry {i} of {}", self.count);
        // SAFETY: within the region, page-aligned, atomic, and mapped as long as `self.index`.
        unsafe { self.entries.add(i as usize).as_ref() }
    }

    pub(super) fn root(&self) -> &TableRoot {
        // SAFETY: the header is mapped as long as `self.index`, and the root's fields are atomics.
        unsafe { self.root.as_ref() }
    }

    pub(super) fn list(&self) -> List<'_, Self> {
        List::new(self.root(), self)
    }

    pub(super) fn extents(&self) -> Extents<'_> {
        // SAFETY: the bitmap's words are atomics, page-aligned and mapped as long as `self.index`.
        let words = unsafe { std::slice::from_raw_parts(self.bitmap.as_ptr(), self.bitmap_words) };
        Extents::new(words, self.pages, self.piece_pages, &self.hints, &self.root().spare[FREES])
    }

    /// Entries from here on were never used.
    pub(super) fn high_water(&self) -> u32 {
        let mark = self.root().spare[HIGH_WATER].load(Ordering::Acquire);
        u32::try_from(mark).unwrap_or(u32::MAX).min(self.count)
    }

    pub(super) fn evictions(&self) -> u64 {
        self.root().spare[EVICTIONS].load(Ordering::Relaxed)
    }

    pub(super) fn discards(&self) -> u64 {
        self.root().spare[DISCARDS].load(Ordering::Relaxed)
    }

    /// Counts an object that was discarded. Needs no lock.
    pub(super) fn count_discard(&self) {
        self.root().spare[DISCARDS].fetch_add(1, Ordering::Relaxed);
    }

    /// The entry with `key`, whatever its state.
    fn find(&self, key: &ObjectKey) -> Option<u32> {
        let words = key.words();
        self.index.find(key.hash64(), |i| self.entry(i).has_key(&words))
    }

    /// Makes a FILLING entry with room for `meta`, pinned by `member`, unless the key is there.
    pub(super) fn make(
        &self,
        writer: &mut Writer,
        meta: &ObjectMeta,
        purpose: Purpose,
        member: u8,
    ) -> Made {
        while let Some(i) = self.find(&meta.key) {
            let word = self.entry(i).load();
            if word.is_live() {
                return Made::Exists(i, word.generation());
            }
            self.bury(writer, i);
        }
        let parent = meta.parent.as_ref().and_then(|parent| self.find(parent));
        let Some(extents) = self.make_room(writer, pages_for(meta.payload_bytes), parent) else {
            return Made::NoRoom;
        };
        let Some(i) = self.take_entry(writer, parent) else {
            for extent in extents {
                self.extents().free(extent);
            }
            return Made::NoRoom;
        };
        // The search for an entry may have buried a dying parent.
        let parent = parent.filter(|&p| self.entry(p).load().is_live());
        let entry = self.entry(i);
        entry.describe(meta, &extents);
        let stamp = parent.map_or_else(
            || writer.pool().clock(),
            |parent| self.entry(parent).stamp.load(Ordering::Relaxed),
        );
        entry.stamp.store(stamp, Ordering::Relaxed);
        entry.set_pin(member);
        let generation = entry.load().next_generation();
        let word = Word::new(State::Filling, purpose, member, generation);
        entry.word.store(word.0, Ordering::SeqCst);
        let indexed = self.index.insert(writer, meta.key.hash64(), i);
        assert!(indexed, "the index has twice as many slots as there are entries");
        match parent {
            Some(parent) => self.list().insert_behind(writer, parent, i),
            None => self.list().push_front(writer, i),
        }
        let root = self.root();
        add(&root.bytes, entry.pages() * PAGE_BYTES);
        root.count.fetch_add(1, Ordering::Relaxed);
        Made::New(i, generation)
    }

    /// Takes a DYING entry out of the index and frees it, or leaves it at the tail while pinned.
    /// True: it is free.
    pub(super) fn bury(&self, writer: &mut Writer, i: u32) -> bool {
        let entry = self.entry(i);
        if entry.load().state() != State::Dying {
            return false;
        }
        let fresh = self.index.remove(writer, entry.key().hash64(), i);
        if entry.is_pinned() {
            if fresh {
                self.list().unlink(writer, i);
                self.list().push_back(writer, i);
            }
            return false;
        }
        self.free(writer, i);
        true
    }

    /// Frees a READY entry that is clean and that nobody pins.
    pub(super) fn evict(&self, writer: &mut Writer, i: u32) -> bool {
        let entry = self.entry(i);
        let word = entry.load();
        if word.state() != State::Ready || entry.is_pinned() || entry.is_dirty() {
            return false;
        }
        let evicting = word.with_state(State::Evicting);
        if !entry.advance(word, evicting) {
            return false;
        }
        // A pinner sets its bit, then reads the word; we wrote the word and now read the bits: at
        // least one of us sees the other.
        fence(Ordering::SeqCst);
        if entry.is_pinned() || entry.is_dirty() {
            entry.advance(evicting, word);
            return false;
        }
        self.index.remove(writer, entry.key().hash64(), i);
        self.free(writer, i);
        add(&self.root().spare[EVICTIONS], 1);
        true
    }

    /// Makes `i` the most recent entry if it still holds the object of `generation`.
    pub(super) fn refresh(&self, writer: &mut Writer, i: u32, generation: u64) {
        let entry = self.entry(i);
        let word = entry.load();
        if word.generation() == generation && word.is_live() {
            self.list().move_to_front(writer, i);
            entry.stamp.store(writer.pool().clock(), Ordering::Relaxed);
        }
    }

    /// Frees the dying entries at the tail that are pinned no more.
    pub(super) fn collect(&self, writer: &mut Writer) {
        for i in self.list().iter_from_tail().take(WALK_MAX) {
            let entry = self.entry(i);
            if entry.load().state() != State::Dying {
                return;
            }
            if !entry.is_pinned() {
                self.bury(writer, i);
            }
        }
    }

    /// Pages of the pieces that have memory.
    pub(super) fn reserved_pages(&self, pool: &Pool) -> u64 {
        let piece = |n: u32| {
            let first = u64::from(n) * self.piece_pages;
            if pool.piece_reserved(n) { self.piece_pages.min(self.pages - first) } else { 0 }
        };
        (0..pool.pieces()).map(piece).sum()
    }

    fn used_pages(&self) -> u64 {
        self.root().bytes.load(Ordering::Relaxed) / PAGE_BYTES
    }

    /// Extents for `pages`, for which the least recent objects go; never `keep`.
    fn make_room(&self, writer: &mut Writer, pages: u64, keep: Option<u32>) -> Option<Vec<Extent>> {
        self.collect(writer);
        let reserved = self.reserved_pages(writer.pool());
        let take = |writer: &Writer| {
            let room = reserved.saturating_sub(self.used_pages()) >= pages;
            let has_memory = |piece| writer.pool().piece_reserved(piece);
            if room { self.extents().allocate(pages, has_memory) } else { None }
        };
        if let Some(extents) = take(writer) {
            return Some(extents);
        }
        let free = reserved.saturating_sub(self.used_pages());
        if pages > reserved || !self.can_free(pages.saturating_sub(free), keep) {
            return None;
        }
        for i in self.list().iter_from_tail().take(WALK_MAX) {
            if Some(i) != keep
                && (self.bury(writer, i) || self.evict(writer, i))
                && let Some(extents) = take(writer)
            {
                return Some(extents);
            }
        }
        None
    }

    /// Whether eviction would find `pages`: nothing is evicted in vain.
    fn can_free(&self, pages: u64, keep: Option<u32>) -> bool {
        let mut found = 0;
        for i in self.list().iter_from_tail().take(WALK_MAX) {
            let entry = self.entry(i);
            let idle = match entry.load().state() {
                State::Dying => true,
                State::Ready => !entry.is_dirty(),
                State::Empty | State::Filling | State::Evicting => false,
            };
            if Some(i) != keep && idle && !entry.is_pinned() {
                found += entry.pages();
            }
            if found >= pages {
                return true;
            }
        }
        false
    }

    /// An EMPTY entry, for which the least recent object goes if there is none; never `keep`.
    fn take_entry(&self, writer: &mut Writer, keep: Option<u32>) -> Option<u32> {
        if self.root().free_head.load(Ordering::Relaxed) == NONE {
            let mark = self.high_water();
            if mark < self.count {
                self.root().spare[HIGH_WATER].store(u64::from(mark) + 1, Ordering::Release);
                return Some(mark);
            }
            self.list()
                .iter_from_tail()
                .take(WALK_MAX)
                .find(|&i| Some(i) != keep && (self.bury(writer, i) || self.evict(writer, i)))?;
        }
        let i = self.root().free_head.load(Ordering::Relaxed);
        self.root().free_head.store(self.entry(i).next.load(Ordering::Relaxed), Ordering::Relaxed);
        Some(i)
    }

    fn free(&self, writer: &mut Writer, i: u32) {
        let entry = self.entry(i);
        entry.word.store(entry.load().with_state(State::Empty).0, Ordering::SeqCst);
        self.list().unlink(writer, i);
        for extent in entry.extents() {
            self.extents().free(extent);
        }
        let root = self.root();
        let bytes = entry.pages() * PAGE_BYTES;
        root.bytes.store(root.bytes.load(Ordering::Relaxed) - bytes, Ordering::Relaxed);
        root.count.fetch_sub(1, Ordering::Relaxed);
        self.put_free(i);
    }

    fn put_free(&self, i: u32) {
        let first = self.root().free_head.load(Ordering::Relaxed);
        self.entry(i).next.store(first, Ordering::Relaxed);
        self.root().free_head.store(i, Ordering::Relaxed);
    }

    /// Whether all extents of `i` are free runs of the data area; if so they are taken.
    fn claim_extents(&self, i: u32) -> bool {
        let mut taken = Vec::new();
        for extent in self.entry(i).extents() {
            if !self.extents().claim(extent) {
                for extent in taken {
                    self.extents().free(extent);
                }
                return false;
            }
            taken.push(extent);
        }
        !taken.is_empty()
    }
}

impl TableHooks for Table {
    /// The entries are the truth: their words are stored last when made and first when freed.
    fn rebuild(&self, writer: &mut Writer) {
        let root = self.root();
        self.extents().clear();
        self.index.clear(writer);
        self.list().clear(writer);
        for count in [&root.bytes, &root.spare[HIGH_WATER]] {
            count.store(0, Ordering::Relaxed);
        }
        root.count.store(0, Ordering::Relaxed);
        root.free_head.store(NONE, Ordering::Relaxed);
        let used = |i: &u32| self.entry(*i).load().0 != 0;
        let high_water = (0..self.count).rev().find(used).map_or(0, |i| i + 1);
        root.spare[HIGH_WATER].store(u64::from(high_water), Ordering::Release);
        let mut listed = Vec::new();
        for i in (0..high_water).rev() {
            let entry = self.entry(i);
            let mut word = entry.load();
            if word.state() == State::Evicting {
                // Its evictor died before it freed anything.
                word = word.with_state(State::Ready);
                entry.word.store(word.0, Ordering::SeqCst);
            }
            let dead = word.state() == State::Dying && !entry.is_pinned();
            if word.state() == State::Empty || dead || !self.claim_extents(i) {
                entry.word.store(word.with_state(State::Empty).0, Ordering::SeqCst);
                self.put_free(i);
                continue;
            }
            add(&root.bytes, entry.pages() * PAGE_BYTES);
            root.count.fetch_add(1, Ordering::Relaxed);
            if word.state() != State::Dying {
                let indexed = self.index.insert(writer, entry.key().hash64(), i);
                assert!(indexed, "the index has twice as many slots as there are entries");
            }
            let stamp = entry.stamp.load(Ordering::Relaxed);
            let depth = entry.first_token.load(Ordering::Relaxed);
            // Equal stamps are children inserted behind their parents: the root is the youngest.
            listed.push((word.state() != State::Dying, stamp, Reverse(depth), i));
        }
        listed.sort_unstable();
        for (_, _, _, i) in listed {
            self.list().push_front(writer, i);
        }
    }

    /// Frees what a dead member was filling, its pins and its claims to write back.
    fn reap(&self, writer: &mut Writer, dead_member: u8) {
        for i in 0..self.high_water() {
            let entry = self.entry(i);
            if entry.is_pinned_by(dead_member) {
                entry.clear_pin(dead_member);
            }
            let flags = entry.flags.load(Ordering::SeqCst);
            if claimant(flags) == Some(dead_member) {
                // A failure means that somebody else claimed it meanwhile.
                let order = Ordering::SeqCst;
                entry.flags.compare_exchange(flags, DIRTY, order, order).ok();
            }
            let word = entry.load();
            if word.state() == State::Filling && word.owner() == dead_member {
                entry.advance(word, word.with_state(State::Dying));
            }
            self.bury(writer, i);
        }
    }
}

fn add(total: &AtomicU64, amount: u64) {
    total.store(total.load(Ordering::Relaxed) + amount, Ordering::Relaxed);
}
