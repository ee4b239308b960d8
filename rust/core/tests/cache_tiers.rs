//! The two tiers as one store: what is restored is what was stored, from either tier, over restarts,
//! through a memory tier smaller than the chain, and never from a damaged file.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::time::Duration;

use common::{
    LONG, count, gauge, key, keys, meta, object_files, open, options, payload, put, put_as,
    read_all, settled, wait_gauge, watched,
};
use lakecache_core::cache::{Tier, WritePolicy};
use lakecache_core::io::EngineChoice;
use lakecache_core::l1::ObjectMeta;
use lakecache_core::pool::Wait;
use lakecache_core::{Namespace, ObjectKey};

fn memory_then_disk_then_restart(engine: EngineChoice) {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let disk = tempfile::tempdir().unwrap();
    let mut options = options(dir.path(), 128 << 20, engine);
    options.cache_dir = Some(disk.path().join("cache"));
    let cache = open(&options);
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

    let cache = open(&options);
    assert_eq!(cache.lookup(&keys(9)), (8, 8), "the pool that survived is adopted");
    cache.close(LONG);
    drop(cache);

    std::fs::remove_dir_all(&options.ram_dir).unwrap();
    let cache = open(&options);
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
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let disk = tempfile::tempdir().unwrap();
        let mut options = options(dir.path(), 64 << 20, EngineChoice::Auto);
        options.cache_dir = Some(disk.path().join("cache"));
        let cache = open(&options);
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
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let disk = tempfile::tempdir().unwrap();
        let mut options = options(dir.path(), 64 << 20, EngineChoice::Auto);
        options.cache_dir = Some(disk.path().join("cache"));
        let cache = open(&options);
        for index in 0..3 {
            put(&cache, index, 100_000);
        }
        assert!(cache.flush(LONG));
        cache.clear_memory();
        let damaged = object_files(disk.path())
            .into_iter()
            .find(|path| path.to_string_lossy().contains(&key(1).hex()))
            .unwrap();
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

#[test]
fn the_bytes_in_memory_are_checked_against_their_checksum() {
    watched(|| {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut options = options(dir.path(), 64 << 20, EngineChoice::Auto);
        options.cache_dir = None;
        let cache = open(&options);
        put(&cache, 0, 100_001);
        let unfilled = cache.reserve(&meta(&cache, 1, 5000), Wait::Within(LONG)).unwrap();
        assert!(cache.flush(LONG));
        let mut found = Vec::new();
        cache.arena().lookup(&keys(1), &mut found);
        let slot = found[0].expect("it is in memory").0;
        assert!(cache.checksum_ok(slot));
        assert!(!cache.checksum_ok(unfilled.expect("room")), "not readable yet");
        let (address, bytes) = *cache.arena().spans(slot).unwrap().last().unwrap();
        // SAFETY: the last byte of an object that nobody else knows in this private directory.
        unsafe { *address.add(usize::try_from(bytes).unwrap() - 1) ^= 1 };
        assert!(!cache.checksum_ok(slot));
        assert!(cache.clear_memory() > 0);
        assert!(!cache.checksum_ok(slot), "gone");
        let reserved = cache.pieces().into_iter().filter(|piece| piece.2).map(|piece| piece.1);
        assert_eq!(reserved.sum::<u64>(), gauge(&cache, "memory_bytes_reserved"));
    });
}

#[test]
fn what_is_in_memory_only_is_written_before_the_pool_gets_another_size() {
    watched(|| {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let disk = tempfile::tempdir().unwrap();
        let mut options = options(dir.path(), 64 << 20, EngineChoice::Auto);
        options.cache_dir = Some(disk.path().join("cache"));
        options.write_policy = WritePolicy::OnEvict;
        let cache = open(&options);
        let (objects, bytes) = (100, 100_001);
        for index in 0..objects {
            put(&cache, index, bytes);
        }
        wait_gauge(&cache, "memory_dirty", objects.into());
        cache.close(Duration::ZERO);
        drop(cache);
        let written = object_files(disk.path()).len();
        assert!(written < objects as usize, "the shutdown had no time to write {written} objects");

        options.cpu_bytes = 96 << 20;
        let cache = open(&options);
        assert_eq!(cache.lookup(&keys(objects + 1)), (objects as usize, 0), "the memory is new");
        assert_eq!(gauge(&cache, "pool_file_bytes"), 96 << 20);
        assert_eq!(object_files(disk.path()).len(), objects as usize);
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
            let dir = tempfile::tempdir_in("/dev/shm").unwrap();
            let disk = tempfile::tempdir().unwrap();
            let mut options = options(dir.path(), 64 << 20, EngineChoice::Auto);
            options.cache_dir = Some(disk.path().join("cache"));
            options.write_policy = policy;
            let passing = Namespace([7; 32]);
            let passing_key = ObjectKey::derive(&passing, 0, b"object");
            let cache = open(&options);
            let number = cache.namespace(&passing, "{}", false).unwrap().unwrap();
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
            assert_eq!(cache.namespace(&passing, "{}", true).unwrap(), Some(number));
            assert!(cache.flush(LONG));
            cache.close(LONG);
            drop(cache);
            let files = object_files(disk.path());
            assert!(files.len() == 1 && files[0].to_string_lossy().contains(&key(0).hex()));

            // Adopted, then rescued from a pool that is made anew: still nothing.
            let cache = open(&options);
            assert_eq!(cache.lookup(&[passing_key]), (1, 1));
            cache.close(LONG);
            drop(cache);
            options.cpu_bytes = 96 << 20;
            let cache = open(&options);
            assert_eq!(cache.lookup(&[passing_key]), (0, 0));
            assert_eq!(object_files(disk.path()), files);
            assert!(!disk.path().join("cache").join(passing.hex()).exists());
        }
    });
}

#[test]
fn reserved_memory_is_registered_with_the_ring_and_read_into() {
    watched(|| {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let disk = tempfile::tempdir().unwrap();
        let mut options = options(dir.path(), 64 << 20, EngineChoice::Auto);
        options.cache_dir = Some(disk.path().join("cache"));
        let cache = open(&options);
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
        assert_eq!(read_all(&cache, &lease, 300_000), [0, 1]);
        assert!(
            gauge(&cache, "io_bytes_registered") <= gauge(&cache, "memory_bytes_reserved"),
            "nothing is pinned that has no memory"
        );
    });
}

#[test]
fn a_pool_that_can_never_fit_is_a_lack_of_space() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut options = options(dir.path(), 1 << 50, EngineChoice::Auto);
    options.cache_dir = None;
    let error = lakecache_core::cache::Cache::open(&options).err().expect("a refusal");
    assert_eq!(error.kind(), lakecache_core::ErrorKind::NoSpace);
    assert!(error.to_string().contains("cpu_bytes"), "{error}");
}
