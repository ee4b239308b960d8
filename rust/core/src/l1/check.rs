//! Compares the derived structures with the entries.

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use super::entry::State;
use super::table::Table;
use crate::pool::{NONE, Writer};
use crate::units::{PAGE_BYTES, pages_for};

/// The first contradiction, in words. Entries may be published, pinned and abandoned meanwhile.
pub(super) fn check(table: &Table, writer: &mut Writer) -> Result<(), String> {
    let listed = walk_list(table)?;
    let free = walk_free(table)?;
    let indexed: Vec<u32> = table.index.entries().collect();
    let in_index: HashSet<u32> = indexed.iter().copied().collect();
    ensure(in_index.len() == indexed.len(), || "an entry is in the index twice".into())?;
    let mut pages: HashSet<u64> = HashSet::new();
    let (mut bytes, mut count) = (0, 0);
    for i in 0..table.high_water() {
        let entry = table.entry(i);
        let word = entry.load();
        let used = word.state() != State::Empty;
        ensure(used == listed.contains(&i), || {
            format!("entry {i} is {word:?} but listed: {used}")
        })?;
        ensure(used != free.contains(&i), || format!("entry {i} is {word:?} but free: {used}"))?;
        if !used {
            ensure(!in_index.contains(&i), || format!("empty entry {i} is in the index"))?;
            continue;
        }
        count += 1;
        bytes += entry.pages() * PAGE_BYTES;
        let wanted = pages_for(entry.meta().payload_bytes);
        ensure(entry.pages() == wanted, || format!("entry {i} has not {wanted} pages"))?;
        for extent in entry.extents() {
            let piece = table.extents().piece_of(extent).and_then(|p| u32::try_from(p).ok());
            ensure(piece.is_some_and(|p| writer.pool().piece_reserved(p)), || {
                format!("{extent:?} of entry {i} is not in a reserved piece")
            })?;
            for page in extent.first..extent.end() {
                ensure(pages.insert(page), || format!("page {page} of entry {i} is used twice"))?;
            }
        }
        let key = entry.key();
        let found = table.index.find(key.hash64(), |other| table.entry(other).key() == key);
        let live = entry.load().is_live();
        ensure(!live || found == Some(i), || format!("entry {i} is not found by its key"))?;
    }
    let never_used = in_index.iter().chain(&listed).find(|&&i| i >= table.high_water());
    ensure(never_used.is_none(), || format!("entry {never_used:?} was never made"))?;
    let root = table.root();
    let (had, counted) = (root.bytes.load(Ordering::Relaxed), root.count.load(Ordering::Relaxed));
    ensure(had == bytes, || format!("{had} bytes are counted, {bytes} used"))?;
    ensure(counted == count, || format!("{counted} entries are counted, {count} used"))?;
    let marked = table.extents().used();
    let all_marked =
        marked == pages.len() as u64 && pages.iter().all(|&page| table.extents().is_used(page));
    ensure(all_marked, || format!("the bitmap has {marked} pages, entries {}", pages.len()))
}

fn walk_list(table: &Table) -> Result<HashSet<u32>, String> {
    let mut listed = HashSet::new();
    let mut newer = None;
    for i in table.list().iter_from_tail() {
        ensure(listed.insert(i), || format!("the list has entry {i} twice"))?;
        newer = Some(i);
    }
    ensure(newer == table.list().head(), || "the list does not end at its head".into())?;
    let mut at = table.list().head().unwrap_or(NONE);
    let mut steps = 0;
    while at != NONE && steps <= listed.len() {
        steps += 1;
        at = table.entry(at).next.load(Ordering::Relaxed);
    }
    ensure(steps == listed.len(), || "the list differs by direction".into())?;
    Ok(listed)
}

fn walk_free(table: &Table) -> Result<HashSet<u32>, String> {
    let mut free = HashSet::new();
    let mut at = table.root().free_head.load(Ordering::Relaxed);
    while at != NONE {
        ensure(free.insert(at), || format!("the free list has entry {at} twice"))?;
        at = table.entry(at).next.load(Ordering::Relaxed);
    }
    Ok(free)
}

fn ensure(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise()) }
}
