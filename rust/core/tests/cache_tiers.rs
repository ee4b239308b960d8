//! The two tiers as one store: what is restored is what was stored, from either tier, over restarts,
//! through a memory tier smaller than the chain, and never from a damaged file.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{
    LONG, Place, count, gauge, key, keys, meta, object_files, open, payload, put, put_as, read_all,
    settled, wait_gauge, watched,
};
use lakecache_core::cache::{Cache, Copier, Fragments, Outcome, Tier, WritePolicy};
use lakecache_core::io::EngineChoice;
use lakecache_core::l1::{ObjectMeta, Purpose, Reserve, Slot, SlotState};
use lakecache_core::pool::Wait;
use lakecache_core::{Namespace, ObjectKey};

fn memory_then_disk_then_restart(engine: EngineChoice) {
    let place = Place::new(engine, 128 << 20);
    let cache = open(&place.options);
    let bytes = 300_000;
    for index in 0..8 {
        assert!(put(&cache, index, bytes));
    }
    assert!(cache.flush(LONG));
    assert_eq!(cache.lookup(&keys(9)), (8, 8));
    let lease = cache.lease(&keys(9)).unwrap();
    assert_eq!(read_all(&cache, &lease, bytes).len(), 8);
    assert_eq!(count(&cache, "disk_payload_reads"), 0);
    drop(lease);

    assert!(cache.clear_memory() > 0);
    assert_eq!(cache.lookup(&keys(9)), (8, 0));
    let lease = cache.lease(&keys(9)).unwrap();
    assert_eq!(read_all(&cache, &lease, bytes).len(), 8);
    assert_eq!(lease.tiers(), vec![Tier::Disk; 8]);
    drop(lease);
    assert_eq!((count(&cache, "disk_payload_reads"), count(&cache, "promotions")), (8, 8));
    cache.arena().check().unwrap();
    cache.close(LONG);
    drop(cache);

    let cache = open(&place.options);
    assert_eq!(cache.lookup(&keys(9)), (8, 8), "the pool that survived is adopted");
    cache.close(LONG);
    drop(cache);

    std::fs::remove_dir_all(&place.options.ram_dir).unwrap();
    let cache = open(&place.options);
    assert_eq!(cache.lookup(&keys(9)), (8, 0), "the disk tier is found again without its pool");
    let lease = cache.lease(&keys(9)).unwrap();
    assert_eq!(read_all(&cache, &lease, bytes).len(), 8);
}

#[test]
fn io_uring_memory_then_disk_then_restart() {
    watched(|| memory_then_disk_then_restart(EngineChoice::Auto));
}

#[test]
fn pread_memory_then_disk_then_restart() {
    watched(|| memory_then_disk_then_restart(EngineChoice::Pread));
}

#[test]
fn a_chain_larger_than_the_memory_tier_streams_through_it() {
    watched(|| {
        let place = Place::new(EngineChoice::Auto, 64 << 20);
        let cache = open(&place.options);
        let bytes = 4 << 20;
        for index in 0..24 {
            put(&cache, index, bytes);
        }
        assert!(cache.flush(LONG));
        let lease = cache.lease(&keys(24)).unwrap();
        assert_eq!(read_all(&cache, &lease, bytes).len(), 24);
        cache.arena().check().unwrap();
    });
}

#[test]
fn a_flipped_bit_on_disk_is_a_miss_and_counted() {
    watched(|| {
        let place = Place::new(EngineChoice::Auto, 64 << 20);
        let cache = open(&place.options);
        for index in 0..3 {
            put(&cache, index, 100_000);
        }
        assert!(cache.flush(LONG));
        cache.clear_memory();
        let damaged = place.file(1);
        let mut bytes = std::fs::read(&damaged).unwrap();
        bytes[4096 + 50_000] ^= 0x40;
        std::fs::write(&damaged, bytes).unwrap();
        let lease = cache.lease(&keys(3)).unwrap();
        let right = read_all(&cache, &lease, 100_000);
        assert!(!right.contains(&1) && lease.failed() == Some(1), "{right:?}");
        drop(lease);
        assert_eq!(count(&cache, "damaged"), 1);
        assert_eq!(cache.lookup(&keys(3)).0, 1, "the damaged object is not offered again");
        assert!(put(&cache, 1, 100_000), "and can be stored again");
        assert!(cache.flush(LONG));
        cache.clear_memory();
        let lease = cache.lease(&keys(3)).unwrap();
        assert_eq!(read_all(&cache, &lease, 100_000).len(), 3);
    });
}

/// The slot of the object of index 0, which is in memory.
fn first_slot(cache: &Cache) -> Slot {
    let mut found = Vec::new();
    cache.arena().lookup(&keys(1), &mut found);
    found[0].expect("it is in memory").0
}

fn change_last_byte(cache: &Cache, slot: Slot) {
    let (address, bytes) = *cache.arena().spans(slot).unwrap().last().unwrap();
    // SAFETY: the last byte of an object that nobody else knows in this private directory.
    unsafe { *address.add(usize::try_from(bytes).unwrap() - 1) ^= 1 };
}

#[test]
fn the_bytes_in_memory_are_checked_against_their_checksum() {
    watched(|| {
        let place = Place::memory_only(64 << 20);
        let cache = open(&place.options);
        put(&cache, 0, 100_001);
        let unfilled = cache.reserve(&meta(&cache, 1, 5000), Wait::Within(LONG)).unwrap();
        assert!(cache.flush(LONG));
        let slot = first_slot(&cache);
        assert!(cache.checksum_ok(slot));
        assert!(!cache.checksum_ok(unfilled.expect("room")), "not readable yet");
        assert_eq!(gauge(&cache, "memory_objects_damaged"), 0);
        change_last_byte(&cache, slot);
        assert!(!cache.checksum_ok(slot));
        assert_eq!((cache.lookup(&keys(1)), cache.arena().state(slot)), ((0, 0), SlotState::Gone));
        assert!(!cache.checksum_ok(slot), "gone");
        assert_eq!(gauge(&cache, "memory_objects_damaged"), 1);
        // The memory of the last pieces is still being reserved.
        let pieces = cache.pieces();
        let all = pieces.iter().map(|piece| piece.1).sum();
        wait_gauge(&cache, "memory_bytes_reserved", all);
        assert!(pieces.len() > 1 && cache.pieces().iter().all(|piece| piece.2));
    });
}

#[test]
fn an_object_refused_in_memory_comes_from_its_file_or_is_stored_anew() {
    for file_damaged in [false, true] {
        watched(move || {
            let place = Place::new(EngineChoice::Auto, 64 << 20);
            let cache = open(&place.options);
            put(&cache, 0, 100_001);
            assert!(cache.flush(LONG));
            if file_damaged {
                let mut bytes = std::fs::read(place.file(0)).unwrap();
                bytes[4096 + 50_000] ^= 0x40;
                std::fs::write(place.file(0), bytes).unwrap();
            }
            let lease = cache.lease(&keys(1)).unwrap();
            let slot = first_slot(&cache);
            change_last_byte(&cache, slot);
            let copier = Copier::new(Arc::clone(cache.arena()), 1);
            let mut page = vec![0; 100_001];
            let fragments = Fragments {
                object_offset: 0,
                addresses: vec![page.as_mut_ptr().expose_provenance() as u64],
                fragment_bytes: 100_001,
            };
            // SAFETY: the page outlives the copier, which is closed below.
            unsafe { copier.load(1, slot, fragments, LONG, true) };
            let deadline = Instant::now() + LONG;
            let outcome = loop {
                assert!(Instant::now() < deadline, "the copy ends");
                if let Some(&(_, outcome)) = copier.poll().first() {
                    break outcome;
                }
                std::thread::sleep(Duration::from_millis(1));
            };
            copier.close();
            assert_eq!((outcome, cache.lookup(&keys(1))), (Outcome::Mismatch, (1, 0)));
            assert!(cache.arena().spans(slot).is_some(), "its memory stays as long as it is held");
            drop(lease);
            assert_eq!(cache.arena().spans(slot), None);

            let lease = cache.lease(&keys(1)).unwrap();
            let right = read_all(&cache, &lease, 100_001);
            assert_eq!(right.len(), usize::from(!file_damaged));
            drop(lease);
            assert_eq!(count(&cache, "damaged"), u64::from(file_damaged));
            assert_eq!(put(&cache, 0, 100_001), file_damaged);
            assert!(cache.flush(LONG));
            assert_eq!(cache.lookup(&keys(1)), (1, 1));
            assert!(cache.checksum_ok(first_slot(&cache)));
            assert_eq!(object_files(place.disk.path()).len(), 1);
            cache.arena().check().unwrap();
        });
    }
}

#[test]
fn a_lease_on_what_another_still_reads_counts_as_disk() {
    watched(|| {
        let place = Place::new(EngineChoice::Auto, 64 << 20);
        let cache = open(&place.options);
        for index in 0..2 {
            put(&cache, index, 5000);
        }
        assert!(cache.flush(LONG));
        assert!(cache.clear_memory() > 0);
        // As another process does that begins to read.
        let reserved =
            cache.arena().reserve(&meta(&cache, 0, 5000), Purpose::Load, Wait::Within(LONG));
        let Ok(Reserve::Slot(slot)) = reserved else { panic!("{reserved:?}") };
        let lease = cache.lease(&keys(2)).unwrap();
        assert_eq!(lease.tiers(), [Tier::Disk; 2], "its bytes are not there yet");
        assert!(cache.arena().publish(slot, 0, false));
        assert_eq!(cache.lease(&keys(2)).unwrap().tiers(), [Tier::Memory, Tier::Disk]);
        cache.arena().unpin(slot);
    });
}

#[test]
fn a_lease_keeps_its_file_until_a_store_of_the_same_object_has_ended() {
    watched(|| {
        let place = Place::new(EngineChoice::Auto, 64 << 20);
        let cache = open(&place.options);
        assert!(put(&cache, 0, 5000));
        assert!(cache.flush(LONG));
        // It ends well; it is given up; whoever fills it was stopped.
        for (published, abandoned) in [(true, false), (false, true), (false, false)] {
            assert!(cache.clear_memory() > 0);
            // As an engine does that computes the object although it is on disk.
            let reserved =
                cache.arena().reserve(&meta(&cache, 0, 5000), Purpose::Store, Wait::Within(LONG));
            let Ok(Reserve::Slot(store)) = reserved else { panic!("{reserved:?}") };
            let lease = cache.lease(&keys(1)).unwrap();
            while lease.poll().is_none() {
                std::thread::yield_now();
            }
            let reads = count(&cache, "disk_payload_reads");
            lease.start();
            assert!(
                !lease.slots().iter().any(|&(_, slot)| slot == store),
                "it may yet be given up"
            );
            if published {
                let (address, _) = cache.arena().spans(store).unwrap()[0];
                // SAFETY: the slot is ours to fill, and its 5000 bytes lie in one run.
                unsafe { address.copy_from(payload(0, 5000).as_ptr(), 5000) };
                assert!(cache.arena().publish(store, 0, false));
            }
            if abandoned {
                cache.abandon(store);
            }
            assert_eq!(read_all(&cache, &lease, 5000), [0]);
            assert_eq!(count(&cache, "disk_payload_reads") - reads, u64::from(!published));
            drop(lease);
            cache.arena().unpin(store);
            cache.arena().check().unwrap();
        }
    });
}

#[test]
fn what_is_in_memory_only_is_written_before_the_pool_gets_another_size() {
    watched(|| {
        let mut place = Place::new(EngineChoice::Auto, 64 << 20);
        place.options.write_policy = WritePolicy::OnEvict;
        let cache = open(&place.options);
        let (objects, bytes) = (100, 100_001);
        for index in 0..objects {
            put(&cache, index, bytes);
        }
        wait_gauge(&cache, "memory_dirty", objects.into());
        cache.close(Duration::ZERO);
        drop(cache);
        let written = object_files(place.disk.path()).len();
        assert!(written < objects as usize, "the shutdown had no time to write {written} objects");

        place.options.cpu_bytes = 96 << 20;
        let cache = open(&place.options);
        assert_eq!(cache.lookup(&keys(objects + 1)), (objects as usize, 0), "the memory is new");
        assert_eq!(gauge(&cache, "pool_file_bytes"), 96 << 20);
        assert_eq!(object_files(place.disk.path()).len(), objects as usize);
        let lease = cache.lease(&keys(objects)).unwrap();
        assert_eq!(read_all(&cache, &lease, bytes).len(), objects as usize);
        cache.arena().check().unwrap();
    });
}

#[test]
fn a_namespace_that_is_not_persistent_never_reaches_the_disk() {
    use WritePolicy::{OnEvict, SecondUse, WriteThrough};
    watched(|| {
        for policy in [WriteThrough, OnEvict, SecondUse] {
            let mut place = Place::new(EngineChoice::Auto, 64 << 20);
            place.options.write_policy = policy;
            let passing = Namespace([7; 32]);
            let passing_key = ObjectKey::derive(&passing, 0, b"object");
            let cache = open(&place.options);
            let number =
                cache.namespace(&passing, "{}", false, Wait::Within(LONG)).unwrap().unwrap();
            let meta = ObjectMeta {
                key: passing_key,
                namespace: number,
                parent: None,
                ..meta(&cache, 1, 50_000)
            };
            assert!(put_as(&cache, &meta, &payload(99, 50_000)));
            assert!(put(&cache, 0, 50_000));
            wait_gauge(&cache, "commits_pending", 0);
            // A second use, and a second naming by somebody who does not know.
            for key in [passing_key, key(0)] {
                assert_eq!(settled(&cache.lease(&[key]).unwrap()), 1);
            }
            assert_eq!(
                cache.namespace(&passing, "{}", true, Wait::Within(LONG)).unwrap(),
                Some(number)
            );
            assert!(cache.flush(LONG));
            cache.close(LONG);
            drop(cache);
            let files = object_files(place.disk.path());
            assert!(files.len() == 1 && files[0].to_string_lossy().contains(&key(0).hex()));

            // Adopted, then rescued from a pool that is made anew: still nothing.
            let cache = open(&place.options);
            assert_eq!(cache.lookup(&[passing_key]), (1, 1));
            cache.close(LONG);
            drop(cache);
            place.options.cpu_bytes = 96 << 20;
            let cache = open(&place.options);
            assert_eq!(cache.lookup(&[passing_key]), (0, 0));
            assert_eq!(object_files(place.disk.path()), files);
            assert!(!place.disk.path().join("cache").join(passing.hex()).exists());
        }
    });
}

#[test]
fn reserved_memory_is_registered_with_the_ring_and_read_into() {
    watched(|| {
        let place = Place::new(EngineChoice::Auto, 64 << 20);
        let cache = open(&place.options);
        if cache.engine().0 != "io_uring" {
            return;
        }
        put(&cache, 0, 300_000);
        put(&cache, 1, 300_000);
        assert!(cache.flush(LONG));
        // All of it where this process may lock so much memory; else as many pieces as it may.
        let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
        if limit.is_none_or(|limit| limit > 256 << 20) {
            wait_gauge(&cache, "memory_bytes_reserved", gauge(&cache, "memory_capacity_bytes"));
            wait_gauge(&cache, "io_bytes_registered", gauge(&cache, "memory_capacity_bytes"));
        }
        cache.clear_memory();
        let lease = cache.lease(&keys(2)).unwrap();
        let mut arrived = read_all(&cache, &lease, 300_000);
        arrived.sort_unstable();
        assert_eq!(arrived, [0, 1]);
        assert!(
            gauge(&cache, "io_bytes_registered") <= gauge(&cache, "memory_bytes_reserved"),
            "nothing is pinned that has no memory"
        );
    });
}

#[test]
fn a_pool_that_can_never_fit_is_a_lack_of_space() {
    let place = Place::memory_only(1 << 50);
    let error = Cache::open(&place.options).err().expect("a refusal");
    assert_eq!(error.kind(), lakecache_core::ErrorKind::NoSpace);
    assert!(error.to_string().contains("cpu_bytes"), "{error}");
}

/// Stores objects until all that is not pinned was evicted.
fn replace_all(cache: &Cache, first: u32, bytes: usize) {
    let capacity = gauge(cache, "memory_capacity_bytes") / bytes as u64;
    for index in 0..u32::try_from(capacity).unwrap() * 2 {
        put(cache, first + index, bytes);
    }
}

fn bytes_of(cache: &Cache, slot: Slot) -> Vec<u8> {
    let spans = cache.arena().spans(slot).unwrap();
    let run = |(address, bytes): (*mut u8, u64)| {
        // SAFETY: the test has the object pinned; this is to see whether its bytes have changed.
        unsafe { std::slice::from_raw_parts(address, usize::try_from(bytes).unwrap()) }.to_vec()
    };
    spans.into_iter().flat_map(run).collect()
}

fn slot_of(cache: &Cache, key: ObjectKey) -> Slot {
    let mut found = Vec::new();
    cache.arena().lookup(&[key], &mut found);
    found[0].expect("it is in memory").0
}

#[test]
fn a_view_keeps_its_bytes_after_its_cache_was_closed() {
    watched(|| {
        let place = Place::new(EngineChoice::Auto, 32 << 20);
        let (viewed, other) = (open(&place.options), open(&place.options));
        put(&viewed, 0, 1 << 20);
        assert!(viewed.flush(LONG));
        let slot = slot_of(&viewed, key(0));
        assert!(viewed.pin_view(slot));
        viewed.close(LONG);
        assert!(!viewed.pin_view(slot), "no new ones");
        replace_all(&other, 1, 1 << 20);
        assert_eq!(bytes_of(&viewed, slot), payload(0, 1 << 20));
        assert_eq!(gauge(&other, "pool_members"), 2);
        viewed.unpin_view(slot);
        assert_eq!(gauge(&other, "pool_members"), 1, "the last view was all that kept it");
        replace_all(&other, 1000, 1 << 20);
        assert_eq!(viewed.arena().state(slot), SlotState::Gone);
        other.arena().check().unwrap();
    });
}

#[test]
fn what_a_forked_child_gives_back_is_not_its_parents() {
    watched(|| {
        let place = Place::new(EngineChoice::Auto, 32 << 20);
        let cache = open(&place.options);
        put(&cache, 0, 1 << 20);
        assert!(cache.flush(LONG));
        let slot = slot_of(&cache, key(0));
        let lease = cache.lease(&keys(1)).unwrap();
        assert_eq!(settled(&lease), 1);
        assert!(cache.pin_view(slot));
        // SAFETY: the child drops what it has got a copy of, and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                lease.close();
                cache.unpin_view(slot);
                let forked = cache.lease(&keys(1)).err().map(|error| error.kind());
                let refused = forked == Some(lakecache_core::ErrorKind::Forked);
                let refused = refused && !cache.pin_view(slot);
                cache.close(LONG);
                drop((lease, cache));
                refused
            }));
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(i32::from(!matches!(ended, Ok(true)))) };
        }
        let mut status = 0;
        // SAFETY: waits for the child just made.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        replace_all(&cache, 1, 1 << 20);
        assert_eq!(bytes_of(&cache, slot), payload(0, 1 << 20));
        cache.unpin_view(slot);
        drop(lease);
        replace_all(&cache, 1000, 1 << 20);
        assert_eq!(cache.arena().state(slot), SlotState::Gone);
        cache.arena().check().unwrap();
    });
}

#[test]
fn a_smaller_limit_of_one_that_joins_holds_before_it_stores_anything() {
    watched(|| {
        let mut place = Place::new(EngineChoice::Auto, 32 << 20);
        let unlimited = open(&place.options);
        for index in 0..8 {
            put(&unlimited, index, 300_000);
        }
        assert!(unlimited.flush(LONG));
        place.options.disk_capacity_bytes = Some(1 << 20);
        let limited = open(&place.options);
        wait_gauge(&limited, "disk_objects", 3);
        assert_eq!(object_files(place.disk.path()).len(), 3);
        assert!(gauge(&limited, "disk_bytes_used") <= 1 << 20);
    });
}

#[test]
fn nothing_is_written_to_a_directory_that_was_replaced() {
    watched(|| {
        let place = Place::new(EngineChoice::Auto, 32 << 20);
        let first = open(&place.options);
        put(&first, 0, 300_000);
        assert!(first.flush(LONG));
        std::fs::remove_dir_all(place.options.cache_dir.as_ref().unwrap()).unwrap();
        let second = open(&place.options);
        put(&first, 1, 300_000);
        assert!(first.flush(LONG));
        assert_eq!(count(&first, "write_errors"), 1);
        put(&second, 2, 300_000);
        assert!(second.flush(LONG));
        first.close(LONG);
        let files = object_files(place.disk.path());
        assert_eq!(files, [place.file(2)]);
        assert_eq!(first.lookup(&[key(1)]), (1, 1), "memory goes on");
    });
}

#[test]
fn nothing_is_written_without_the_lock_that_others_would_see() {
    watched(|| {
        let place = Place::new(EngineChoice::Auto, 32 << 20);
        let cache = open(&place.options);
        std::fs::remove_file(place.options.cache_dir.as_ref().unwrap().join("lock")).unwrap();
        let other = open(&place.options);
        assert_ne!(cache.pool_id(), other.pool_id());
        put(&cache, 0, 300_000);
        put(&other, 1, 300_000);
        assert!(cache.flush(LONG) && other.flush(LONG));
        assert_eq!((count(&cache, "write_errors"), count(&other, "writes")), (1, 1));
    });
}

#[test]
fn a_manifest_is_written_by_the_time_that_a_flush_is_over() {
    watched(|| {
        let place = Place::new(EngineChoice::Auto, 32 << 20);
        let cache = open(&place.options);
        let dir = place.options.cache_dir.clone().unwrap();
        for number in 0..8 {
            let namespace = Namespace([number; 32]);
            cache
                .namespace(&namespace, "{\"model\": \"tiny\"}", true, Wait::Within(LONG))
                .unwrap()
                .unwrap();
            assert!(cache.flush(LONG));
            let manifest = dir.join(namespace.hex()).join("manifest.json");
            assert_eq!(std::fs::read(manifest).unwrap(), b"{\"model\": \"tiny\"}");
        }
    });
}
