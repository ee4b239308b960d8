use super::*;
use crate::pool::PoolOptions;

const MIB: u64 = 1 << 20;

pub(super) fn arena(cpu_bytes: u64, entries: u32) -> Arena {
    let mut options = PoolOptions::private(cpu_bytes);
    options.l1_entries = Some(entries);
    let arena = Arena::new(Pool::open(options).unwrap());
    for _ in 0..10_000 {
        if arena.gauges().bytes_reserved == arena.gauges().capacity {
            return arena;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("the arena's memory is not there after 10 s");
}

pub(super) fn key(n: u64) -> ObjectKey {
    ObjectKey(*blake3::hash(&n.to_le_bytes()).as_bytes())
}

pub(super) fn meta(n: u64, parent: Option<u64>, bytes: u64) -> ObjectMeta {
    ObjectMeta {
        key: key(n),
        namespace: 0,
        kind: 0,
        parent: parent.map(key),
        first_token: u32::try_from(n).unwrap(),
        last_token: u32::try_from(n).unwrap() + 1,
        ranks: 1,
        payload_bytes: bytes,
    }
}

fn reserve(arena: &Arena, meta: &ObjectMeta) -> Option<Slot> {
    match arena.reserve(meta, Purpose::Store, Wait::Try).unwrap() {
        Reserve::Slot(slot) => Some(slot),
        _ => None,
    }
}

fn store(arena: &Arena, n: u64, parent: Option<u64>, bytes: u64) -> Slot {
    let slot = reserve(arena, &meta(n, parent, bytes)).expect("room");
    assert!(arena.publish(slot, n, false));
    arena.unpin(slot);
    slot
}

pub(super) fn find(arena: &Arena, n: u64) -> Option<(Slot, SlotState)> {
    let mut found = Vec::new();
    arena.lookup(&[key(n)], &mut found);
    found[0]
}

#[test]
fn an_object_is_found_from_publication_to_eviction() {
    let arena = arena(8 * MIB, 64);
    let slot = reserve(&arena, &meta(1, None, 10_000)).unwrap();
    assert_eq!(find(&arena, 1), None, "a store in progress counts as absent");
    assert_eq!(
        arena.reserve(&meta(1, None, 10_000), Purpose::Load, Wait::Try).unwrap(),
        Reserve::Exists(slot)
    );
    assert_eq!(arena.state(slot), SlotState::Filling);
    assert!(arena.publish(slot, 77, false) && !arena.publish(slot, 78, false));
    assert_eq!(find(&arena, 1), Some((slot, SlotState::Ready)));
    assert_eq!(arena.checksum(slot), Some(77));
    assert_eq!(arena.meta(slot), Some(meta(1, None, 10_000)));
    assert_eq!(arena.extents(slot).unwrap().iter().map(|e| e.1).sum::<u64>(), 12_288);
    assert_eq!(arena.clear(), 0, "it is pinned");
    arena.unpin(slot);
    assert_eq!(arena.clear(), 12_288);
    assert_eq!((find(&arena, 1), arena.state(slot)), (None, SlotState::Gone));
    assert_eq!((arena.extents(slot), arena.meta(slot), arena.pin(slot)), (None, None, false));
    arena.check().unwrap();
}

#[test]
fn spans_are_the_payload_and_lie_in_one_piece_each() {
    let arena = arena(8 * MIB, 64);
    let pool = &arena.pool;
    let pieces: Vec<_> = (0..pool.pieces()).map(|piece| pool.piece(piece)).collect();
    assert_eq!(pieces.iter().map(|piece| piece.1).sum::<u64>(), pool.data_pages() * PAGE_BYTES);
    // Every second small object goes, so that a larger one needs several extents.
    let small: Vec<_> = (0..32).map(|n| store(&arena, n, None, 32 * 1024)).collect();
    let rest = arena.gauges().capacity - arena.gauges().bytes_used;
    let filler = reserve(&arena, &meta(100, None, rest)).expect("room");
    small.iter().step_by(2).for_each(|&slot| assert!(arena.pin(slot)));
    arena.clear();
    let slot = reserve(&arena, &meta(200, None, 100_001)).expect("room");
    let spans = arena.spans(slot).unwrap();
    assert!(spans.len() > 1, "{spans:?}");
    assert_eq!(spans.iter().map(|span| span.1).sum::<u64>(), 100_001);
    for (span, extent) in spans.iter().zip(arena.extents(slot).unwrap()) {
        assert_eq!(span.0, arena.address(extent.0, span.1));
        let holds = |piece: &&(*mut u8, u64)| {
            piece.0 <= span.0 && span.0.addr() as u64 + span.1 <= piece.0.addr() as u64 + piece.1
        };
        assert_eq!(pieces.iter().filter(holds).count(), 1, "{span:?} in {pieces:?}");
    }
    arena.abandon(slot);
    arena.unpin(slot);
    assert_eq!(arena.spans(slot), None, "gone");
    arena.abandon(filler);
    arena.unpin(filler);
}

#[test]
fn loads_are_visible_while_they_fill() {
    let arena = arena(8 * MIB, 64);
    let Reserve::Slot(slot) =
        arena.reserve(&meta(1, None, 5000), Purpose::Load, Wait::Try).unwrap()
    else {
        panic!("no slot")
    };
    assert_eq!(find(&arena, 1), Some((slot, SlotState::Filling)));
    assert!(arena.pin(slot));
    arena.abandon(slot);
    assert_eq!((find(&arena, 1), arena.state(slot)), (None, SlotState::Gone));
    assert!(!arena.publish(slot, 0, false) && !arena.pin(slot));
    arena.unpin(slot);
    assert_eq!(arena.gauges().entries, 1, "one pin is left");
    // The key is free for another object meanwhile.
    let other = reserve(&arena, &meta(1, None, 5000)).unwrap();
    arena.check().unwrap();
    arena.unpin(slot);
    assert_eq!(arena.gauges().entries, 1);
    arena.abandon(other);
    arena.unpin(other);
    assert_eq!((arena.gauges().entries, arena.gauges().bytes_used), (0, 0));
    arena.check().unwrap();
}

#[test]
fn suffixes_go_before_prefixes_and_a_touched_chain_goes_last() {
    let arena = arena(8 * MIB, 64);
    let size = arena.gauges().capacity / 6 / PAGE_BYTES * PAGE_BYTES;
    for n in 0..3 {
        store(&arena, n, n.checked_sub(1), size);
    }
    for n in 10..13 {
        store(&arena, n, (n > 10).then(|| n - 1), size);
    }
    arena.touch(&[key(0), key(1), key(2)]);
    let mut gone = Vec::new();
    for n in 20..26 {
        store(&arena, n, None, size);
        let now = [0, 1, 2, 10, 11, 12].into_iter().filter(|&n| find(&arena, n).is_none());
        gone.extend(now.filter(|n| !gone.contains(n)).collect::<Vec<_>>());
        arena.check().unwrap();
    }
    assert_eq!(gone, [12, 11, 10, 2, 1, 0]);
    assert_eq!(arena.gauges().evictions, 6);
}

#[test]
fn a_pinned_a_dirty_and_a_filling_object_stay() {
    let arena = arena(8 * MIB, 64);
    let size = arena.gauges().capacity / 4 / PAGE_BYTES * PAGE_BYTES;
    let pinned = store(&arena, 1, None, size);
    assert!(arena.pin(pinned));
    let dirty = store(&arena, 2, None, size);
    arena.mark_dirty(dirty);
    let filling = reserve(&arena, &meta(3, None, size)).unwrap();
    store(&arena, 4, None, size);
    let evictions = arena.gauges().evictions;
    assert_eq!(reserve(&arena, &meta(5, None, 2 * size)), None);
    assert_eq!(arena.gauges().evictions, evictions, "nothing is evicted in vain");
    store(&arena, 5, None, size);
    assert_eq!(find(&arena, 4), None);
    for slot in [pinned, dirty, filling] {
        assert_ne!(arena.state(slot), SlotState::Gone);
    }
    assert_eq!(arena.dirty(9), [dirty]);
    assert_eq!(arena.dirty(9), [], "claimed once");
    arena.set_clean(dirty);
    store(&arena, 6, None, size);
    assert_eq!(arena.state(dirty), SlotState::Gone);
    arena.check().unwrap();
}

#[test]
fn the_table_may_be_smaller_than_the_memory() {
    let arena = arena(8 * MIB, 4);
    for n in 0..20 {
        store(&arena, n, n.checked_sub(1), 4096);
        arena.check().unwrap();
    }
    assert_eq!(arena.gauges().entries, 4);
    let huge = meta(99, None, arena.gauges().capacity + 1);
    assert_eq!(reserve(&arena, &huge), None);
    assert_eq!(reserve(&arena, &meta(99, None, 0)), None);
}

#[test]
fn a_rebuild_finds_everything_again_in_the_same_order() {
    let arena = arena(8 * MIB, 64);
    let size = arena.gauges().capacity / 8 / PAGE_BYTES * PAGE_BYTES;
    for n in 0..3 {
        store(&arena, n, n.checked_sub(1), size);
    }
    store(&arena, 10, None, size);
    arena.touch(&[key(0), key(1), key(2)]);
    let filling = reserve(&arena, &meta(20, None, size)).unwrap();
    let dying = reserve(&arena, &meta(21, None, size)).unwrap();
    arena.abandon(dying);
    let order = || arena.table.list().iter_from_tail().collect::<Vec<_>>();
    arena.check().unwrap();
    let before = (order(), arena.gauges());
    arena.write(Wait::Try, |w| crate::pool::TableHooks::rebuild(&*arena.table, w)).unwrap();
    arena.check().unwrap();
    assert_eq!((order(), arena.gauges()), before);
    assert!(arena.publish(filling, 0, false));
    arena.unpin(filling);
    arena.unpin(dying);
    assert_eq!(arena.gauges().entries, 5);
    arena.check().unwrap();
}

#[test]
fn a_panic_under_the_lock_is_repaired_by_the_next_writer() {
    let arena = arena(8 * MIB, 64);
    store(&arena, 1, None, 4096);
    let torn = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        arena.write(Wait::Try, |writer| {
            arena.table.list().clear(writer);
            arena.table.index.clear(writer);
            arena.table.root().bytes.store(1, Ordering::Relaxed);
            panic!("a writer dies");
        })
    }));
    assert!(torn.is_err());
    store(&arena, 2, None, 4096);
    arena.check().unwrap();
    assert!(find(&arena, 1).is_some() && find(&arena, 2).is_some());
}

#[test]
fn reaping_frees_what_the_dead_member_had() {
    let arena = arena(8 * MIB, 64);
    let ready = store(&arena, 1, None, 4096);
    let dead = 77;
    let (table, entry) = (&arena.table, arena.table.entry(ready.entry));
    entry.set_pin(dead);
    entry.flags.store(claimed_by(dead), Ordering::SeqCst);
    let made = arena.write(Wait::Try, |w| {
        match table.make(w, &meta(2, None, 9000), Purpose::Load, dead) {
            Made::New(i, generation) => Slot { entry: i, generation },
            _ => panic!("no room"),
        }
    });
    let made = made.unwrap().unwrap();
    assert!(arena.pin(made), "we joined the load");
    arena.write(Wait::Try, |w| crate::pool::TableHooks::reap(&**table, w, dead)).unwrap();
    arena.check().unwrap();
    assert_eq!(arena.state(made), SlotState::Gone);
    assert_eq!(arena.gauges().entries, 2, "our pin keeps the memory");
    arena.unpin(made);
    assert_eq!(arena.gauges().entries, 1);
    assert_eq!(arena.dirty(1), [ready], "its write-back is open again");
    arena.set_clean(ready);
    assert_eq!(arena.clear(), 4096);
    arena.check().unwrap();
}
