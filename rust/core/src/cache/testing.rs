//! What the unit tests of this module share: a small cache, and objects in it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::time::{Duration, Instant};

use super::{Cache, CacheOptions, WritePolicy};
use crate::io::EngineChoice;
use crate::l1::ObjectMeta;
use crate::l2::Durability;
use crate::pool::Wait;
use crate::{Namespace, ObjectKey};

pub(super) const LONG: Duration = Duration::from_secs(20);
pub(super) const NAMESPACE: Namespace = Namespace([7; 32]);

/// A cache of 64 MiB of memory, with files, below `dir`.
pub(super) fn open(dir: &Path) -> Cache {
    Cache::open(&CacheOptions {
        cache_dir: Some(dir.join("cache")),
        ram_dir: dir.join("ram"),
        cpu_bytes: 64 << 20,
        disk_capacity_bytes: None,
        shared: true,
        io_engine: EngineChoice::Auto,
        checksum: true,
        durability: Durability::None,
        write_policy: WritePolicy::WriteThrough,
        worker: false,
    })
    .unwrap()
}

/// Stores an object of 4096 bytes, in memory and in its file.
pub(super) fn put(cache: &Cache, key: ObjectKey) {
    let wait = Wait::Within(LONG);
    let meta = ObjectMeta {
        key,
        namespace: cache.namespace(&NAMESPACE, "{}", true, wait).unwrap().unwrap(),
        kind: 0,
        parent: None,
        first_token: 0,
        last_token: 63,
        ranks: 1,
        payload_bytes: 4096,
    };
    let deadline = Instant::now() + LONG;
    // The first piece of the pool is reserved in the background.
    let slot = loop {
        match cache.reserve(&meta, wait).unwrap() {
            Some(slot) => break slot,
            None => assert!(Instant::now() < deadline, "no room for {meta:?}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    cache.commit(slot).unwrap();
    assert!(cache.flush(LONG));
}
