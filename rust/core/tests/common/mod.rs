//! What the tests of whole caches share: objects that tell themselves apart, and reading as a worker
//! would.
#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use lakecache_core::cache::{Cache, CacheOptions, Lease, WritePolicy};
use lakecache_core::io::EngineChoice;
use lakecache_core::l1::{ObjectMeta, Slot, SlotState};
use lakecache_core::l2::Durability;
use lakecache_core::pool::Wait;
use lakecache_core::{Namespace, ObjectKey};

pub(crate) const NAMESPACE: Namespace = Namespace([9; 32]);
pub(crate) const LONG: Duration = Duration::from_secs(20);

/// Fails the process when `body` hangs.
pub(crate) fn watched(body: impl FnOnce() + Send + 'static) {
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

/// Folders and settings of one test: memory in a tmpfs, the disk tier on a real file system.
pub(crate) struct Place {
    pub(crate) options: CacheOptions,
    pub(crate) disk: tempfile::TempDir,
    _ram: tempfile::TempDir,
}

impl Place {
    pub(crate) fn new(engine: EngineChoice, cpu_bytes: u64) -> Self {
        let ram = tempfile::tempdir_in("/dev/shm").unwrap();
        let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let options = CacheOptions {
            cache_dir: Some(disk.path().join("cache")),
            ram_dir: ram.path().join("ram"),
            cpu_bytes,
            disk_capacity_bytes: None,
            shared: true,
            io_engine: engine,
            checksum: true,
            durability: Durability::None,
            write_policy: WritePolicy::WriteThrough,
            worker: false,
        };
        Self { options, disk, _ram: ram }
    }

    pub(crate) fn memory_only(cpu_bytes: u64) -> Self {
        let mut place = Self::new(EngineChoice::Auto, cpu_bytes);
        place.options.cache_dir = None;
        place
    }

    /// The file of the object of this index.
    pub(crate) fn file(&self, index: u32) -> PathBuf {
        let hex = key(index).hex();
        let is_its = |path: &PathBuf| path.to_string_lossy().contains(&hex);
        object_files(self.disk.path()).into_iter().find(is_its).expect("it is on disk")
    }
}

pub(crate) fn open(options: &CacheOptions) -> Cache {
    let cache = Cache::open(options).expect("the cache opens");
    assert!(cache.wait_scanned(LONG), "the scan ends");
    cache
}

pub(crate) fn key(index: u32) -> ObjectKey {
    ObjectKey::derive(&NAMESPACE, 0, &index.to_le_bytes())
}

/// Bytes that tell the object and the position.
pub(crate) fn payload(index: u32, bytes: usize) -> Vec<u8> {
    let mut state = u64::from(index) << 32 | 0x9e37_79b9;
    std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56).to_le_bytes()[0]
    })
    .take(bytes)
    .collect()
}

pub(crate) fn meta(cache: &Cache, index: u32, bytes: usize) -> ObjectMeta {
    ObjectMeta {
        key: key(index),
        namespace: cache.namespace(&NAMESPACE, "{}", true, Wait::Within(LONG)).unwrap().unwrap(),
        kind: 0,
        parent: index.checked_sub(1).map(key),
        first_token: index * 256,
        last_token: index * 256 + 255,
        ranks: 1,
        payload_bytes: bytes as u64,
    }
}

pub(crate) fn put(cache: &Cache, index: u32, bytes: usize) -> bool {
    put_as(cache, &meta(cache, index, bytes), &payload(index, bytes))
}

pub(crate) fn put_as(cache: &Cache, meta: &ObjectMeta, data: &[u8]) -> bool {
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

pub(crate) fn bytes_of(cache: &Cache, slot: Slot) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (address, count) in cache.arena().spans(slot).unwrap() {
        let count = usize::try_from(count).unwrap();
        // SAFETY: the object is readable and leased.
        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(address, count) });
    }
    bytes
}

pub(crate) fn settled(lease: &Lease) -> usize {
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
pub(crate) fn read_all(cache: &Cache, lease: &Lease, bytes: usize) -> Vec<usize> {
    let held = settled(lease);
    lease.start();
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

pub(crate) fn count(cache: &Cache, name: &str) -> u64 {
    let counters = cache.stats().counters.snapshot();
    counters.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("{name}")).1
}

pub(crate) fn object_files(dir: &Path) -> Vec<PathBuf> {
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

pub(crate) fn gauge(cache: &Cache, name: &str) -> u64 {
    cache.gauges().iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("{name}")).1
}

/// Waits until `name` is `value`.
pub(crate) fn wait_gauge(cache: &Cache, name: &str, value: u64) {
    let deadline = Instant::now() + LONG;
    while gauge(cache, name) != value {
        assert!(Instant::now() < deadline, "{name} is {}, not {value}", gauge(cache, name));
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(crate) fn keys(count: u32) -> Vec<ObjectKey> {
    (0..count).map(key).collect()
}
