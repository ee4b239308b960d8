//! Making, publishing and unpinning an object in a full arena, where each evicts others; pinning.
#![allow(missing_docs, reason = "criterion makes undocumented functions")]

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use lakecache_bench::{arena, fill, key, meta, store};
use lakecache_core::units::PAGE_BYTES;

fn publish(c: &mut Criterion) {
    let mut group = c.benchmark_group("publish");
    for (objects, payload) in [(100_000, PAGE_BYTES), (100, 2 << 20)] {
        let data = objects * payload;
        let Some(arena) = arena(u32::try_from(objects).expect("few"), data) else { continue };
        let mut n = 0;
        while arena.gauges().evictions == 0 {
            assert!(store(&arena, &meta(n, payload)).is_some());
            n += 1;
        }
        group.bench_function(BenchmarkId::new("reserve+publish+unpin", payload), |b| {
            b.iter(|| {
                n += 1;
                store(&arena, &meta(n, payload))
            });
        });
    }
}

fn pin(c: &mut Criterion) {
    let Some(arena) = arena(10_000, 10_000 * PAGE_BYTES) else { return };
    fill(&arena, 10_000);
    let mut found = Vec::new();
    arena.lookup(&(0..10_000).map(key).collect::<Vec<_>>(), &mut found);
    let slots: Vec<_> = found.into_iter().flatten().map(|(slot, _)| slot).collect();
    let mut at = 0;
    c.bench_function("pin+unpin", |b| {
        b.iter(|| {
            at = (at + 1) % slots.len();
            assert!(arena.pin(slots[at]));
            arena.unpin(slots[at]);
        });
    });
    let chain: Vec<_> = (0..512).map(key).collect();
    c.bench_function("touch/512", |b| b.iter(|| arena.touch(&chain)));
}

criterion_group!(benches, publish, pin);
criterion_main!(benches);
