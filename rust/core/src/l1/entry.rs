//! One object's entry in the shared table: its state word, key, pins, flags, extents and links.
//!
//! Who writes: the holder of the writer lock makes, links and frees entries; without the lock,
//! anybody may move the word from FILLING to READY (publish) and from either to DYING (abandon,
//! discard), set and clear pin bits of its own member, and change flags, all by atomic
//! read-modify-write.
//!
//! - I1: everything but word, pins, flags, checksum, stamp and links changes only while the word is
//!   EMPTY; the word is stored last when an entry is made and first when it is freed.
//! - I2: the generation rises each time an entry is made, so (entry, generation) names an object once.
//! - I3: bytes of a READY entry never change.
//! - I4: extents of an entry are freed only when no pin bit is set.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::{ObjectMeta, Purpose};
use crate::ObjectKey;
use crate::pool::{L1_ENTRY_BYTES, MEMBERS_MAX};

/// The most extents of one object.
pub const EXTENTS_MAX: usize = 8;

/// What the state bits of a word say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Empty,
    Filling,
    Ready,
    /// Out of use; freed once nobody pins it.
    Dying,
    /// An evictor under the writer lock looks for pins: READY again if there are any. For those who
    /// have a pin it is READY.
    Evicting,
}

/// The word of an entry: state, purpose, owner and generation in one atomic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Word(pub(super) u64);

const STATE_MASK: u64 = 0b111;
const LOAD_BIT: u64 = 1 << 3;
const OWNER_SHIFT: u32 = 8;
const GENERATION_SHIFT: u32 = 16;
const GENERATION_MASK: u64 = (1 << 48) - 1;

impl Word {
    pub(super) fn new(state: State, purpose: Purpose, owner: u8, generation: u64) -> Self {
        let load = if purpose == Purpose::Load { LOAD_BIT } else { 0 };
        Self(
            state as u64
                | load
                | u64::from(owner) << OWNER_SHIFT
                | (generation & GENERATION_MASK) << GENERATION_SHIFT,
        )
    }

    pub(super) fn state(self) -> State {
        match self.0 & STATE_MASK {
            0 => State::Empty,
            1 => State::Filling,
            2 => State::Ready,
            3 => State::Dying,
            _ => State::Evicting,
        }
    }

    pub(super) fn with_state(self, state: State) -> Self {
        Self(self.0 & !STATE_MASK | state as u64)
    }

    pub(super) fn is_load(self) -> bool {
        self.0 & LOAD_BIT != 0
    }

    pub(super) fn owner(self) -> u8 {
        (self.0 >> OWNER_SHIFT & 0xff) as u8
    }

    pub(super) fn generation(self) -> u64 {
        self.0 >> GENERATION_SHIFT
    }

    /// The generation of the next object in the entry.
    pub(super) fn next_generation(self) -> u64 {
        (self.generation() + 1) & GENERATION_MASK
    }

    /// What the word is called while it names a live object.
    pub(super) fn is_live(self) -> bool {
        matches!(self.state(), State::Filling | State::Ready)
    }
}

/// Not yet on disk, and not to be evicted before it is, or is given up.
pub(super) const DIRTY: u64 = 1;
/// Some member writes it back; which one, is in the claimant's bits.
pub(super) const CLAIMED: u64 = 1 << 1;
const CLAIMANT_SHIFT: u32 = 8;

/// The flags of an entry claimed by `member`.
pub(super) fn claimed_by(member: u8) -> u64 {
    DIRTY | CLAIMED | u64::from(member) << CLAIMANT_SHIFT
}

/// Who claims an entry with these flags.
pub(super) fn claimant(flags: u64) -> Option<u8> {
    (flags & CLAIMED != 0).then_some((flags >> CLAIMANT_SHIFT & 0xff) as u8)
}

/// A run of pages of the data area.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Extent {
    /// The first page, counted from the start of the data area.
    pub first: u64,
    /// Number of pages.
    pub pages: u64,
}

const EXTENT_PAGES_BITS: u32 = 24;

impl Extent {
    /// The most pages of one extent.
    pub(super) const PAGES_MAX: u64 = (1 << EXTENT_PAGES_BITS) - 1;

    fn pack(self) -> u64 {
        debug_assert!(self.pages <= Self::PAGES_MAX);
        self.first << EXTENT_PAGES_BITS | self.pages
    }

    fn unpack(word: u64) -> Self {
        Self { first: word >> EXTENT_PAGES_BITS, pages: word & Self::PAGES_MAX }
    }

    /// The page behind the last one.
    pub fn end(self) -> u64 {
        self.first + self.pages
    }
}

/// One entry; the first cache line is all that a lookup and a pin touch.
#[repr(C, align(64))]
pub(super) struct Entry {
    pub(super) word: AtomicU64,
    key: [AtomicU64; 4],
    /// One bit for each member.
    pub(super) pinned: [AtomicU64; 2],
    pub(super) flags: AtomicU64,

    pub(super) checksum: AtomicU64,
    /// Pool clock of the last use, for the order after a rebuild.
    pub(super) stamp: AtomicU64,
    payload_bytes: AtomicU64,
    parent: [AtomicU64; 4],
    /// namespace | ranks << 16 | kind << 32 | has a parent << 40.
    shape: AtomicU64,

    pub(super) first_token: AtomicU32,
    last_token: AtomicU32,
    pub(super) prev: AtomicU32,
    pub(super) next: AtomicU32,
    extents: [AtomicU64; EXTENTS_MAX],
    _pad: [u64; 6],
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<Entry>() as u64 == L1_ENTRY_BYTES && align_of::<Entry>() == 64);
    assert!(offset_of!(Entry, word) == 0);
    assert!(offset_of!(Entry, key) == 8);
    assert!(offset_of!(Entry, pinned) == 40);
    assert!(offset_of!(Entry, flags) == 56);
    assert!(offset_of!(Entry, checksum) == 64);
    assert!(offset_of!(Entry, stamp) == 72);
    assert!(offset_of!(Entry, payload_bytes) == 80);
    assert!(offset_of!(Entry, parent) == 88);
    assert!(offset_of!(Entry, shape) == 120);
    assert!(offset_of!(Entry, first_token) == 128);
    assert!(offset_of!(Entry, last_token) == 132);
    assert!(offset_of!(Entry, prev) == 136);
    assert!(offset_of!(Entry, next) == 140);
    assert!(offset_of!(Entry, extents) == 144);
    assert!(MEMBERS_MAX <= 128);
};

impl Entry {
    pub(super) fn load(&self) -> Word {
        Word(self.word.load(Ordering::SeqCst))
    }

    /// Moves the word from `old` to `new`; false if it was another.
    pub(super) fn advance(&self, old: Word, new: Word) -> bool {
        self.word.compare_exchange(old.0, new.0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    pub(super) fn key(&self) -> ObjectKey {
        ObjectKey::load(&self.key)
    }

    /// Whether the key is `words`, as [`ObjectKey::words`] makes them.
    pub(super) fn has_key(&self, words: &[u64; 4]) -> bool {
        self.key.iter().zip(words).all(|(own, word)| own.load(Ordering::Relaxed) == *word)
    }

    pub(super) fn is_pinned(&self) -> bool {
        self.pinned.iter().any(|bits| bits.load(Ordering::SeqCst) != 0)
    }

    pub(super) fn is_pinned_by(&self, member: u8) -> bool {
        let (word, bit) = pin_bit(member);
        self.pinned[word].load(Ordering::SeqCst) & bit != 0
    }

    pub(super) fn set_pin(&self, member: u8) {
        let (word, bit) = pin_bit(member);
        self.pinned[word].fetch_or(bit, Ordering::SeqCst);
    }

    pub(super) fn clear_pin(&self, member: u8) {
        let (word, bit) = pin_bit(member);
        self.pinned[word].fetch_and(!bit, Ordering::SeqCst);
    }

    pub(super) fn is_dirty(&self) -> bool {
        self.flags.load(Ordering::SeqCst) & DIRTY != 0
    }

    /// Writes what I1 freezes; the word is EMPTY.
    pub(super) fn describe(&self, meta: &ObjectMeta, extents: &[Extent]) {
        meta.key.store(&self.key);
        meta.parent.unwrap_or(ObjectKey([0; 32])).store(&self.parent);
        let shape = u64::from(meta.namespace)
            | u64::from(meta.ranks) << 16
            | u64::from(meta.kind) << 32
            | u64::from(meta.parent.is_some()) << 40;
        self.shape.store(shape, Ordering::Relaxed);
        self.payload_bytes.store(meta.payload_bytes, Ordering::Relaxed);
        self.first_token.store(meta.first_token, Ordering::Relaxed);
        self.last_token.store(meta.last_token, Ordering::Relaxed);
        self.checksum.store(0, Ordering::Relaxed);
        self.flags.store(0, Ordering::Relaxed);
        for (n, place) in self.extents.iter().enumerate() {
            place.store(extents.get(n).map_or(0, |extent| extent.pack()), Ordering::Relaxed);
        }
    }

    pub(super) fn meta(&self) -> ObjectMeta {
        let shape = self.shape.load(Ordering::Relaxed);
        let parent = (shape >> 40 & 1 == 1).then(|| ObjectKey::load(&self.parent));
        ObjectMeta {
            key: self.key(),
            namespace: (shape & 0xffff) as u16,
            kind: (shape >> 32 & 0xff) as u8,
            parent,
            first_token: self.first_token.load(Ordering::Relaxed),
            last_token: self.last_token.load(Ordering::Relaxed),
            ranks: (shape >> 16 & 0xffff) as u16,
            payload_bytes: self.payload_bytes.load(Ordering::Relaxed),
        }
    }

    pub(super) fn extents(&self) -> impl Iterator<Item = Extent> + '_ {
        let load = |place: &AtomicU64| Extent::unpack(place.load(Ordering::Relaxed));
        self.extents.iter().map(load).take_while(|extent| extent.pages > 0)
    }

    pub(super) fn payload_bytes(&self) -> u64 {
        self.payload_bytes.load(Ordering::Relaxed)
    }

    /// Pages of all extents.
    pub(super) fn pages(&self) -> u64 {
        self.extents().map(|extent| extent.pages).sum()
    }
}

fn pin_bit(member: u8) -> (usize, u64) {
    (usize::from(member / 64), 1 << (member % 64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_keeps_its_parts_apart() {
        use State::{Dying, Empty, Evicting, Filling, Ready};
        for state in [Empty, Filling, Ready, Dying, Evicting] {
            let word = Word::new(state, Purpose::Load, 127, GENERATION_MASK);
            assert_eq!((word.state(), word.owner(), word.is_load()), (state, 127, true));
            assert_eq!((word.generation(), word.next_generation()), (GENERATION_MASK, 0));
            assert_eq!(word.with_state(State::Ready).state(), State::Ready);
            assert_eq!(word.with_state(State::Ready).generation(), GENERATION_MASK);
        }
    }

    #[test]
    fn an_entry_gives_back_what_it_was_told() {
        // SAFETY: all fields are atomics or integers, for which zero is a valid value.
        let entry: Entry = unsafe { std::mem::zeroed() };
        for parent in [None, Some(ObjectKey([9; 32]))] {
            let meta = ObjectMeta {
                key: ObjectKey(std::array::from_fn(|n| u8::try_from(n).unwrap())),
                namespace: 0xabcd,
                kind: 3,
                parent,
                first_token: 7,
                last_token: u32::MAX,
                ranks: 0x1234,
                payload_bytes: 1 << 40,
            };
            let extents: Vec<_> =
                (1..=EXTENTS_MAX as u64).map(|n| Extent { first: n << 30, pages: n }).collect();
            entry.describe(&meta, &extents);
            assert_eq!(entry.meta(), meta);
            assert!(entry.extents().eq(extents));
            assert!(entry.has_key(&meta.key.words()));
        }
        for member in [0, 63, 64, 127] {
            entry.set_pin(member);
            assert!(entry.is_pinned_by(member));
            entry.clear_pin(member);
            assert!(!entry.is_pinned());
        }
        assert_eq!(claimant(claimed_by(127)), Some(127));
        assert_eq!(claimant(DIRTY), None);
    }
}
