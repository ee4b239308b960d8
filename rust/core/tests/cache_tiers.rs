//! The two tiers as one store: what is restored is what was stored, from either tier, over restarts,
//! through a memory tier smaller than the chain, and never from a damaged file.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use lakecache_core::cache::{Cache, CacheOptions, Lease, Tier, WritePolicy};
use lakecache_core::io::EngineChoice;
use lakecache_core::l1::{ObjectMeta, Slot, SlotState};
use lakecache_core::l2::Durability;
use lakecache_core::pool::Wait;
use lakecache_core::{Namespace, ObjectKey};

const NAMESPACE: Namespace = Namespace([9; 32]);
const LONG: Duration = Duration::from_secs(20);

/// Fails the process when `body` hangs.
fn watched(body: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        body();
        done.send(()).expect("the watchdog waits");
    });
    match ended.recv_timeout(Duration::from_mins(2)) {
        Err(mpsc::RecvTimeoutError::Timeout) => std::process::abort(),
        _ => thread.join().expect("the test body"),
    }
}

fn options(dir: &Path, cpu_bytes: u64, engine: EngineChoice) -> CacheOptions {
    CacheOptions {
        cache_dir: Some(dir.join("cache")),
        ram_dir: dir.join("ram"),
        cpu_bytes,
        disk_capacity_bytes: None,
        shared: true,
        io_engine: engine,
        checksum: true,
        durability: Durability::None,
        write_policy: WritePolicy::WriteThrough,
        worker: false,
    }
}

fn open(options: &CacheOptions) -> Cache {
    let cache = Cache::open(options).expect("the cache opens");
    assert!(cache.wait_scanned(LONG), "the scan ends");
    cache
}

fn key(index: u32) -> ObjectKey {
    ObjectKey::derive(&NAMESPACE, 0, &index.to_le_bytes())
}

/// Bytes that tell the object and the position.
fn payload(index: u32, bytes: usize) -> Vec<u8> {
    let mut state = u64::from(index) << 32 | 0x9e37_79b9;
    std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56).to_le_bytes()[0]
    })
    .take(bytes)
    .collect()
}

fn meta(cache: &Cache, index: u32, bytes: usize) -> ObjectMeta {
    ObjectMeta {
        key: key(index),
        namespace: cache.namespace(&NAMESPACE, "{}", true).unwrap().unwrap(),
        kind: 0,
        parent: index.checked_sub(1).map(key),
        first_token: index * 256,
        last_token: index * 256 + 255,
        ranks: 1,
        payload_bytes: bytes as u64,
    }
}

fn put(cache: &Cache, index: u32, bytes: usize) -> bool {
    put_as(cache, &meta(cache, index, bytes), &payload(index, bytes))
}

fn put_as(cache: &Cache, meta: &ObjectMeta, data: &[u8]) -> bool {
    let deadline = Instant::now() + LONG;
    // The first piece of the pool is reserved in the background; dirty objects leave room in time.
    let slot = loop {
        match cache.reserve(meta, Wait::Within(Duration::from_millis(100))).unwrap() {
            Some(slot) => break slot,
            None if cache.lookup(&[meta.key]).0 == 1 => return false,
            None if Instant::now() > deadline => panic!("no room for {meta:?}"),
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let mut done = 0;
    for (target, bytes) in cache.arena().spans(slot).unwrap() {
        let bytes = usize::try_from(bytes).unwrap();
        // SAFETY: the run is ours to fill until the commit.
        unsafe { std::ptr::copy_nonoverlapping(data[done..].as_ptr(), target, bytes) };
        done += bytes;
    }
    assert_eq!(done, data.len());
    cache.commit(slot).unwrap();
    true
}

fn bytes_of(cache: &Cache, slot: Slot) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (address, count) in cache.arena().spans(slot).unwrap() {
        let count = usize::try_from(count).unwrap();
        // SAFETY: the object is readable and leased.
        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(address, count) });
    }
    bytes
}

fn settled(lease: &Lease) -> usize {
    let deadline = Instant::now() + LONG;
    loop {
        match lease.poll() {
            Some(held) => return held,
            None => assert!(Instant::now() < deadline, "the opens end"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Reads every leased object as a worker would; the indices whose bytes are right.
fn read_all(cache: &Cache, lease: &Lease, bytes: usize) -> Vec<usize> {
    let held = settled(lease);
    lease.start(0);
    let deadline = Instant::now() + LONG;
    let (mut waiting, mut right) = (Vec::new(), Vec::new());
    while right.len() < lease.failed().unwrap_or(held) {
        assert!(Instant::now() < deadline, "{} of {held} arrived", right.len());
        waiting.extend(lease.slots());
        waiting.retain(|&(index, slot)| match cache.arena().state(slot) {
            SlotState::Filling => true,
            SlotState::Gone => false,
            SlotState::Ready => {
                let expected = payload(u32::try_from(index).unwrap(), bytes);
                assert!(bytes_of(cache, slot) == expected, "object {index} has other bytes");
                lease.release(index);
                right.push(index);
                false
            }
        });
        std::thread::sleep(Duration::from_micros(200));
    }
    right
}

fn count(cache: &Cache, name: &str) -> u64 {
    let counters = cache.stats().counters.snapshot();
    counters.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("{name}")).1
}

fn object_files(dir: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    let mut dirs = vec![dir.to_path_buf()];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|extension| extension == "kv") {
                found.push(path);
            }
        }
    }
    found
}

fn gauge(cache: &Cache, name: &str) -> u64 {
    cache.gauges().iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("{name}")).1
}

/// Waits until `name` is `value`.
fn wait_gauge(cache: &Cache, name: &str, value: u64) {
    let deadline = Instant::now() + LONG;
    while gauge(cache, name) != value {
        assert!(Instant::now() < deadline, "{name} is {}, not {value}", gauge(cache, name));
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn keys(count: u32) -> Vec<ObjectKey> {
    (0..count).map(key).collect()
}

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
