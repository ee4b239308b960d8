//! Lookup of a prompt's keys. Bar: 512 keys among 100 000 objects within 20 microseconds.
//!
//! `hit` asks for 64 prompts in turn; `hit, caches emptied` reads more memory than the processor's
//! caches hold before each lookup, so that every entry comes from memory.
#![allow(missing_docs, reason = "criterion makes undocumented functions")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{
    BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main,
};
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

/// Memory to read so that nothing else is left in the caches: half as much again as the largest.
fn cache_filler() -> Vec<u64> {
    let size = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index3/size");
    let kib = size.ok().and_then(|size| size.trim().trim_end_matches('K').parse().ok());
    let bytes = kib.unwrap_or(32_usize << 10).saturating_mul(1024 + 512).min(1 << 30);
    (0..bytes as u64 / 8).collect()
}

fn lookup_uncached(c: &mut Criterion) {
    let filler = cache_filler();
    for objects in [100_000, 1_000_000] {
        let entries = u32::try_from(objects).expect("a small number");
        let Some(arena) = arena(entries, objects * PAGE_BYTES) else { continue };
        fill(&arena, objects);
        let mut group = c.benchmark_group(format!("lookup/{objects}"));
        // Emptying the caches takes a thousand times longer than what is measured.
        group.sampling_mode(SamplingMode::Flat).sample_size(30);
        group.warm_up_time(Duration::from_millis(500));
        let keys: Vec<Vec<_>> = (0..PROMPTS)
            .map(|p| (0..512).map(|n| key((p * 7919 + n * 104_729) % objects)).collect())
            .collect();
        let (mut turn, mut out) = (0, Vec::with_capacity(512));
        group.bench_function(BenchmarkId::new("hit, caches emptied", 512), |b| {
            b.iter_custom(|times| {
                let mut spent = Duration::ZERO;
                for _ in 0..times {
                    turn = (turn + 1) % keys.len();
                    out.clear();
                    black_box(filler.iter().step_by(8).fold(0, |sum, n| sum ^ n));
                    // A caller has just made the keys: these are in the caches.
                    let keys = black_box(keys[turn].clone());
                    let start = Instant::now();
                    arena.lookup(&keys, &mut out);
                    spent += start.elapsed();
                }
                spent
            });
        });
        assert!(out.iter().all(Option::is_some));
    }
}

criterion_group!(benches, lookup, lookup_uncached);
criterion_main!(benches);
