//! The kernel may complete a read into shared memory after the process that asked for it was killed.
//!
//! Whoever takes the dead process's liveness lock must be safe from that, because its ring holds the
//! lock's file. The control does without, and shows that the danger is real where the disk is slow
//! enough to be caught in the act; on a disk that isn't, it says so and fails nothing.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use lakecache_core::ErrorKind;
use lakecache_core::io::{EngineChoice, EngineOptions, ReadRequest, Segment, open_engine};
use lakecache_core::sys::file;
use lakecache_core::sys::lock::LockFile;
use lakecache_core::sys::map::Mapping;

const MODE: &str = "LAKECACHE_LATE_MODE";
const PLACE: &str = "LAKECACHE_LATE_PLACE";
const ARENA: &str = "LAKECACHE_LATE_ARENA";
const PIECE: u64 = 1 << 20;
const PIECES: u64 = 128;
const BYTES: u64 = PIECE * PIECES;
const PAGE: u64 = 4096;
const LIFE: u64 = 16;

/// What the file holds, what the survivor writes, and what was there before.
const FILE: u8 = 7;
const SURVIVOR: u8 = 0x55;
const BEFORE: u8 = 0xAA;

struct Place {
    dir: tempfile::TempDir,
    arena_path: tempfile::TempPath,
    arena: Mapping,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let object = std::fs::File::create(dir.path().join("object")).unwrap();
        file::pwrite_all(&object, &vec![FILE; usize::try_from(BYTES).unwrap()], 0).unwrap();
        object.sync_all().unwrap();
        let shm = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        file::set_len(shm.as_file().as_fd(), BYTES).unwrap();
        file::allocate(shm.as_file().as_fd(), 0, BYTES).unwrap();
        let arena = Mapping::of(shm.as_file().as_fd(), BYTES).unwrap();
        Self { dir, arena_path: shm.into_temp_path(), arena }
    }

    /// Kills a child `delay` after it began to read, takes its lock, and writes over all pages that
    /// aren't filled. How many there were, and how many of them changed later.
    fn round(&self, mode: &str, delay: Duration) -> Option<(u64, u64)> {
        // SAFETY: the mapping's own range; nobody else uses it now.
        unsafe { self.arena.at(0, BYTES).write_bytes(BEFORE, usize::try_from(BYTES).unwrap()) };
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(MODE, mode)
            .env(PLACE, self.dir.path())
            .env(ARENA, &self.arena_path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let word = lines.find_map(|line| {
            let line = line.unwrap();
            line.split_once('@').map(|(_, word)| word.to_owned())
        });
        if word.as_deref() != Some("reading") {
            child.wait().unwrap();
            println!("not checked here: {word:?}");
            return None;
        }
        std::thread::sleep(delay);
        child.kill().unwrap();
        let lock = LockFile::open(&self.dir.path().join("lock")).unwrap();
        assert!(lock.exclusive_within(LIFE, Duration::from_secs(30)).unwrap(), "the lock stays");
        let stamped: Vec<u64> =
            (0..BYTES / PAGE).filter(|page| self.page(*page).contains(&BEFORE)).collect();
        for page in &stamped {
            let at = self.arena.at(page * PAGE, PAGE);
            // SAFETY: within the mapping; the lock says that nobody else writes, which is the point.
            unsafe { at.write_bytes(SURVIVOR, 4096) };
        }
        child.wait().unwrap();
        std::thread::sleep(Duration::from_millis(500));
        let changed =
            stamped.iter().filter(|page| self.page(**page) != [SURVIVOR; 4096]).count() as u64;
        Some((stamped.len() as u64, changed))
    }

    fn page(&self, page: u64) -> [u8; 4096] {
        let mut bytes = [0; 4096];
        // SAFETY: within the mapping; a torn copy would only show what is looked for.
        unsafe { self.arena.at(page * PAGE, PAGE).copy_to(bytes.as_mut_ptr(), 4096) };
        bytes
    }
}

/// Ends the process if it hangs.
fn watchdog() {
    std::thread::spawn(|| {
        std::thread::sleep(Duration::from_mins(3));
        println!("late_completion hangs");
        std::process::abort();
    });
}

/// The process that is killed; nothing when the tests are run without being told so.
#[test]
fn child() {
    let Ok(mode) = std::env::var(MODE) else { return };
    let place = PathBuf::from(std::env::var_os(PLACE).unwrap());
    let shm = file::open_or_create(Path::new(&std::env::var_os(ARENA).unwrap())).unwrap();
    let arena = Mapping::of(shm.as_fd(), BYTES).unwrap();
    let life = LockFile::open(&place.join("lock")).unwrap();
    assert!(life.exclusive_within(LIFE, Duration::from_secs(30)).unwrap());
    let object = Arc::new(file::open_read(&place.join("object"), true).unwrap().unwrap());
    let kept: Box<dyn Send> = if mode == "engine" {
        read_by_engine(&place, &life, &object, &arena)
    } else {
        read_without_liveness(&object, &arena)
    };
    println!("@reading");
    // Killed long before.
    std::thread::sleep(Duration::from_mins(1));
    drop(kept);
}

fn read_by_engine(
    place: &Path,
    life: &LockFile,
    object: &Arc<OwnedFd>,
    arena: &Mapping,
) -> Box<dyn Send> {
    let options = EngineOptions { bytes_in_flight: BYTES, ..EngineOptions::default() };
    let opened = match open_engine(EngineChoice::IoUring, place, life.as_fd(), &options) {
        Ok(opened) => opened,
        Err(error) if error.kind() == ErrorKind::Unavailable => {
            println!("@no io_uring: {error}");
            std::process::exit(0);
        }
        Err(error) => panic!("{error}"),
    };
    if !opened.direct {
        println!("@no direct reads");
        std::process::exit(0);
    }
    let request = ReadRequest {
        file: Arc::clone(object),
        direct: true,
        offset: 0,
        segments: vec![Segment { address: arena.at(0, BYTES), bytes: BYTES }],
        done: Box::new(|_| {}),
    };
    opened.engine.submit(request).unwrap();
    Box::new(opened.engine)
}

fn read_without_liveness(object: &OwnedFd, arena: &Mapping) -> Box<dyn Send> {
    let Ok(mut ring) = io_uring::IoUring::new(u32::try_from(PIECES).unwrap()) else {
        println!("@no io_uring");
        std::process::exit(0);
    };
    for piece in 0..PIECES {
        let read = io_uring::opcode::Read::new(
            io_uring::types::Fd(object.as_raw_fd()),
            arena.at(piece * PIECE, PIECE),
            u32::try_from(PIECE).unwrap(),
        );
        let entry = read.offset(piece * PIECE).build();
        // SAFETY: the mapping and the file stay until the process is killed.
        unsafe { ring.submission().push(&entry) }.unwrap();
    }
    ring.submit().unwrap();
    Box::new(ring)
}

#[test]
fn no_byte_changes_after_the_survivor_has_the_lock() {
    if std::env::var_os(MODE).is_some() {
        return;
    }
    watchdog();
    let place = Place::new();
    let mut unfilled = 0;
    for round in 0..8 {
        let Some((stamped, changed)) = place.round("engine", Duration::from_millis(2 + 4 * round))
        else {
            return;
        };
        assert_eq!(changed, 0, "pages overwritten after the lock was taken, of {stamped}");
        unfilled += stamped;
    }
    // The lock comes when all reads have ended, so that mostly no page is left to be filled.
    println!("engine: no late write in 8 rounds; {unfilled} pages were unfilled");

    for round in 0..12 {
        let Some((stamped, changed)) = place.round("bare", Duration::from_millis(round)) else {
            return;
        };
        if changed > 0 {
            println!("control: {changed} of {stamped} pages written late, in round {}", round + 1);
            return;
        }
    }
    println!("control: not observed, 0 late writes in 12 rounds; this disk is too fast to tell");
}
