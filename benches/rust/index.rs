//! Lookup of a prompt's keys. Bar: 512 keys among 100 000 objects within 20 microseconds.
#![allow(missing_docs, reason = "criterion makes undocumented functions")]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use lakecache_bench::{arena, fill, key};
use lakecache_core::units::PAGE_BYTES;

/// Prompts asked for in turn, so that the answers don't all lie in the processor's caches.
const PROMPTS: u64 = 64;

fn lookup(c: &mut Criterion) {
    for objects in [1_000, 100_000, 1_000_000] {
        let mut group = c.benchmark_group(format!("lookup/{objects}"));
        let entries = u32::try_from(objects).expect("a small number");
        let Some(arena) = arena(entries, objects * PAGE_BYTES) else { continue };
        fill(&arena, objects);
        for keys in [1, 64, 512] {
            let prompts: Vec<Vec<_>> = (0..PROMPTS)
                .map(|p| (0..keys).map(|n| key((p * 7919 + n * 104_729) % objects)).collect())
                .collect();
            group.throughput(Throughput::Elements(keys));
            for (what, prompts) in
                [("hit", prompts), ("miss", vec![(0..keys).map(|n| key(objects + n)).collect()])]
            {
                let mut turn = 0;
                let mut out = Vec::with_capacity(512);
                group.bench_function(BenchmarkId::new(what, keys), |b| {
                    b.iter(|| {
                        turn = (turn + 1) % prompts.len();
                        out.clear();
                        arena.lookup(black_box(&prompts[turn]), &mut out);
                        out.len()
                    });
                });
                assert!(out.iter().all(|found| found.is_some() == (what == "hit")));
            }
        }
    }
}

criterion_group!(benches, lookup);
criterion_main!(benches);
