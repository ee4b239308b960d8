//! How long a start takes to compare 100 000 stored objects with their directory, names and sizes
//! in the page cache: with the list that the last shutdown saved, and from the headers alone.
//! `LAKECACHE_BENCH_DIR` is where the files go.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a benchmark reports and may fail")]

use std::path::Path;
use std::time::{Duration, Instant};

use lakecache_bench::disk::{open, open_unscanned, store_objects};
use lakecache_bench::{quick, record};

const ROUNDS: usize = 5;

fn main() {
    let count = if quick() { 1_000 } else { 100_000 };
    let dir = std::env::var_os("LAKECACHE_BENCH_DIR")
        .map_or_else(|| tempfile::tempdir().unwrap(), |dir| tempfile::tempdir_in(dir).unwrap());
    let store = open(dir.path());
    store_objects(&store, 0..count);
    store.close();
    drop(store);
    let (listed, headers) = (median(dir.path(), true), median(dir.path(), false));
    println!("{count} objects, with the list: {listed:?}");
    println!("{count} objects, headers only:  {headers:?}");
    let (listed, headers) = (listed.as_secs_f64(), headers.as_secs_f64());
    let json = format!(
        r#"{{"objects": {count}, "with_list_s": {listed:.6}, "headers_only_s": {headers:.6}}}"#
    );
    record("scan", &json);
}

fn median(dir: &Path, listed: bool) -> Duration {
    let mut times: Vec<_> = (0..ROUNDS).map(|_| scan(dir, listed)).collect();
    times.sort_unstable();
    times[ROUNDS / 2]
}

fn scan(dir: &Path, listed: bool) -> Duration {
    let list = dir.join("cache/objects.snapshot");
    if !listed && list.exists() {
        std::fs::remove_file(list).unwrap();
    }
    let start = Instant::now();
    let store = open_unscanned(dir);
    store.start_scan();
    while !store.scan_done() {
        std::thread::sleep(Duration::from_micros(500));
    }
    start.elapsed()
}
