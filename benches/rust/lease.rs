//! What a disk hit costs before its bytes are read: lookups of a long prompt's keys, and the open,
//! locked file of one.
#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark")]

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use lakecache_bench::disk::{key, open, store_objects};

fn leases(criterion: &mut Criterion) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    store_objects(&store, 0..4096);
    let keys: Vec<_> = (0..512).map(key).collect();
    let mut found = Vec::new();
    criterion.bench_function("l2_lookup_512_keys", |b| {
        b.iter(|| {
            found.clear();
            store.lookup(black_box(&keys), &mut found);
        });
    });
    assert!(found.iter().all(|&found| found));
    let mut n = 0;
    criterion.bench_function("l2_lease", |b| {
        b.iter(|| {
            n = (n + 1) % 4096;
            black_box(store.lease(&key(n)).unwrap().unwrap());
        });
    });
    criterion.bench_function("l2_lease_and_header", |b| {
        b.iter(|| {
            n = (n + 1) % 4096;
            let lease = store.lease(&key(n)).unwrap().unwrap();
            black_box(store.read_header(&lease).unwrap());
        });
    });
}

criterion_group!(benches, leases);
criterion_main!(benches);
