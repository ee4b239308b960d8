//! Goal: processes that store, read and evict in one directory never exceed its limit, and one that
//! is killed at any moment leaves no byte uncounted and no damaged object behind.
//! Method: this binary starts itself as children; every object's bytes follow from its key.

#![allow(clippy::print_stderr, reason = "a watchdog and a skipped test must say why")]

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use std::{fs, io};

use lakecache_core::l2::{
    DiskOptions, DiskStore, Header, NoRoom, ObjectInfo, Segment, Written, format,
};
use lakecache_core::pool::{Pool, PoolOptions, Wait};
use lakecache_core::{Error, ErrorKind, Namespace, ObjectKey, sys};

const MODE: &str = "LAKECACHE_TEST_L2_CHILD";
const PARENT: &str = "LAKECACHE_TEST_L2_PARENT";
const DIR: &str = "LAKECACHE_TEST_L2_DIR";
const NAMESPACE: Namespace = Namespace([3; 32]);
const KEYS: u64 = 60;
const LIMIT: u64 = 400 << 10;
const PATIENCE: Duration = Duration::from_secs(30);

/// Ends the whole test binary if it is not dropped in time.
fn watchdog() -> mpsc::Sender<()> {
    let (alive, watched) = mpsc::channel::<()>();
    std::thread::spawn(move || {
        if watched.recv_timeout(Duration::from_mins(2)) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("watchdog: the test hangs");
            std::process::abort();
        }
    });
    alive
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < end, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn open(dir: &Path) -> (Arc<Pool>, Arc<DiskStore>) {
    let pool = Pool::open(PoolOptions {
        ram_dir: dir.join("ram"),
        cache_dir: Some(dir.join("cache")),
        disk_capacity_bytes: Some(LIMIT),
        shared: true,
        l2_records: Some(256),
        ..PoolOptions::private(12 << 20)
    })
    .expect("the pool opens");
    let options = DiskOptions::default();
    let store = DiskStore::open(pool.clone(), dir.join("cache"), options).expect("the store opens");
    store.start_scan();
    wait_until("the scan", || store.scan_done());
    (pool, store)
}

fn key(n: u64) -> ObjectKey {
    ObjectKey::derive(&NAMESPACE, 0, &n.to_le_bytes())
}

fn payload(n: u64) -> Vec<u8> {
    (0..3000 * (n % 9) + 17).map(|at| (at.wrapping_mul(n + 7) >> 3).to_le_bytes()[0]).collect()
}

fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes)
}

fn put(store: &DiskStore, n: u64, bytes: &[u8]) -> Written {
    let info = ObjectInfo {
        key: key(n),
        parent: (!n.is_multiple_of(4)).then(|| key(n - 1)),
        kind: 0,
        first_token: 0,
        last_token: 1,
        ranks: 1,
        payload_bytes: bytes.len() as u64,
    };
    // SAFETY: the slice outlives the call.
    let segment = unsafe { Segment::new(bytes.as_ptr(), bytes.len() as u64) };
    store.write(&info, &NAMESPACE, checksum(bytes), &[segment]).expect("the disk works")
}

/// Each object file with its length, temporaries included.
fn files(dir: &Path) -> Vec<(PathBuf, u64)> {
    let (mut dirs, mut found) = (vec![dir.join("cache")], Vec::new());
    while let Some(dir) = dirs.pop() {
        for entry in sys::object::list(&dir).expect("a directory") {
            let path = dir.join(&entry.name);
            match path.extension().and_then(|extension| extension.to_str()) {
                _ if entry.is_dir => dirs.push(path),
                Some("kv" | "tmp") if !entry.name.starts_with(".objects") => {
                    found.push((path, entry.len));
                }
                _ => {}
            }
        }
    }
    found
}

fn bytes_of(files: &[(PathBuf, u64)]) -> u64 {
    files.iter().map(|(_, bytes)| bytes).sum()
}

/// A child that ends with whoever holds this.
struct Worker(Child);

impl Worker {
    fn kill(&mut self) {
        self.0.kill().expect("our child");
        self.0.wait().expect("our child");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // A child that was waited for is left alone by both.
        let ended = self.0.kill().and_then(|()| self.0.wait());
        if let Err(error) = ended {
            eprintln!("a child may be left: {error}");
        }
    }
}

fn spawn(test: &str, mode: &str, dir: &Path) -> Worker {
    let binary = std::env::current_exe().expect("this binary");
    let child = Command::new(binary)
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(MODE, mode)
        .env(DIR, dir)
        .env(PARENT, std::process::id().to_string())
        .stdout(Stdio::null())
        .spawn();
    Worker(child.expect("a child"))
}

/// What this process is to do as a child. It ends with the test that started it, however that ends.
fn child() -> Option<(String, PathBuf)> {
    let what = (std::env::var(MODE).ok()?, std::env::var_os(DIR)?.into());
    // SAFETY: a plain system call.
    let status = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    assert_eq!(status, 0, "children must not outlive their test");
    // It may have ended before the call.
    let parent = std::os::unix::process::parent_id().to_string();
    assert_eq!(std::env::var(PARENT).ok()?, parent, "the test is over");
    Some(what)
}

/// Stores and reads at random until it is killed.
fn work(dir: &Path, seed: u64) {
    let (_pool, store) = open(dir);
    let mut random = seed | 1;
    loop {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let n = random % KEYS;
        if (random >> 32).is_multiple_of(4) {
            if let Some(lease) = store.lease(&key(n)).expect("a working disk") {
                let header = store.read_header(&lease).expect("a working disk");
                let header = header.expect("an intact header");
                assert_eq!(header.payload_checksum, checksum(&payload(n)));
            }
            store.touch(&[key(n - n % 4), key(n)]);
        } else {
            put(&store, n, &payload(n));
        }
    }
}

#[test]
fn the_limit_holds_at_every_sample_and_kills_leave_nothing_behind() {
    const TEST: &str = "the_limit_holds_at_every_sample_and_kills_leave_nothing_behind";
    if let Some((mode, dir)) = child() {
        work(&dir, mode.parse().expect("a seed"));
        return;
    }
    let _watchdog = watchdog();
    let temporary = tempfile::tempdir().expect("a directory");
    let dir = temporary.path();
    let (pool, store) = open(dir);
    let mut children: Vec<Worker> = (1..=2).map(|n| spawn(TEST, &n.to_string(), dir)).collect();
    let (mut samples, mut most, mut seed) = (0, 0, 100_u64);
    let mut lease = None;
    while samples < 300 || children.len() < 2 {
        // Under the writer lock nobody reserves: what the walk meets was all within the limit.
        let wait = Wait::Within(Duration::from_secs(5));
        let sampled = pool.write(wait, |_| bytes_of(&files(dir))).expect("a usable pool");
        let bytes = sampled.expect("the writer lock");
        assert!(bytes <= LIMIT, "{bytes} bytes are on disk");
        most = most.max(bytes);
        samples += usize::from(bytes > 0);
        if samples % 10 == 0 {
            lease = (0..KEYS).find_map(|n| store.lease(&key(n)).expect("a working disk"));
        }
        if let Some(lease) = &lease {
            let named = sys::file::stat(&*lease.file).expect("an open file").nlink;
            assert_eq!(named, 1, "a leased object was evicted");
        }
        if samples % 40 == 20 {
            let mut victim = children.remove(0);
            assert_eq!(victim.0.try_wait().expect("a child"), None, "a child ended by itself");
            victim.kill();
            pool.reap_dead();
            seed += 1;
            children.push(spawn(TEST, &seed.to_string(), dir));
            samples += 1;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(most > LIMIT / 2, "only {most} bytes were ever there");
    children.iter_mut().for_each(Worker::kill);
    drop(lease);
    pool.reap_dead();
    settled(dir, &store);
    drop((store, pool));
    let (_pool, store) = open(dir);
    settled(dir, &store);
}

/// Everything is counted exactly, and every file is whole.
fn settled(dir: &Path, store: &DiskStore) {
    // A write settles what dead processes were at.
    wait_until("a write", || {
        matches!(put(store, KEYS, &payload(KEYS)), Written::Stored | Written::Exists)
    });
    store.check().expect("a sound table");
    let files = files(dir);
    assert_eq!(store.gauges().bytes, bytes_of(&files));
    assert_eq!(store.gauges().objects, files.len() as u64);
    for (path, bytes) in files {
        let file = fs::read(&path).expect("a file");
        let header = Header::parse(&file).expect("an intact header");
        let length = usize::try_from(header.info.payload_bytes).expect("a size");
        assert_eq!(Some(bytes), format::file_bytes(header.info.payload_bytes));
        assert_eq!(checksum(&file[4096..4096 + length]), header.payload_checksum);
        assert!(file[4096 + length..].iter().all(|&byte| byte == 0), "padding is zero");
    }
}

/// Becomes the user nobody; fails where we are not root.
fn become_nobody() -> io::Result<()> {
    // SAFETY: plain system calls; this process runs this one test only.
    let dropped = unsafe { libc::setgroups(0, std::ptr::null()) == 0 }
        // SAFETY: as above.
        && unsafe { libc::setgid(65534) == 0 }
        // SAFETY: as above.
        && unsafe { libc::setuid(65534) == 0 };
    if dropped { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn open_alone(dir: &Path) -> Result<Arc<DiskStore>, Error> {
    let pool = Pool::open(PoolOptions::private(12 << 20)).expect("a private pool");
    DiskStore::open(pool, dir.to_owned(), DiskOptions::default())
}

#[test]
fn a_directory_without_write_permission_is_a_clear_error() {
    const TEST: &str = "a_directory_without_write_permission_is_a_clear_error";
    if let Some((mode, dir)) = child() {
        if mode == "nobody" {
            become_nobody().expect("root");
        }
        let error = open_alone(&dir).expect_err("an unwritable directory");
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        let text = error.to_string();
        assert!(text.contains("not writable") && text.contains("another cache_dir"), "{text}");
        return;
    }
    let _watchdog = watchdog();
    let temporary = tempfile::tempdir().expect("a directory");
    let allow = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("our directory");
    };
    allow(temporary.path(), 0o755);
    let dir = temporary.path().join("cache");
    fs::create_dir(&dir).expect("a directory");
    allow(&dir, 0o500);
    // SAFETY: a plain system call.
    let root = unsafe { libc::geteuid() } == 0;
    if root {
        std::os::unix::fs::chown(&dir, Some(65534), Some(65534)).expect("root");
    }
    let mut child = spawn(TEST, if root { "nobody" } else { "us" }, &dir);
    assert!(child.0.wait().expect("a child").success());
}

/// A file system of its own, unmounted on drop.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(at: &Path, bytes: u64) -> io::Result<Self> {
        let text = |text: &[u8]| CString::new(text).expect("no zero byte");
        let (path, kind) = (text(at.as_os_str().as_bytes()), text(b"tmpfs"));
        let options = text(format!("size={bytes},mode=0700").as_bytes());
        // SAFETY: all four are strings that end with a zero byte.
        let status = unsafe {
            libc::mount(kind.as_ptr(), path.as_ptr(), kind.as_ptr(), 0, options.as_ptr().cast())
        };
        if status == 0 { Ok(Self(at.to_owned())) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let path = CString::new(self.0.as_os_str().as_bytes()).expect("no zero byte");
        // SAFETY: a string that ends with a zero byte.
        unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
    }
}

#[test]
fn a_full_disk_evicts_and_then_refuses() {
    let _watchdog = watchdog();
    let temporary = tempfile::tempdir().expect("a directory");
    let disk = match SmallDisk::mount(temporary.path(), 1 << 20) {
        Ok(disk) => disk,
        Err(error) => {
            eprintln!("skipped: no file system of our own to fill ({error})");
            return;
        }
    };
    let dir = temporary.path().join("cache");
    let pool = Pool::open(PoolOptions {
        ram_dir: PathBuf::from("/dev/shm/lakecache"),
        cache_dir: Some(dir.clone()),
        l2_records: Some(64),
        ..PoolOptions::private(12 << 20)
    });
    let store = DiskStore::open(pool.expect("a pool"), dir, DiskOptions::default());
    let store = store.expect("a store");
    store.start_scan();
    wait_until("the scan", || store.scan_done());
    let bytes = vec![7; 100 << 10];
    for n in 0..30 {
        assert_eq!(put(&store, n, &bytes), Written::Stored, "object {n}");
    }
    assert!(store.gauges().evicted > 15);
    let file = fs::File::create(temporary.path().join("somebody else's")).expect("a file");
    let mut at = 0;
    while file.write_all_at(&[1; 4096], at).is_ok() {
        at += 4096;
    }
    let leases: Vec<_> = (0..30).filter_map(|n| store.lease(&key(n)).expect("a lease")).collect();
    assert_eq!(put(&store, 99, &bytes), Written::NoRoom(NoRoom::DiskFull));
    drop(leases);
    assert_eq!(put(&store, 99, &bytes), Written::Stored);
    store.check().expect("a sound table");
    drop((store, disk));
}
