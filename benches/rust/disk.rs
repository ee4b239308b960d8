//! A disk store with small objects.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use lakecache_core::l2::{DiskOptions, DiskStore, ObjectInfo, Segment, Written};
use lakecache_core::pool::{Pool, PoolOptions};
use lakecache_core::{Namespace, ObjectKey};

const NAMESPACE: Namespace = Namespace([1; 32]);
static PAYLOAD: [u8; 64] = [7; 64];

/// The key of object `n`.
pub fn key(n: u32) -> ObjectKey {
    ObjectKey::derive(&NAMESPACE, 0, &n.to_le_bytes())
}

/// A store whose scan has not begun.
///
/// # Panics
/// Where it can't be opened.
pub fn open_unscanned(dir: &Path) -> Arc<DiskStore> {
    let pool = Pool::open(PoolOptions {
        cache_dir: Some(dir.join("cache")),
        l2_records: Some(1 << 17),
        ..PoolOptions::private(64 << 20)
    });
    let options = DiskOptions::default();
    DiskStore::open(pool.expect("a pool"), dir.join("cache"), options).expect("a store")
}

/// A store that is ready to store.
pub fn open(dir: &Path) -> Arc<DiskStore> {
    let store = open_unscanned(dir);
    store.start_scan();
    while !store.scan_done() {
        std::thread::sleep(Duration::from_millis(1));
    }
    store
}

/// Stores the objects with these numbers.
///
/// # Panics
/// Where one is not stored.
pub fn store_objects(store: &DiskStore, numbers: Range<u32>) {
    for n in numbers {
        let info = ObjectInfo {
            key: key(n),
            parent: None,
            kind: 0,
            first_token: 0,
            last_token: 256,
            ranks: 1,
            payload_bytes: PAYLOAD.len() as u64,
        };
        // SAFETY: a static lives for ever.
        let segment = unsafe { Segment::new(PAYLOAD.as_ptr(), PAYLOAD.len() as u64) };
        let written = store.write(&info, &NAMESPACE, 0, &[segment]).expect("a working disk");
        assert_eq!(written, Written::Stored);
    }
}
