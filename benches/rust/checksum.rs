//! How fast the payload checksum is: it must not be what a read waits for.
#![allow(missing_docs, reason = "a benchmark")]

use std::hint::black_box;

use crc_fast::{CrcAlgorithm, checksum};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

fn crc64(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("crc64_nvme");
    for mib in [1_usize, 8, 28] {
        let bytes = vec![0xA5_u8; mib << 20];
        group.throughput(Throughput::Bytes(bytes.len() as u64));
        group.bench_with_input(
            BenchmarkId::from_parameter(format!("{mib} MiB")),
            &bytes,
            |b, v| {
                b.iter(|| checksum(CrcAlgorithm::Crc64Nvme, black_box(v)));
            },
        );
    }
    group.finish();
}

criterion_group!(benches, crc64);
criterion_main!(benches);
