//! Cold reads of whole objects into shared memory, checksum included, by both engines and by the
//! plainest good reader there is: 16 threads, each reading one file at a time with direct I/O.
//!
//! All take turns in one run, so that a noisy disk is as noisy to each; medians of 9. `fio`, where
//! installed, reads the same files with the engine's block size and depth, without a checksum. Its
//! buffers are registered before its clock starts (else it would measure page faults) and lie in
//! huge pages (glibc 2.35), as the arena does: what a disk reads to many small pages takes up to
//! twice as long, and how long depends on where they happen to lie. Every reader reads the files
//! several times over, because a run of a tenth of a second measures chance.
//! `LAKECACHE_BENCH_DIR` is where the files go, on the disk to be measured.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a benchmark reports and may fail")]

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use crc_fast::{CrcAlgorithm, checksum};
use lakecache_bench::{quick, record};
use lakecache_core::io::{
    Engine, EngineChoice, EngineOptions, ReadOutcome, ReadRequest, Segment, open_engine,
};
use lakecache_core::sys::file;
use lakecache_core::sys::lock::LockFile;
use lakecache_core::sys::map::Mapping;

const MIB: u64 = 1 << 20;
const TOTAL: u64 = 252 * MIB;
const ROUNDS: usize = 9;
/// How often a run reads all files.
const PASSES: u64 = 4;
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

    /// `fio`'s own figure in bytes per second. Its buffers can't be registered everywhere.
    fn by_fio(&self, registered: bool) -> Result<f64, String> {
        // Names alone, in their directory: fio takes a short list only.
        let names: Vec<_> =
            self.paths.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
        let total = self.bytes * names.len() as u64;
        let options = EngineOptions::default();
        let output = Command::new("fio")
            .env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
            .current_dir(self.paths[0].parent().unwrap())
            .args(["--minimal", "--readonly", "--name=cold", "--rw=read", "--direct=1"])
            .args(["--ioengine=io_uring", "--invalidate=0", "--file_service_type=sequential"])
            .arg(format!("--openfiles={}", names.len()))
            .arg(format!("--bs={}", options.piece_bytes))
            .arg(format!("--iodepth={}", options.bytes_in_flight / u64::from(options.piece_bytes)))
            .arg(format!("--fixedbufs={}", u8::from(registered)))
            .arg(format!("--filename={}", names.join(":")))
            .arg(format!("--size={total}"))
            .arg(format!("--loops={PASSES}"))
            .output()
            .map_err(|error| format!("cannot be run ({error})"))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let fields: Vec<&str> = text.lines().last().unwrap_or_default().split(';').collect();
        // KiB read, and KiB per second.
        let read = fields.get(5).and_then(|field| field.parse::<u64>().ok());
        let speed = fields.get(6).and_then(|field| field.parse::<f64>().ok());
        match (read, speed) {
            (Some(read), Some(speed)) if read == PASSES * total / 1024 => Ok(speed * 1024.0),
            _ => Err(format!("{text}{}", String::from_utf8_lossy(&output.stderr))),
        }
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

/// Which fio runs, if any: with registered buffers where it may.
fn usable_fio(set: &Set) -> Option<bool> {
    match set.by_fio(true).and(Ok(true)).or_else(|_| set.by_fio(false).and(Ok(false))) {
        Ok(registered) => Some(registered),
        Err(error) => {
            println!("fio {error}: compared with plain threads alone");
            None
        }
    }
}

fn measure(
    name: &str,
    set: &Set,
    engines: &[(&str, Arc<dyn Engine>)],
    fio: Option<bool>,
    together: bool,
) -> String {
    let (objects, passes) = if together { (set.paths.len(), PASSES) } else { (1, 1) };
    let mib = u32::try_from(objects as u64 * set.bytes * passes / MIB).unwrap();
    let total = f64::from(mib) * f64::from(1 << 20);
    let mut names: Vec<&str> = engines.iter().map(|engine| engine.0).collect();
    names.push("16 plain threads");
    let own = names.len();
    if together && fio.is_some() {
        names.push("fio, no checksum");
    }
    // Seconds and CPU seconds; fio's processor time is not measured.
    let mut runs: Vec<Vec<(f64, f64)>> = vec![Vec::new(); names.len()];
    for round in 0..if quick() { 3 } else { ROUNDS } {
        // Each round begins with another reader; a lone object is another one in each round.
        let first = if together { 0 } else { round % set.paths.len() };
        let range = first..first + objects;
        for turn in 0..names.len() {
            let reader = (round + turn) % names.len();
            let run = if reader >= own {
                let speed = set.by_fio(fio == Some(true)).unwrap();
                (total / speed, f64::NAN)
            } else {
                timed(|| {
                    for _ in 0..passes {
                        match engines.get(reader) {
                            Some((_, engine)) => set.by_engine(&**engine, range.clone()),
                            None => set.by_threads(range.clone()),
                        }
                    }
                })
            };
            runs[reader].push(run);
        }
    }
    report(name, total, &names, &runs, engines.len())
}

/// Prints a table, and gives it as JSON. The reader number `plain` is what each is compared with;
/// beside it stands the faster of that and fio. Ratios are medians over the rounds.
fn report(
    name: &str,
    total: f64,
    names: &[&str],
    runs: &[Vec<(f64, f64)>],
    plain: usize,
) -> String {
    let speed = |reader: usize| total / median(runs[reader].iter().map(|run| run.0)) / 1e9;
    let rounds = runs[plain].len();
    let best = (plain..names.len()).max_by(|&a, &b| speed(a).total_cmp(&speed(b))).unwrap();
    let ratio = |reader: usize, other: usize| {
        median((0..rounds).map(|round| runs[other][round].0 / runs[reader][round].0))
    };
    let mut rows = Vec::new();
    for (reader, what) in names.iter().enumerate() {
        let cpu = median(runs[reader].iter().map(|run| run.1)) * 1e12 / total;
        let (gbs, of_plain, of_best) = (speed(reader), ratio(reader, plain), ratio(reader, best));
        print!("{name:>22}  {what:<22} {gbs:6.2} GB/s  {of_plain:5.2} of plain");
        print!("  {of_best:5.2} of {}", names[best]);
        if !cpu.is_nan() {
            print!("  {cpu:6.0} CPU ms/GB");
        }
        println!();
        let speeds: Vec<String> =
            runs[reader].iter().map(|run| format!("{:.3}", total / run.0 / 1e9)).collect();
        rows.push(format!(
            r#"{{"cell": "{name}", "reader": "{what}", "gb_s": {gbs:.3}, "of_plain": {of_plain:.3}, "#
        ) + &format!(
            r#""of_best": {of_best:.3}, "best": "{}", "rounds_gb_s": [{}]}}"#,
            names[best],
            speeds.join(", ")
        ));
    }
    rows.join(",\n")
}

fn main() {
    let parent = std::env::var_os("LAKECACHE_BENCH_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    let dir = tempfile::tempdir_in(parent).unwrap();
    let life = LockFile::open(&dir.path().join("lock")).unwrap();
    let memory = file::memfd("bench").unwrap();
    file::set_len(memory.as_fd(), TOTAL).unwrap();
    let arena = Arc::new(Mapping::of(memory.as_fd(), TOTAL).unwrap());
    arena.allocate(memory.as_fd(), 0, TOTAL).unwrap();

    let options = EngineOptions::default();
    let mut engines = Vec::new();
    for (name, choice, register) in [
        ("io_uring", EngineChoice::IoUring, false),
        ("io_uring, registered", EngineChoice::IoUring, true),
        ("pread", EngineChoice::Pread, false),
    ] {
        match open_engine(choice, dir.path(), life.as_fd(), &options) {
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
    let mut cells = Vec::new();
    let mut found = None;
    for mib in [1, 8, 28] {
        let set = Set::new(dir.path(), mib, &arena);
        let fio = *found.get_or_insert_with(|| usable_fio(&set));
        cells.push(measure(&format!("{mib} MiB, one alone"), &set, &engines, fio, false));
        let name = format!("{mib} MiB x {}, at once", set.paths.len());
        cells.push(measure(&name, &set, &engines, fio, true));
        for path in &set.paths {
            file::unlink(path).unwrap();
        }
    }
    record("cold_read", &format!("[\n{}\n]", cells.join(",\n")));
    for (_, engine) in &engines {
        engine.shutdown(Duration::from_secs(10));
    }
}
