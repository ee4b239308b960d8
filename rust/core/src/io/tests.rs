//! What both engines promise, checked on both by the same bodies.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::*;
use crate::ErrorKind;
use crate::sys::lock::LockFile;
use crate::sys::map::Mapping;
use crate::sys::{self, file};

const PATIENCE: Duration = Duration::from_mins(1);

/// Runs a body on a thread of its own and fails when it takes too long.
fn watched(body: impl FnOnce() + Send + 'static) {
    let (ended, end) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        body();
        ended.send(()).unwrap();
    });
    match end.recv_timeout(PATIENCE) {
        Ok(()) | Err(mpsc::RecvTimeoutError::Disconnected) => thread.join().unwrap(),
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("a test hung"),
    }
}

struct Bench {
    dir: tempfile::TempDir,
    life: LockFile,
    opened: Opened,
    arena: Arc<Mapping>,
}

const ARENA: u64 = 16 << 20;

impl Bench {
    /// `None` where this machine forbids `io_uring`.
    fn new(choice: EngineChoice, options: &EngineOptions) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let life = LockFile::open(&dir.path().join("lock")).unwrap();
        let memory = file::memfd("arena").unwrap();
        file::set_len(memory.as_fd(), ARENA).unwrap();
        file::allocate(memory.as_fd(), 0, ARENA).unwrap();
        let arena = Arc::new(Mapping::of(memory.as_fd(), ARENA).unwrap());
        let opened = match open_engine(choice, dir.path(), life.as_fd(), options) {
            Ok(opened) => opened,
            Err(error) if error.kind() == ErrorKind::Unavailable => {
                println!("not checked here: {error}");
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        Some(Self { dir, life, opened, arena })
    }

    fn file(&self, name: &str, bytes: &[u8]) -> Arc<OwnedFd> {
        let path = self.dir.path().join(name);
        File::create(&path).unwrap().write_all(bytes).unwrap();
        Arc::new(file::open_read(&path, self.opened.direct).unwrap().unwrap())
    }

    fn segment(&self, offset: u64, bytes: u64) -> Segment {
        Segment { address: self.arena.at(offset, bytes), bytes }
    }

    fn bytes(&self, offset: u64, bytes: u64) -> Vec<u8> {
        let mut found = vec![0; usize::try_from(bytes).unwrap()];
        let from = self.arena.at(offset, bytes);
        // SAFETY: within the mapping; the reads are done.
        unsafe { from.copy_to(found.as_mut_ptr(), found.len()) };
        found
    }

    fn request(
        &self,
        file: &Arc<OwnedFd>,
        offset: u64,
        segments: Vec<Segment>,
        done: impl FnOnce(std::io::Result<ReadOutcome>) + Send + 'static,
    ) -> ReadRequest {
        let arena = Arc::clone(&self.arena);
        ReadRequest {
            file: Arc::clone(file),
            direct: self.opened.direct,
            offset,
            segments,
            done: Box::new(move |result| {
                done(result);
                drop(arena);
            }),
        }
    }

    fn read(
        &self,
        file: &Arc<OwnedFd>,
        offset: u64,
        segments: Vec<Segment>,
    ) -> std::io::Result<ReadOutcome> {
        let (sender, receiver) = mpsc::channel();
        let done = move |result| sender.send(result).unwrap();
        self.opened.engine.submit(self.request(file, offset, segments, done)).unwrap();
        receiver.recv_timeout(PATIENCE).unwrap()
    }
}

fn both(options: &EngineOptions, body: impl Fn(Bench) + Clone + Send + 'static) {
    for choice in [EngineChoice::Pread, EngineChoice::IoUring] {
        let (options, body) = (options.clone(), body.clone());
        watched(move || {
            if let Some(bench) = Bench::new(choice, &options) {
                body(bench);
            }
        });
    }
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| u8::try_from((at * 31 + at / 4096) % 251).unwrap()).collect()
}

#[test]
fn a_file_fills_many_segments_in_order() {
    both(&EngineOptions::default(), |bench| {
        let content = pattern(4096 + (5 << 20));
        let file = bench.file("object", &content);
        // In memory the parts lie in reverse, with gaps, and one is longer than a piece.
        let parts: [(u64, u64); 4] =
            [(12 << 20, 8192), (8 << 20, 3 << 20), (4 << 20, 4096), (0, (2 << 20) - 12288)];
        let segments = parts.iter().map(|(at, bytes)| bench.segment(*at, *bytes)).collect();
        assert_eq!(bench.read(&file, 4096, segments).unwrap(), ReadOutcome::Complete);
        let found: Vec<u8> =
            parts.iter().flat_map(|(at, bytes)| bench.bytes(*at, *bytes)).collect();
        assert!(found == content[4096..]);
        assert_eq!(bench.opened.engine.queue_depth(), 0);
    });
}

#[test]
fn registered_memory_is_read_to_like_any_other() {
    both(&EngineOptions::default(), |bench| {
        bench.opened.engine.register(bench.segment(1 << 20, 2 << 20));
        let content = pattern(4 << 20);
        let file = bench.file("object", &content);
        // Across the registered range's ends.
        let outcome = bench.read(&file, 0, vec![bench.segment(4096, 4 << 20)]).unwrap();
        assert_eq!(outcome, ReadOutcome::Complete);
        assert!(bench.bytes(4096, 4 << 20) == content);
    });
}

#[test]
fn odd_sizes_and_places_touch_no_byte_around() {
    both(&EngineOptions::default(), |bench| {
        let content = pattern(3 << 20);
        let file = bench.file("object", &content);
        for (place, offset, bytes) in
            [(0, 0, 1), (100, 0, 5000), (4096, 77, 4096), (511, 4095, (1 << 20) + 3), (0, 1, 4095)]
        {
            // SAFETY: within the mapping; nothing is in flight.
            unsafe { bench.arena.at(0, ARENA).write_bytes(0xEE, 4 << 20) };
            let outcome = bench.read(&file, offset, vec![bench.segment(place, bytes)]).unwrap();
            assert_eq!(outcome, ReadOutcome::Complete);
            let from = usize::try_from(offset).unwrap();
            let until = from + usize::try_from(bytes).unwrap();
            assert!(bench.bytes(place, bytes) == content[from..until]);
            assert!(bench.bytes(0, place).iter().all(|byte| *byte == 0xEE));
            assert!(bench.bytes(place + bytes, 4096).iter().all(|byte| *byte == 0xEE));
        }
        assert_eq!(bench.read(&file, 0, Vec::new()).unwrap(), ReadOutcome::Complete);
    });
}

#[test]
fn a_short_file_says_where_it_ends() {
    both(&EngineOptions::default(), |bench| {
        for length in [0, 1, 4095, 4096, 10_000, 1 << 20, (2 << 20) + 100] {
            let content = pattern(length);
            let file = bench.file("short", &content);
            let segments = vec![bench.segment(0, 1 << 20), bench.segment(4 << 20, 2 << 20)];
            let read = length as u64;
            assert_eq!(bench.read(&file, 0, segments).unwrap(), ReadOutcome::Short { read });
            let first = length.min(1 << 20);
            assert!(bench.bytes(0, first as u64) == content[..first]);
            assert!(bench.bytes(4 << 20, (length - first) as u64) == content[first..]);
        }
        let file = bench.file("short", &pattern(8192));
        let outcome = bench.read(&file, 16384, vec![bench.segment(0, 4096)]).unwrap();
        assert_eq!(outcome, ReadOutcome::Short { read: 0 });
    });
}

#[test]
fn a_failed_read_is_an_error_told_once() {
    both(&EngineOptions::default(), |bench| {
        let directory = Arc::new(OwnedFd::from(File::open(bench.dir.path()).unwrap()));
        let mut request = bench.request(&directory, 0, vec![bench.segment(0, 8 << 20)], |_| {});
        request.direct = false;
        let (sender, receiver) = mpsc::channel();
        request.done = Box::new(move |result| sender.send(result).unwrap());
        bench.opened.engine.submit(request).unwrap();
        let error = receiver.recv_timeout(PATIENCE).unwrap().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EISDIR));
        assert!(receiver.recv_timeout(Duration::from_millis(50)).is_err());
    });
}

#[test]
fn reads_are_served_in_the_order_they_came() {
    // One piece at a time, and the first completion holds the only I/O thread until all are queued.
    let options = EngineOptions {
        pread_threads: 1,
        done_threads: 1,
        bytes_in_flight: 1,
        ..EngineOptions::default()
    };
    both(&options, |bench| {
        let file = bench.file("object", &pattern(8192));
        let (start, started) = mpsc::channel::<()>();
        let (sender, receiver) = mpsc::channel();
        let (held, holding) = mpsc::channel();
        let hold = move |_| {
            held.send(()).ok();
            started.recv_timeout(PATIENCE).ok();
        };
        let segment = |index: u64| vec![bench.segment(index * 8192, 8192)];
        bench.opened.engine.submit(bench.request(&file, 0, segment(0), hold)).unwrap();
        holding.recv_timeout(PATIENCE).unwrap();
        for index in 1..=6 {
            let sender = sender.clone();
            let done = move |_| sender.send(index).unwrap();
            bench.opened.engine.submit(bench.request(&file, 0, segment(index), done)).unwrap();
        }
        start.send(()).unwrap();
        let order: Vec<u64> = (0..6).map(|_| receiver.recv_timeout(PATIENCE).unwrap()).collect();
        assert_eq!(order, [1, 2, 3, 4, 5, 6]);
    });
}

#[test]
fn a_panicking_completion_harms_no_other_read() {
    both(&EngineOptions { pread_threads: 1, ..EngineOptions::default() }, |bench| {
        let file = bench.file("object", &pattern(4096));
        let bad = |_: std::io::Result<ReadOutcome>| panic!("on purpose");
        bench
            .opened
            .engine
            .submit(bench.request(&file, 0, vec![bench.segment(0, 4096)], bad))
            .unwrap();
        let outcome = bench.read(&file, 0, vec![bench.segment(4096, 4096)]).unwrap();
        assert_eq!(outcome, ReadOutcome::Complete);
    });
}

#[test]
fn shutdown_tells_every_read_and_leaves_none_in_flight() {
    both(&EngineOptions::default(), |bench| {
        let file = bench.file("object", &pattern(8 << 20));
        let told = Arc::new(AtomicUsize::new(0));
        for _ in 0..200 {
            let told = Arc::clone(&told);
            let done = move |_| {
                told.fetch_add(1, Ordering::SeqCst);
            };
            let request = bench.request(&file, 0, vec![bench.segment(0, 8 << 20)], done);
            bench.opened.engine.submit(request).unwrap();
        }
        bench.opened.engine.shutdown(PATIENCE);
        assert_eq!(told.load(Ordering::SeqCst), 200);
        assert_eq!(bench.opened.engine.queue_depth(), 0);
        // Nothing is written from here on.
        // SAFETY: within the mapping, and no read is in flight: that is what is checked.
        unsafe { bench.arena.at(0, ARENA).write_bytes(0x5A, 8 << 20) };
        std::thread::sleep(Duration::from_millis(50));
        assert!(bench.bytes(0, 8 << 20).iter().all(|byte| *byte == 0x5A));
        let request = bench.request(&file, 0, vec![bench.segment(0, 4096)], |_| {});
        assert_eq!(bench.opened.engine.submit(request).unwrap_err().kind(), ErrorKind::Closed);
        assert!(bench.opened.engine.run(Box::new(|| {})).is_err());
    });
}

#[test]
fn an_engine_lets_the_liveness_lock_go_after_shutdown() {
    both(&EngineOptions::default(), |bench| {
        let path = bench.dir.path().join("lock");
        assert!(bench.life.try_exclusive(16).unwrap());
        let Bench { opened, life, dir, .. } = bench;
        drop(life);
        let other = LockFile::open(&path).unwrap();
        let ring = opened.engine.kind() == EngineKind::IoUring;
        assert_eq!(other.try_exclusive(16).unwrap(), !ring, "only a ring holds the lock");
        opened.engine.shutdown(PATIENCE);
        assert!(other.exclusive_within(16, Duration::from_secs(10)).unwrap());
        drop(dir);
    });
}

#[test]
fn jobs_that_wait_are_bounded_and_end_with_the_engine() {
    both(&EngineOptions { job_threads: 1, ..EngineOptions::default() }, |bench| {
        let engine = &bench.opened.engine;
        let (release, held) = mpsc::channel::<()>();
        let hold = move || {
            held.recv_timeout(PATIENCE).ok();
        };
        assert!(engine.run(Box::new(hold)).is_ok());
        let ran = Arc::new(AtomicUsize::new(0));
        let taken = (0..100_000).take_while(|_| {
            let ran = Arc::clone(&ran);
            let job = move || {
                ran.fetch_add(1, Ordering::SeqCst);
            };
            engine.run(Box::new(job)).is_ok()
        });
        let taken = taken.count();
        assert!(taken > 1000 && taken < 100_000, "{taken}");
        engine.shutdown(Duration::ZERO);
        assert_eq!(Arc::strong_count(&ran), 1, "what waited was dropped");
        drop(release);
        engine.shutdown(PATIENCE);
        assert_eq!(ran.load(Ordering::SeqCst), 0);
    });
}

#[test]
fn a_file_system_without_direct_reads_is_read_through_the_page_cache() {
    watched(|| {
        // A directory of procfs takes no file; one of a tmpfs has direct reads on new kernels only.
        let life_dir = tempfile::tempdir().unwrap();
        let life = LockFile::open(&life_dir.path().join("lock")).unwrap();
        let shm = Path::new("/dev/shm");
        let options = EngineOptions::default();
        let opened = open_engine(EngineChoice::Auto, shm, life.as_fd(), &options).unwrap();
        let direct = sys::file::unnamed_in(shm, true).is_ok_and(|file| file.is_some());
        assert_eq!(opened.direct, direct);
        let reason = opened.reason.clone().unwrap_or_default();
        assert!(direct || reason.contains("O_DIRECT"), "{reason}");
        let missing = Path::new("/nowhere/at/all");
        let error = open_engine(EngineChoice::Auto, missing, life.as_fd(), &options).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENOENT));
    });
}
