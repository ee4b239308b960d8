//! The records of the objects on disk, in the pool: one truth for all members.
//!
//! A record that is not EMPTY counts its file's bytes; one that is PRESENT is in the LRU list.
//! Everything but lookups happens under the writer lock. WRITING and DYING records belong to the
//! member that is at work on their file *without* the lock; when it dies they become orphans, and
//! the next member that writes looks at the file and decides (`super::settle`): reaping itself
//! does no disk access under the lock.

use std::cmp::Reverse;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::ObjectInfo;
use crate::ObjectKey;
use crate::pool::index::Index;
use crate::pool::list::{Links, List};
use crate::pool::{
    L2_RECORD_BYTES, NONE, Pool, Region, Table as PoolTable, TableHooks, TableRoot, Writer,
};
use crate::sys::map::Mapping;

/// `spare` words of the root: records below this number have been used.
const HIGH_WATER: usize = 0;
/// 1 once names and sizes were compared with the directory.
const SCAN_DONE: usize = 1;
const ORPHANS: usize = 2;
/// Number of the latest scan.
const SCANS: usize = 3;
/// Owner of a record whose owner died.
const ORPHAN: u8 = u8::MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum State {
    Empty = 0,
    /// Bytes are reserved, the file is being made.
    Writing = 1,
    Present = 2,
    /// The file is being removed; the bytes count until it is.
    Dying = 3,
}

/// State, owner and generation of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Word(u64);

impl Word {
    fn new(state: State, owner: u8, generation: u64) -> Self {
        Self(state as u64 | u64::from(owner) << 2 | generation << 10)
    }

    pub(super) fn state(self) -> State {
        match self.0 & 3 {
            0 => State::Empty,
            1 => State::Writing,
            2 => State::Present,
            _ => State::Dying,
        }
    }

    /// Whether both are of one object, in whatever state.
    pub(super) fn same_object(self, other: Self) -> bool {
        self.0 >> 10 == other.0 >> 10
    }

    fn owner(self) -> u8 {
        (self.0 >> 2 & 0xff) as u8
    }

    fn with(self, state: State, owner: u8) -> Self {
        Self::new(state, owner, self.0 >> 10)
    }
}

#[repr(C)]
struct Record {
    word: AtomicU64,
    key: [AtomicU64; 4],
    parent: [AtomicU64; 4],
    file_bytes: AtomicU64,
    payload_bytes: AtomicU64,
    stamp: AtomicU64,
    first_token: AtomicU32,
    last_token: AtomicU32,
    /// Namespace number, kind and flags.
    group: AtomicU32,
    ranks: AtomicU32,
    prev: AtomicU32,
    next: AtomicU32,
    /// The scan that last saw the file.
    seen: AtomicU64,
}

const _: () = assert!(size_of::<Record>() as u64 == L2_RECORD_BYTES);
const HAS_PARENT: u32 = 1 << 24;

/// A record as it was at one moment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Snapshot {
    pub(super) index: u32,
    pub(super) word: Word,
    pub(super) info: ObjectInfo,
    pub(super) namespace: u16,
    pub(super) file_bytes: u64,
}

/// What became of a reservation.
#[derive(Debug)]
pub(super) enum Begin {
    Reserved(u32, Word),
    /// On disk, or another writer is at it.
    Exists,
    /// Its old file is being removed.
    Busy,
    /// So many bytes must go first; 0: a record is wanted.
    Evict(u64),
}

/// What to make of a record after work on its file without the lock.
#[derive(Debug, Clone, Copy)]
pub(super) enum Outcome {
    /// The file is in place.
    Present,
    /// The file is in place and in use: the most recent of all.
    InUse,
    /// There is no file.
    Free,
}

/// A view of the table.
pub struct Table {
    records: NonNull<Record>,
    count: u32,
    root: NonNull<TableRoot>,
    index: Index,
    _mapping: Arc<Mapping>,
}

// SAFETY: all of it points into the mapping that it holds, and all access is atomic.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Table").field("records", &self.count).finish_non_exhaustive()
    }
}

impl Links for Table {
    fn prev(&self, i: u32) -> &AtomicU32 {
        &self.record(i).prev
    }

    fn next(&self, i: u32) -> &AtomicU32 {
        &self.record(i).next
    }
}

impl TableHooks for Table {
    fn rebuild(&self, writer: &mut Writer) {
        let root = self.root();
        self.index.clear(writer);
        self.list().clear(writer);
        root.free_head.store(NONE, Ordering::Relaxed);
        let mut used = Vec::new();
        let (mut bytes, mut orphans) = (0, 0);
        for i in 0..self.high_water() {
            let record = self.record(i);
            let word = self.word(i);
            if word.state() == State::Empty {
                self.push_free(i);
                continue;
            }
            bytes += record.file_bytes.load(Ordering::Relaxed);
            orphans += u64::from(word.state() != State::Present && word.owner() == ORPHAN);
            if !self.index.insert(writer, self.key(i).hash64(), i) {
                log::error!("the disk table's index is full");
            }
            used.push(i);
        }
        root.bytes.store(bytes, Ordering::Relaxed);
        root.count.store(u32::try_from(used.len()).unwrap_or(u32::MAX), Ordering::Relaxed);
        root.spare[ORPHANS].store(orphans, Ordering::Relaxed);
        used.retain(|&i| self.word(i).state() == State::Present);
        used.sort_by_key(|&i| {
            let record = self.record(i);
            let depth = record.last_token.load(Ordering::Relaxed);
            (Reverse(record.stamp.load(Ordering::Relaxed)), depth)
        });
        for i in used {
            self.list().push_back(writer, i);
        }
    }

    fn reap(&self, _writer: &mut Writer, dead_member: u8) {
        for i in 0..self.high_water() {
            let word = self.word(i);
            let at_work = matches!(word.state(), State::Writing | State::Dying);
            if at_work && word.owner() == dead_member {
                self.set_word(i, word.with(word.state(), ORPHAN));
                self.root().spare[ORPHANS].fetch_add(1, Ordering::Release);
            }
        }
    }
}

impl Table {
    /// The table of `pool`, which from now on keeps it right when members die.
    pub fn new(pool: &Arc<Pool>) -> Arc<Self> {
        let (records, bytes) = pool.region(Region::L2Records);
        let table = Arc::new(Self {
            records: NonNull::new(records.cast()).unwrap_or(NonNull::dangling()),
            count: u32::try_from(bytes / L2_RECORD_BYTES).unwrap_or(u32::MAX),
            root: NonNull::from(pool.root(PoolTable::L2)),
            index: pool.index(PoolTable::L2),
            _mapping: pool.mapping().clone(),
        });
        pool.add_hooks(table.clone());
        table
    }

    fn record(&self, i: u32) -> &Record {
        assert!(i < self.count, "record {i} of {}", self.count);
        // SAFETY: within the region.
        let record = unsafe { self.records.add(i as usize) };
        // SAFETY: aligned, atomics only, mapped as long as `self`.
        unsafe { record.as_ref() }
    }

    pub(super) fn root(&self) -> &TableRoot {
        // SAFETY: in the header of the mapping that `self` holds; atomics only.
        unsafe { self.root.as_ref() }
    }

    fn list(&self) -> List<'_, Self> {
        List::new(self.root(), self)
    }

    pub(super) fn word(&self, i: u32) -> Word {
        Word(self.record(i).word.load(Ordering::Acquire))
    }

    fn set_word(&self, i: u32, word: Word) {
        self.record(i).word.store(word.0, Ordering::Release);
    }

    fn key(&self, i: u32) -> ObjectKey {
        ObjectKey::load(&self.record(i).key)
    }

    pub(super) fn high_water(&self) -> u32 {
        let mark = self.root().spare[HIGH_WATER].load(Ordering::Acquire);
        u32::try_from(mark).unwrap_or(u32::MAX).min(self.count)
    }

    pub(super) fn scan_done(&self) -> bool {
        self.root().spare[SCAN_DONE].load(Ordering::Acquire) == 1
    }

    pub(super) fn set_scan_done(&self, done: bool) {
        self.root().spare[SCAN_DONE].store(u64::from(done), Ordering::Release);
    }

    pub(super) fn next_scan(&self) -> u64 {
        self.root().spare[SCANS].fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(super) fn has_orphans(&self) -> bool {
        self.root().spare[ORPHANS].load(Ordering::Acquire) > 0
    }

    /// The number and word of the record of `key`, whatever its state.
    pub(super) fn find(&self, key: &ObjectKey) -> Option<(u32, Word)> {
        let i = self.index.find(key.hash64(), |i| self.holds(i, key))?;
        Some((i, self.word(i)))
    }

    /// Appends for each key whether it is on disk.
    pub(super) fn lookup(&self, keys: &[ObjectKey], out: &mut Vec<bool>) {
        let hashes: Vec<u64> = keys.iter().map(ObjectKey::hash64).collect();
        let mut found = Vec::with_capacity(keys.len());
        let line = |i| crate::pool::index::prefetch_line(&raw const *self.record(i));
        self.index.find_many(&hashes, line, |n, i| self.holds(i, &keys[n]), &mut found);
        out.extend(found.into_iter().zip(keys).map(|(i, key)| {
            i.is_some_and(|i| self.word(i).state() == State::Present && self.holds(i, key))
        }));
    }

    /// Whether record `i` has this key and is in use, at one moment.
    fn holds(&self, i: u32, key: &ObjectKey) -> bool {
        let before = self.word(i);
        let same = before.state() != State::Empty && self.key(i) == *key;
        fence(Ordering::Acquire);
        same && self.word(i).0 >> 10 == before.0 >> 10
    }

    /// A consistent copy of record `i`, `None` if it changed meanwhile.
    pub(super) fn read(&self, i: u32) -> Option<Snapshot> {
        let word = self.word(i);
        let record = self.record(i);
        let group = record.group.load(Ordering::Relaxed);
        let [kind, _] = low_half(group >> 16).to_le_bytes();
        let parent = ObjectKey::load(&record.parent);
        let snapshot = Snapshot {
            index: i,
            word,
            info: ObjectInfo {
                key: self.key(i),
                parent: (group & HAS_PARENT != 0).then_some(parent),
                kind,
                first_token: record.first_token.load(Ordering::Relaxed),
                last_token: record.last_token.load(Ordering::Relaxed),
                ranks: low_half(record.ranks.load(Ordering::Relaxed)),
                payload_bytes: record.payload_bytes.load(Ordering::Relaxed),
            },
            namespace: low_half(group),
            file_bytes: record.file_bytes.load(Ordering::Relaxed),
        };
        fence(Ordering::Acquire);
        (word.state() != State::Empty && self.word(i) == word).then_some(snapshot)
    }

    /// Reserves `file_bytes` for a new object.
    pub(super) fn begin(
        &self,
        writer: &mut Writer,
        info: &ObjectInfo,
        namespace: u16,
        file_bytes: u64,
        limit: u64,
    ) -> Begin {
        match self.find(&info.key).map(|(_, word)| word.state()) {
            Some(State::Present | State::Writing) => return Begin::Exists,
            Some(_) => return Begin::Busy,
            None => {}
        }
        let used = self.root().bytes.load(Ordering::Relaxed);
        let wanted = used.saturating_add(file_bytes);
        if wanted > limit {
            return Begin::Evict(wanted - limit);
        }
        let owner = writer.pool().member();
        match self.make(writer, info, namespace, file_bytes, owner) {
            Some((i, word)) => Begin::Reserved(i, word),
            None => Begin::Evict(0),
        }
    }

    /// A WRITING record; `None`: the table is full.
    pub(super) fn make(
        &self,
        writer: &mut Writer,
        info: &ObjectInfo,
        namespace: u16,
        file_bytes: u64,
        owner: u8,
    ) -> Option<(u32, Word)> {
        let i = self.take_free()?;
        let record = self.record(i);
        info.key.store(&record.key);
        info.parent.unwrap_or(ObjectKey([0; 32])).store(&record.parent);
        let has_parent = if info.parent.is_some() { HAS_PARENT } else { 0 };
        let group = u32::from(namespace) | u32::from(info.kind) << 16 | has_parent;
        record.group.store(group, Ordering::Relaxed);
        record.file_bytes.store(file_bytes, Ordering::Relaxed);
        record.payload_bytes.store(info.payload_bytes, Ordering::Relaxed);
        record.first_token.store(info.first_token, Ordering::Relaxed);
        record.last_token.store(info.last_token, Ordering::Relaxed);
        record.ranks.store(u32::from(info.ranks), Ordering::Relaxed);
        record.stamp.store(writer.pool().clock(), Ordering::Relaxed);
        record.seen.store(0, Ordering::Relaxed);
        record.prev.store(NONE, Ordering::Relaxed);
        record.next.store(NONE, Ordering::Relaxed);
        let word = Word::new(State::Writing, owner, (self.word(i).0 >> 10) + 1);
        self.set_word(i, word);
        if !self.index.insert(writer, info.key.hash64(), i) {
            self.set_word(i, word.with(State::Empty, 0));
            self.push_free(i);
            return None;
        }
        self.root().bytes.fetch_add(file_bytes, Ordering::Relaxed);
        self.root().count.fetch_add(1, Ordering::Relaxed);
        Some((i, word))
    }

    /// Ends work on a file. False: the record is not what it was, and nothing was done.
    pub(super) fn finish(&self, writer: &mut Writer, i: u32, word: Word, to: Outcome) -> bool {
        if self.word(i) != word || word.state() == State::Empty {
            return false;
        }
        if word.state() == State::Present {
            self.list().unlink(writer, i);
        }
        let record = self.record(i);
        match to {
            Outcome::Present | Outcome::InUse => {
                self.set_word(i, word.with(State::Present, 0));
                let parent = self.resident_parent(i).filter(|_| matches!(to, Outcome::Present));
                if let Some(parent) = parent {
                    let stamp = self.record(parent).stamp.load(Ordering::Relaxed);
                    record.stamp.store(stamp, Ordering::Relaxed);
                    self.list().insert_behind(writer, parent, i);
                } else {
                    record.stamp.store(writer.pool().clock(), Ordering::Relaxed);
                    self.list().push_front(writer, i);
                }
            }
            Outcome::Free => {
                self.set_word(i, word.with(State::Empty, 0));
                self.index.remove(writer, self.key(i).hash64(), i);
                let bytes = record.file_bytes.load(Ordering::Relaxed);
                self.root().bytes.fetch_sub(bytes, Ordering::Relaxed);
                self.root().count.fetch_sub(1, Ordering::Relaxed);
                self.push_free(i);
            }
        }
        true
    }

    fn resident_parent(&self, i: u32) -> Option<u32> {
        let parent = self.read(i)?.info.parent?;
        let (parent, word) = self.find(&parent)?;
        (parent != i && word.state() == State::Present).then_some(parent)
    }

    /// Marks the least recent objects DYING, ours to remove, until they hold `bytes` or are `most`.
    pub(super) fn condemn(&self, writer: &mut Writer, bytes: u64, most: usize) -> Vec<Snapshot> {
        let (mut victims, mut freed) = (Vec::new(), 0);
        let owner = writer.pool().member();
        while freed < bytes.max(1) && victims.len() < most {
            let Some(i) = self.list().tail() else { break };
            self.list().unlink(writer, i);
            self.set_word(i, self.word(i).with(State::Dying, owner));
            let Some(victim) = self.read(i) else { break };
            freed += victim.file_bytes;
            victims.push(victim);
        }
        victims
    }

    /// Takes over records whose owners died.
    pub(super) fn adopt_orphans(&self, writer: &mut Writer, most: usize) -> Vec<Snapshot> {
        let owner = writer.pool().member();
        let mut adopted = Vec::new();
        for i in 0..self.high_water() {
            let word = self.word(i);
            let at_work = matches!(word.state(), State::Writing | State::Dying);
            if !at_work || word.owner() != ORPHAN {
                continue;
            }
            if adopted.len() == most {
                return adopted;
            }
            self.set_word(i, word.with(word.state(), owner));
            self.root().spare[ORPHANS].fetch_sub(1, Ordering::Relaxed);
            adopted.extend(self.read(i));
        }
        self.root().spare[ORPHANS].store(0, Ordering::Relaxed);
        adopted
    }

    /// Makes a chain the most recent, its root ahead of what continues it.
    pub(super) fn touch(&self, writer: &mut Writer, keys_root_first: &[ObjectKey]) {
        let stamp = writer.pool().clock();
        for key in keys_root_first.iter().rev() {
            let Some((i, word)) = self.find(key) else { continue };
            if word.state() == State::Present {
                self.list().move_to_front(writer, i);
                self.record(i).stamp.store(stamp, Ordering::Relaxed);
            }
        }
    }

    /// Notes that scan number `scan` saw the file of record `i`.
    pub(super) fn mark_seen(&self, i: u32, scan: u64) {
        self.record(i).seen.store(scan, Ordering::Relaxed);
    }

    pub(super) fn seen(&self, i: u32) -> u64 {
        self.record(i).seen.load(Ordering::Relaxed)
    }

    /// Least recent first: what is on disk.
    pub(super) fn oldest_first(&self, _writer: &mut Writer) -> Vec<Snapshot> {
        self.list().iter_from_tail().filter_map(|i| self.read(i)).collect()
    }

    fn take_free(&self) -> Option<u32> {
        let root = self.root();
        let head = root.free_head.load(Ordering::Relaxed);
        if head != NONE {
            root.free_head.store(self.next(head).load(Ordering::Relaxed), Ordering::Relaxed);
            return Some(head);
        }
        let fresh = self.high_water();
        (fresh < self.count).then(|| {
            root.spare[HIGH_WATER].store(u64::from(fresh) + 1, Ordering::Release);
            fresh
        })
    }

    fn push_free(&self, i: u32) {
        let root = self.root();
        self.next(i).store(root.free_head.load(Ordering::Relaxed), Ordering::Relaxed);
        root.free_head.store(i, Ordering::Relaxed);
    }

    /// Compares every derived structure with the records, for tests.
    pub(super) fn check(&self, _writer: &mut Writer) -> Result<(), String> {
        let (mut bytes, mut count, mut present) = (0, 0_u32, 0);
        for i in 0..self.high_water() {
            let Some(record) = self.read(i) else { continue };
            bytes += record.file_bytes;
            count += 1;
            present += usize::from(record.word.state() == State::Present);
            if self.find(&record.info.key).map(|(found, _)| found) != Some(i) {
                return Err(format!("record {i} is not found by its key"));
            }
        }
        let root = self.root();
        let counted = (root.bytes.load(Ordering::Relaxed), root.count.load(Ordering::Relaxed));
        if counted != (bytes, count) {
            return Err(format!("root says {counted:?}, records say {:?}", (bytes, count)));
        }
        let listed = self.list().iter_from_tail().take(self.count as usize + 1).count();
        if listed != present || self.index.entries().count() != count as usize {
            return Err(format!("{present} are present, {listed} in the list, {count} in use"));
        }
        Ok(())
    }
}

/// Fields of 16 bits live in atomics of 32.
fn low_half(word: u32) -> u16 {
    u16::try_from(word & 0xffff).unwrap_or_default()
}
