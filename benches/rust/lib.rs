//! What several benchmarks share.
//!
//! `LAKECACHE_BENCH_QUICK=1` cuts the rounds of those that have their own clock;
//! `LAKECACHE_BENCH_RECORD` is a directory into which they write what they print, as JSON.

use std::time::Duration;

use lakecache_core::l1::{Arena, ObjectMeta, Purpose, Reserve, Slot};
use lakecache_core::pool::{Pool, PoolOptions, Wait};
use lakecache_core::units::PAGE_BYTES;
use lakecache_core::{Namespace, ObjectKey};

/// A private arena with `entries` entries and room for `data_bytes`, all of it reserved. `None`
/// where this machine has not enough memory.
pub fn arena(entries: u32, data_bytes: u64) -> Option<Arena> {
    let table_bytes = u64::from(entries) * (256 + 32);
    let mut options = PoolOptions::private(data_bytes + table_bytes + (8 << 20));
    options.l1_entries = Some(entries);
    let arena = Arena::new(Pool::open(options).ok()?);
    for _ in 0..60_000 {
        let gauges = arena.gauges();
        if gauges.bytes_reserved == gauges.capacity {
            return Some(arena);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    None
}

/// Whether it is enough that everything runs.
pub fn quick() -> bool {
    std::env::var("LAKECACHE_BENCH_QUICK").is_ok_and(|value| !matches!(value.as_str(), "" | "0"))
        || std::env::args().any(|argument| argument == "--test")
}

/// Writes a bench's result, which is JSON, where the caller wants one.
///
/// # Panics
/// Where the file can't be written.
pub fn record(bench: &str, json: &str) {
    if let Some(directory) = std::env::var_os("LAKECACHE_BENCH_RECORD") {
        let path = std::path::Path::new(&directory).join(format!("{bench}.json"));
        std::fs::write(&path, json).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
}

/// The `n`-th key.
pub fn key(n: u64) -> ObjectKey {
    ObjectKey::derive(&Namespace([7; 32]), 0, &n.to_le_bytes())
}

/// What the `n`-th object of chains of 512 is.
pub fn meta(n: u64, payload_bytes: u64) -> ObjectMeta {
    let place = u32::try_from(n % 512).unwrap_or_default();
    ObjectMeta {
        key: key(n),
        namespace: 0,
        kind: 0,
        parent: (place > 0).then(|| key(n - 1)),
        first_token: place * 256,
        last_token: (place + 1) * 256,
        ranks: 1,
        payload_bytes,
    }
}

/// Makes and publishes the object, which is not there, evicting others; `None`: no room.
pub fn store(arena: &Arena, meta: &ObjectMeta) -> Option<Slot> {
    match arena.reserve(meta, Purpose::Store, Wait::Within(Duration::from_secs(1))) {
        Ok(Reserve::Slot(slot)) => {
            arena.publish(slot, 1, false);
            arena.unpin(slot);
            Some(slot)
        }
        _ => None,
    }
}

/// Stores objects `0..count` of a page each.
pub fn fill(arena: &Arena, count: u64) {
    for n in 0..count {
        assert!(store(arena, &meta(n, PAGE_BYTES)).is_some(), "no room for object {n}");
    }
}

pub mod disk;
