//! The extent allocator, empty and fragmented: frees one run and takes another of random size.
#![allow(missing_docs, reason = "criterion makes undocumented functions")]

use std::sync::atomic::AtomicU64;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use lakecache_core::l1::{Extent, Extents, Hints};

/// 256 MiB.
const PIECE_PAGES: u64 = 65_536;

fn churn(c: &mut Criterion) {
    let mut group = c.benchmark_group("extent");
    for (gib, percent) in [(2, 10), (2, 90), (64, 90)] {
        let pages = gib * 4 * PIECE_PAGES;
        let words: Vec<AtomicU64> = (0..pages / 64).map(|_| AtomicU64::new(0)).collect();
        let hints = Hints::new(u32::try_from(pages / PIECE_PAGES).expect("few pieces"));
        let frees = AtomicU64::new(0);
        let extents = Extents::new(&words, pages, PIECE_PAGES, &hints, &frees);
        let mut random = 88_172_645_463_325_252_u64;
        let mut below = |bound: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random >> 11) % bound
        };
        let mut held: Vec<Vec<Extent>> = Vec::new();
        while extents.used() * 100 < pages * percent {
            held.extend(extents.allocate(1 + below(2048), |_| true));
        }
        let name = BenchmarkId::new("free+allocate", format!("{gib}GiB/{percent}%"));
        group.bench_function(name, |b| {
            b.iter(|| {
                let at = usize::try_from(below(held.len() as u64)).unwrap_or(0);
                let freed: u64 = held[at].iter().map(|extent| extent.pages).sum();
                for extent in held.swap_remove(at) {
                    extents.free(extent);
                }
                // About as much as was freed, so that the share in use stays.
                let wanted = (freed + below(257)).saturating_sub(128).max(1);
                held.extend(extents.allocate(wanted, |_| true));
            });
        });
    }
}

criterion_group!(benches, churn);
criterion_main!(benches);
