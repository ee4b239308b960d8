//! Cold reads of whole objects into shared memory, checksum included, by both engines and by the
//! plainest good reader there is: 16 threads, each reading one file at a time with direct I/O.
//!
//! All take turns in one run, so that a noisy disk is as noisy to each; medians of 9. `fio`, where
//! installed, reads the same files with the engine's block size and depth, without a checksum.
//! `LAKECACHE_BENCH_DIR` is where the files go, on the disk to be measured.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a benchmark reports and may fail")]

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use crc_fast::{CrcAlgorithm, checksum};
use lakecache_core::io::{
    Engine, EngineChoice, EngineOptions, Priority, ReadOutcome, ReadRequest, Segment, open_engine,
};
use lakecache_core::sys::file;
use lakecache_core::sys::lock::LockFile;
use lakecache_core::sys::map::Mapping;

const MIB: u64 = 1 << 20;
const TOTAL: u64 = 252 * MIB;
const ROUNDS: usize = 9;
const PLAIN_THREADS: usize = 16;

/// Objects of one size, and memory for all of them.
struct Set {
    bytes: u64,
    paths: Vec<PathBuf>,
    sum: u64,
    arena: Arc<Mapping>,
}

impl Set {
    fn new(dir: &Path, mib: u64, arena: &Arc<Mapping>) -> Self {
        let bytes = mib * MIB;
        let content: Vec<u8> =
            (0..bytes).map(|at| (at * 31 + at / 4096).to_le_bytes()[0]).collect();
        let paths: Vec<PathBuf> =
            (0..TOTAL / bytes).map(|index| dir.join(format!("{mib}-{index:04}"))).collect();
        for path in &paths {
            let object = std::fs::File::create(path).unwrap();
            file::pwrite_all(&object, &content, 0).unwrap();
            object.sync_all().unwrap();
        }
        let sum = checksum(CrcAlgorithm::Crc64Nvme, &content);
        Self { bytes, paths, sum, arena: Arc::clone(arena) }
    }

    fn place(&self, index: usize) -> *mut u8 {
        self.arena.at(index as u64 * self.bytes, self.bytes)
    }

    fn open(&self, index: usize) -> OwnedFd {
        file::open_read(&self.paths[index], true).unwrap().unwrap()
    }

    /// Reads objects through an engine, all submitted at once.
    fn by_engine(&self, engine: &dyn Engine, objects: std::ops::Range<usize>) {
        let (sender, receiver) = mpsc::channel();
        let many = objects.len();
        for index in objects {
            let (sender, arena, sum) = (sender.clone(), Arc::clone(&self.arena), self.sum);
            let (bytes, offset) = (self.bytes, index as u64 * self.bytes);
            let request = ReadRequest {
                file: Arc::new(self.open(index)),
                direct: true,
                offset: 0,
                segments: vec![Segment { address: self.place(index), bytes }],
                priority: Priority::Demand,
                done: Box::new(move |result| {
                    assert_eq!(result.unwrap(), ReadOutcome::Complete);
                    sender.send(sum_of(arena.at(offset, bytes), bytes) == sum).unwrap();
                }),
            };
            engine.submit(request).unwrap();
        }
        for _ in 0..many {
            assert!(receiver.recv_timeout(Duration::from_mins(1)).unwrap(), "wrong checksum");
        }
    }

    /// The same by plain threads.
    fn by_threads(&self, objects: std::ops::Range<usize>) {
        let next = AtomicUsize::new(objects.start);
        std::thread::scope(|scope| {
            for _ in 0..PLAIN_THREADS.min(objects.len()) {
                scope.spawn(|| {
                    loop {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        if index >= objects.end {
                            break;
                        }
                        let (file, to) = (self.open(index), self.place(index));
                        let mut done = 0;
                        while done < self.bytes {
                            let at = to.wrapping_add(usize::try_from(done).unwrap());
                            let rest = u32::try_from(self.bytes - done).unwrap();
                            // SAFETY: the object's own range of the arena.
                            let read = unsafe { file::pread_at(file.as_fd(), at, rest, done) };
                            done += u64::from(read.unwrap());
                        }
                        assert_eq!(sum_of(to, self.bytes), self.sum);
                    }
                });
            }
        });
    }

    /// `fio`'s own figure in bytes per second.
    fn by_fio(&self) -> Option<f64> {
        // Names alone, in their directory: fio takes a short list only.
        let names: Vec<_> =
            self.paths.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
        let total = self.bytes * names.len() as u64;
        let output = Command::new("fio")
            .current_dir(self.paths[0].parent().unwrap())
            .args(["--minimal", "--readonly", "--name=cold", "--rw=read", "--direct=1"])
            .args(["--bs=1M", "--iodepth=64", "--ioengine=io_uring", "--invalidate=0"])
            .args(["--file_service_type=sequential", "--openfiles=64"])
            .arg(format!("--filename={}", names.join(":")))
            .arg(format!("--size={total}"))
            .output()
            .ok()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let fields: Vec<&str> = text.lines().last()?.split(';').collect();
        // KiB read, and KiB per second.
        assert_eq!(fields.get(5)?.parse::<u64>().ok()?, total / 1024, "fio read something else");
        Some(fields.get(6)?.parse::<f64>().ok()? * 1024.0)
    }
}

fn sum_of(address: *const u8, bytes: u64) -> u64 {
    // SAFETY: a range of the arena whose read is done and which nobody writes to now.
    let bytes = unsafe { std::slice::from_raw_parts(address, usize::try_from(bytes).unwrap()) };
    checksum(CrcAlgorithm::Crc64Nvme, bytes)
}

fn cpu_seconds() -> f64 {
    // SAFETY: plain numbers, for which zero is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: a valid place for the result.
    assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) }, 0);
    let seconds = |time: libc::timeval| {
        Duration::from_secs(time.tv_sec.unsigned_abs())
            + Duration::from_micros(time.tv_usec.unsigned_abs())
    };
    (seconds(usage.ru_utime) + seconds(usage.ru_stime)).as_secs_f64()
}

/// Seconds and CPU seconds of one run.
fn timed(run: impl FnOnce()) -> (f64, f64) {
    let (start, cpu) = (Instant::now(), cpu_seconds());
    run();
    (start.elapsed().as_secs_f64(), cpu_seconds() - cpu)
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn measure(name: &str, set: &Set, engines: &[(&str, Arc<dyn Engine>)], together: bool) {
    let objects = if together { set.paths.len() } else { 1 };
    let mut runs: Vec<Vec<(f64, f64)>> = vec![Vec::new(); engines.len() + 1];
    let mut fio = Vec::new();
    for round in 0..ROUNDS {
        // Each round begins with another reader; a lone object is another one in each round.
        let first = if together { 0 } else { round % set.paths.len() };
        let range = first..first + objects;
        for turn in 0..runs.len() {
            let reader = (round + turn) % runs.len();
            let run = match engines.get(reader) {
                Some((_, engine)) => timed(|| set.by_engine(&**engine, range.clone())),
                None => timed(|| set.by_threads(range.clone())),
            };
            runs[reader].push(run);
        }
        if together {
            fio.extend(set.by_fio());
        }
    }
    let total = f64::from(u32::try_from(objects as u64 * set.bytes).unwrap());
    let speed = |runs: &[(f64, f64)]| total / median(runs.iter().map(|run| run.0)) / 1e9;
    let plain = speed(&runs[engines.len()]);
    let names = engines.iter().map(|engine| engine.0).chain(["16 plain threads"]);
    for (reader, runs) in names.zip(&runs) {
        println!(
            "{name:>22}  {reader:<22} {:6.2} GB/s  {:5.2} of plain  {:6.0} CPU ms/GB",
            speed(runs),
            speed(runs) / plain,
            median(runs.iter().map(|run| run.1)) * 1e12 / total
        );
    }
    if !fio.is_empty() {
        let fio = median(fio.into_iter()) / 1e9;
        println!(
            "{name:>22}  {:<22} {fio:6.2} GB/s  {:5.2} of plain",
            "fio, no checksum",
            fio / plain
        );
    }
}

fn main() {
    let parent = std::env::var_os("LAKECACHE_BENCH_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    let dir = tempfile::tempdir_in(parent).unwrap();
    let life = LockFile::open(&dir.path().join("lock")).unwrap();
    let memory = file::memfd("bench").unwrap();
    file::set_len(memory.as_fd(), TOTAL).unwrap();
    file::allocate(memory.as_fd(), 0, TOTAL).unwrap();
    let arena = Arc::new(Mapping::of(memory.as_fd(), TOTAL).unwrap());
    arena.populate(0, TOTAL).unwrap();

    let options = EngineOptions::default();
    let mut engines = Vec::new();
    for (name, choice, register) in [
        ("io_uring", EngineChoice::IoUring, false),
        ("io_uring, registered", EngineChoice::IoUring, true),
        ("pread", EngineChoice::Pread, false),
    ] {
        match open_engine(choice, dir.path(), life.as_fd(), Some(&arena), &options) {
            Ok(opened) => {
                assert!(opened.direct, "{} has no O_DIRECT", dir.path().display());
                if register {
                    opened.engine.register(Segment { address: arena.at(0, TOTAL), bytes: TOTAL });
                }
                engines.push((name, opened.engine));
            }
            Err(error) => println!("{name}: {error}"),
        }
    }
    for mib in [1, 8, 28] {
        let set = Set::new(dir.path(), mib, &arena);
        measure(&format!("{mib} MiB, one alone"), &set, &engines, false);
        let name = format!("{mib} MiB x {}, at once", set.paths.len());
        measure(&name, &set, &engines, true);
        for path in &set.paths {
            file::unlink(path).unwrap();
        }
    }
    for (_, engine) in &engines {
        engine.shutdown(Duration::from_secs(10));
    }
}
