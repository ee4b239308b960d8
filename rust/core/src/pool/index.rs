//! A hash index in shared memory: open addressing over 64-bit slots, at most half full.
//!
//! A slot is zero when empty, else the upper half of the key's hash (the tag) over the entry's
//! number plus one. The tag alone gives the slot where a search begins, so that deleting can shift
//! later slots back without reading any entry.
//!
//! Holders of the writer lock change it; anybody reads it, at any time. While a slot moves, a
//! reader can miss it: a reader that misses while [`super::Pool::epoch`] is odd or has changed asks
//! again. A reader's `eq` must itself check that the entry is what it seems.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::layout::NONE;
use super::writer::Writer;
use crate::sys::map::Mapping;

/// Lookups whose slots are fetched ahead of the first comparison.
const BATCH: usize = 16;

/// A view of one table's index.
#[derive(Clone)]
pub struct Index {
    slots: NonNull<AtomicU64>,
    /// Slots, a power of two, or zero for a table without entries.
    capacity: u32,
    /// Keeps the slots mapped, where they lie in a pool.
    _mapping: Option<Arc<Mapping>>,
}

// SAFETY: the slots are atomics, valid in every thread as long as the mapping that `Index` holds,
// or the memory that the caller of `Index::new` vouched for.
unsafe impl Send for Index {}
// SAFETY: as above; all access is atomic.
unsafe impl Sync for Index {}

impl Index {
    /// The index over `capacity` slots, a power of two (or zero, for an index that stays empty).
    ///
    /// # Safety
    /// The slots must be aligned and stay valid as long as the index and its clones.
    pub unsafe fn new(slots: *mut AtomicU64, capacity: u32) -> Self {
        assert!(capacity == 0 || capacity.is_power_of_two(), "index capacity {capacity}");
        let slots = NonNull::new(slots).unwrap_or(NonNull::dangling());
        Self { slots, capacity, _mapping: None }
    }

    /// As [`Index::new`] over slots within `mapping`.
    pub(super) fn mapped(mapping: &Arc<Mapping>, offset: u64, capacity: u32) -> Self {
        let slots = mapping.at(offset, u64::from(capacity) * 8).cast();
        // SAFETY: `at` checked the bounds, offsets are multiples of the page size, and the index
        // holds the mapping.
        Self { _mapping: Some(mapping.clone()), ..unsafe { Self::new(slots, capacity) } }
    }

    /// The entry with this hash for which `eq` holds.
    pub fn find(&self, hash64: u64, mut eq: impl FnMut(u32) -> bool) -> Option<u32> {
        self.probe(hash64, |_, entry| eq(entry)).map(|(_, entry)| entry)
    }

    /// [`Index::find`] for many: `eq(n, entry)` compares with the n-th, after `prefetch` was called
    /// for what is likely to be compared soon. Appends one answer each.
    pub fn find_many(
        &self,
        hashes: &[u64],
        prefetch: impl Fn(u32),
        eq: impl Fn(usize, u32) -> bool,
        out: &mut Vec<Option<u32>>,
    ) {
        out.reserve(hashes.len());
        if self.capacity == 0 {
            out.extend(hashes.iter().map(|_| None));
            return;
        }
        for (batch, chunk) in hashes.chunks(BATCH).enumerate() {
            for &hash in chunk {
                prefetch_line(self.slot(self.home(tag_of(hash))));
            }
            for &hash in chunk {
                self.probe(hash, |_, entry| {
                    prefetch(entry);
                    true
                });
            }
            for (n, &hash) in chunk.iter().enumerate() {
                out.push(self.find(hash, |entry| eq(batch * BATCH + n, entry)));
            }
        }
    }

    /// Adds `entry`, which is not in the index. False: no empty slot, which a table of at most half
    /// as many entries as slots never meets.
    #[must_use]
    pub fn insert(&self, _writer: &mut Writer, hash64: u64, entry: u32) -> bool {
        debug_assert!(entry != NONE);
        let tag = tag_of(hash64);
        let mut at = self.home(tag);
        for _ in 0..self.capacity {
            if self.load(at) == 0 {
                self.store(at, pack(tag, entry));
                return true;
            }
            at = self.after(at);
        }
        false
    }

    /// Takes `entry` out. False: it was not there.
    pub fn remove(&self, _writer: &mut Writer, hash64: u64, entry: u32) -> bool {
        let Some((found, _)) = self.probe(hash64, |_, other| other == entry) else { return false };
        // Shift back every later slot of the run that may lie at the hole or before it.
        let (mut hole, mut at) = (found, found);
        for _ in 0..self.capacity {
            at = self.after(at);
            let slot = self.load(at);
            if slot == 0 {
                break;
            }
            let wanted = self.home(tag_in(slot));
            if self.distance(wanted, at) >= self.distance(hole, at) {
                self.store(hole, slot);
                hole = at;
            }
        }
        self.store(hole, 0);
        true
    }

    /// Empties the index.
    pub fn clear(&self, _writer: &mut Writer) {
        for at in 0..self.capacity {
            self.store(at, 0);
        }
    }

    /// All entries in the index, for checks.
    pub fn entries(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.capacity).map(|at| self.load(at)).filter(|&slot| slot != 0).map(entry_in)
    }

    fn probe(&self, hash64: u64, mut eq: impl FnMut(u32, u32) -> bool) -> Option<(u32, u32)> {
        let tag = tag_of(hash64);
        let mut at = self.home(tag);
        for _ in 0..self.capacity {
            let slot = self.load(at);
            if slot == 0 {
                return None;
            }
            if tag_in(slot) == tag && eq(at, entry_in(slot)) {
                return Some((at, entry_in(slot)));
            }
            at = self.after(at);
        }
        None
    }

    /// The slot where the search for `tag` begins: its upper bits, scaled to the capacity.
    fn home(&self, tag: u32) -> u32 {
        high_half(u64::from(tag) * u64::from(self.capacity))
    }

    fn after(&self, at: u32) -> u32 {
        (at + 1) & (self.capacity - 1)
    }

    /// How far `to` lies after `from`, around the end.
    fn distance(&self, from: u32, to: u32) -> u32 {
        to.wrapping_sub(from) & (self.capacity - 1)
    }

    fn slot(&self, at: u32) -> &AtomicU64 {
        assert!(at < self.capacity);
        // SAFETY: within the capacity, whose slots are valid as `Index::new` demands.
        unsafe { self.slots.add(at as usize).as_ref() }
    }

    fn load(&self, at: u32) -> u64 {
        self.slot(at).load(Ordering::Acquire)
    }

    fn store(&self, at: u32, slot: u64) {
        self.slot(at).store(slot, Ordering::Release);
    }
}

fn high_half(word: u64) -> u32 {
    (word >> 32) as u32
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half is meant")]
fn low_half(word: u64) -> u32 {
    word as u32
}

fn tag_of(hash64: u64) -> u32 {
    high_half(hash64)
}

fn pack(tag: u32, entry: u32) -> u64 {
    (u64::from(tag) << 32) | u64::from(entry + 1)
}

fn tag_in(slot: u64) -> u32 {
    high_half(slot)
}

fn entry_in(slot: u64) -> u32 {
    low_half(slot).wrapping_sub(1)
}

/// Asks the processor to fetch the cache line of `address`; no effect on what the program means.
pub fn prefetch_line<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults, whatever the address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;
    use crate::pool::{Pool, PoolOptions, Wait};

    fn with_index(capacity: u32, f: impl FnOnce(&Index, &mut Writer)) {
        let slots: Vec<AtomicU64> = (0..capacity).map(|_| AtomicU64::new(0)).collect();
        // SAFETY: the vector outlives the index.
        let index = unsafe { Index::new(slots.as_ptr().cast_mut(), capacity) };
        let pool = Pool::open(PoolOptions::private(8 << 20)).unwrap();
        pool.write(Wait::Try, |writer| f(&index, writer)).unwrap().unwrap();
    }

    /// Few different tags, at both ends of the slots: long runs that wrap around.
    fn hash() -> impl Strategy<Value = u64> {
        prop_oneof![0..4u64, (1u64 << 32) - 4..1 << 32, 0..1u64 << 32].prop_map(|tag| tag << 32 | 7)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        #[test]
        fn behaves_like_a_map(ops in prop::collection::vec((any::<bool>(), 0..32u32, hash()), 0..200)) {
            with_index(64, |index, writer| {
                let mut model: HashMap<u32, u64> = HashMap::new();
                for (add, entry, hash) in ops {
                    match (add, model.get(&entry).copied()) {
                        (true, None) => {
                            assert!(index.insert(writer, hash, entry));
                            model.insert(entry, hash);
                        }
                        (false, Some(hash)) => {
                            assert!(index.remove(writer, hash, entry));
                            model.remove(&entry);
                        }
                        (_, old) => assert!(!index.remove(writer, !old.unwrap_or(hash), entry)),
                    }
                    for (&entry, &hash) in &model {
                        assert_eq!(index.find(hash, |e| e == entry), Some(entry));
                    }
                    assert_eq!(index.entries().count(), model.len());
                }
                let (entries, hashes): (Vec<u32>, Vec<u64>) = model.iter().unzip();
                let mut found = Vec::new();
                index.find_many(&hashes, |_| (), |n, entry| entries[n] == entry, &mut found);
                assert!(found.iter().copied().eq(entries.iter().map(|&e| Some(e))));
                index.clear(writer);
                assert_eq!(index.entries().count(), 0);
            });
        }
    }

    #[test]
    fn a_full_index_refuses_and_an_empty_one_finds_nothing() {
        with_index(4, |index, writer| {
            assert!((0..4).all(|entry| index.insert(writer, 0, entry)));
            assert!(!index.insert(writer, 0, 4));
            assert_eq!(index.find(0, |_| false), None);
        });
        with_index(0, |index, writer| {
            assert!(!index.insert(writer, 1, 1));
            assert!(!index.remove(writer, 1, 1));
            let mut found = Vec::new();
            index.find_many(&[1, 2], |_| (), |_, _| true, &mut found);
            assert_eq!(found, [None, None]);
        });
    }
}
