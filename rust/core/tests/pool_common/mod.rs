//! What the tests of pools in several processes share.
//!
//! A test's child is its own test binary, told by `POOL_CHILD` what to do (see `child` there). It
//! says on its standard output what it has reached, and ends when its standard input is closed, or
//! is killed.
#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "tests")]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lakecache_core::pool::{Pool, PoolOptions, TableHooks, Writer};

pub(crate) const MIB: u64 = 1 << 20;

/// Ends the process if a test hangs: a hang must fail, not block everything.
pub(crate) struct Watchdog(Arc<AtomicBool>);

impl Watchdog {
    pub(crate) fn start(test: &'static str) -> Self {
        let done = Arc::new(AtomicBool::new(false));
        let seen = done.clone();
        std::thread::spawn(move || {
            let end = Instant::now() + Duration::from_secs(90);
            while Instant::now() < end {
                if seen.load(Ordering::Relaxed) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(50));
            }
            eprintln!("{test} hangs");
            std::process::abort();
        });
        Self(done)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[derive(Default)]
pub(crate) struct Recorder {
    pub(crate) rebuilt: AtomicU64,
    pub(crate) reaped: Mutex<Vec<u8>>,
}

impl TableHooks for Recorder {
    fn rebuild(&self, writer: &mut Writer) {
        assert!(writer.pool().epoch() % 2 == 1);
        self.rebuilt.fetch_add(1, Ordering::Relaxed);
    }
    fn reap(&self, _writer: &mut Writer, dead_member: u8) {
        self.reaped.lock().unwrap().push(dead_member);
    }
}

impl Recorder {
    pub(crate) fn on(pool: &Pool) -> Arc<Self> {
        let hooks = Arc::new(Self::default());
        pool.add_hooks(hooks.clone());
        hooks
    }
    pub(crate) fn reaped(&self) -> Vec<u8> {
        self.reaped.lock().unwrap().clone()
    }
}

/// A shared-memory root and a cache directory of a test's own.
pub(crate) struct Dirs {
    pub(crate) root: tempfile::TempDir,
    pub(crate) ram_dir: PathBuf,
    pub(crate) cache_dir: PathBuf,
}

impl Dirs {
    pub(crate) fn new() -> Self {
        let shm = Path::new("/dev/shm");
        let root = if shm.is_dir() { tempfile::tempdir_in(shm) } else { tempfile::tempdir() };
        let root = root.unwrap();
        let (ram_dir, cache_dir) = (root.path().join("ram"), root.path().join("cache"));
        Self { root, ram_dir, cache_dir }
    }

    pub(crate) fn options(&self) -> PoolOptions {
        options(&self.ram_dir, &self.cache_dir)
    }
}

pub(crate) fn options(ram_dir: &Path, cache_dir: &Path) -> PoolOptions {
    PoolOptions {
        ram_dir: ram_dir.to_path_buf(),
        cache_dir: Some(cache_dir.to_path_buf()),
        shared: true,
        ..PoolOptions::private(16 * MIB)
    }
}

pub(crate) struct Process {
    pub(crate) child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    pub(crate) member: u8,
}

impl Process {
    /// Starts a child that opens the pool and then does `action`; returns when it is under way.
    pub(crate) fn start(dirs: &Dirs, action: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env("POOL_CHILD", action)
            .env("POOL_RAM_DIR", &dirs.ram_dir)
            .env("POOL_CACHE_DIR", &dirs.cache_dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut this = Self { child, input, output, member: 0 };
        this.member = this.expect("member").parse().unwrap();
        if action != "hold" {
            this.expect(action);
        }
        this
    }

    pub(crate) fn expect(&mut self, word: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "no {word:?} from the child");
            // The test harness writes its own words, without a line end, before ours.
            if let Some((_, rest)) = line.split_once(&format!("@{word}")) {
                return rest.trim().to_owned();
            }
        }
    }

    pub(crate) fn kill(mut self) -> u8 {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.member
    }

    pub(crate) fn end(mut self) {
        drop(self.input.take());
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// What a child is to do, and in which pool; `None`: this process is not a child.
pub(crate) fn child_options() -> Option<(String, PoolOptions)> {
    let action = std::env::var("POOL_CHILD").ok()?;
    let dir = |name| PathBuf::from(std::env::var_os(name).unwrap());
    Some((action, options(&dir("POOL_RAM_DIR"), &dir("POOL_CACHE_DIR"))))
}

/// Repeats `done` for a while: a child that another test is just starting can hold a lock of this
/// process for a moment longer than the process itself.
pub(crate) fn eventually(done: impl Fn() -> bool) -> bool {
    within(Duration::from_secs(10), done)
}

/// Repeats `done` until it is true, or for as long as `most`.
pub(crate) fn within(most: Duration, done: impl Fn() -> bool) -> bool {
    let end = Instant::now() + most;
    while !done() {
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}
