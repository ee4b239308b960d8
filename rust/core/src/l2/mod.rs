//! Objects on disk: one file each, and their records in the pool.
//!
//! ```text
//! <cache_dir>/<namespace>/<2 hex>/<key>.kv   4 KiB header and the payload, padded to 4 KiB
//! <cache_dir>/<namespace>/manifest.json      what the namespace is, for people
//! <cache_dir>/<namespace>/estimates.json     how fast its loads were
//! <cache_dir>/objects.snapshot               size, recency, parent and span of every object
//! <cache_dir>/objects.lock                   byte 0: scanning; byte 1: shared by every store
//! ```
//! Invariants, over all processes and at every moment:
//! - D1: the sum of the records' bytes is at most the limit; bytes are reserved before written.
//! - D2: no object file has a name unless a record counts it (once the scan is done).
//! - D3: a file's name goes before its bytes are given back.
//! - D4: a file whose lock is shared by a lease keeps its name, unless it is damaged.
//!
//! Work on files happens without the writer lock, on a record that is WRITING or DYING and ours;
//! its result is queued and settled by whoever next holds the lock in this process.

mod contents;
mod evict;
pub mod format;
mod health;
mod lease;
mod publish;
mod scan;
mod snapshot;
mod table;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

pub use self::contents::{Contents, Removed, Stored, contents, remove_contents};
pub use self::format::{Damage, Header};
pub use self::lease::DiskLease;
pub use self::publish::{NoRoom, Segment, Written};
pub use self::table::Table;
use self::table::{Outcome, Word};
use crate::pool::{Pool, Wait, Writer};
use crate::sys::lock::LockFile;
use crate::{Error, ErrorKind, Namespace, ObjectKey, Result, sys};

/// How long background work waits for the writer lock.
const LOCK_WAIT: Duration = Duration::from_secs(2);
/// Touched keys that wait for the writer lock; more are forgotten.
const TOUCHES_MAX: usize = 64 << 10;
/// Times that a directory may be removed under whoever makes a file in it.
const DIR_ATTEMPTS: usize = 32;
const MANIFEST: &str = "manifest.json";
const SCANNING: u64 = 0;
const IN_USE: u64 = 1;

/// How sure a stored object is to survive a power cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durability {
    /// The newest may be lost; none is ever served damaged.
    #[default]
    None,
    /// Bytes are on the disk before the object has its name.
    Data,
}

/// How to keep objects on disk.
#[derive(Debug, Clone, Copy, Default)]
pub struct DiskOptions {
    /// What to wait for before an object has its name.
    pub durability: Durability,
    /// Free bytes to leave on the file system.
    pub reserve_bytes: u64,
}

/// What an object is, apart from its namespace and bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectInfo {
    /// Its key.
    pub key: ObjectKey,
    /// The object that it continues.
    pub parent: Option<ObjectKey>,
    /// Chunk or state.
    pub kind: u8,
    /// First token that it covers.
    pub first_token: u32,
    /// The token after the last that it covers.
    pub last_token: u32,
    /// Parts in the payload, in rank order and of equal size.
    pub ranks: u16,
    /// Bytes of the payload.
    pub payload_bytes: u64,
}

/// Numbers for operators; the counters are those of this process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct L2Gauges {
    /// Bytes of all object files, reservations included.
    pub bytes: u64,
    /// Their number.
    pub objects: u64,
    /// The limit, where there is one.
    pub capacity: Option<u64>,
    /// Whether bytes and names were compared with the directory.
    pub scan_done: bool,
    /// Objects evicted.
    pub evicted: u64,
    /// Victims passed over because they were being read.
    pub leased_skips: u64,
    /// Leases taken.
    pub leases: u64,
    /// Objects whose file was gone or going.
    pub missing: u64,
    /// Damaged objects by kind, in the order of [`Damage::ALL`].
    pub damaged: [u64; Damage::ALL.len()],
    /// System calls that failed.
    pub errors: u64,
    /// Whether writes rest after such a failure.
    pub degraded: bool,
    /// Files removed by the scan: leftovers, temporaries, wrong lengths.
    pub swept: u64,
}

#[derive(Debug, Default)]
struct Counters {
    stored: AtomicU64,
    evicted: AtomicU64,
    leased_skips: AtomicU64,
    leases: AtomicU64,
    missing: AtomicU64,
    damaged: [AtomicU64; Damage::ALL.len()],
    errors: AtomicU64,
    swept: AtomicU64,
}

/// A result of work on a file, to be settled under the writer lock.
#[derive(Debug, Clone, Copy)]
struct Finish {
    record: u32,
    word: Word,
    to: Outcome,
}

/// The record and inode that were found damaged.
#[derive(Debug, Clone, Copy)]
struct Negative {
    record: Option<(u32, Word)>,
    inode: u64,
}

/// Objects on disk, as one member sees them. All methods may be called from any thread; those that
/// touch files belong on I/O threads.
#[derive(Debug)]
pub struct DiskStore {
    pool: Arc<Pool>,
    table: Arc<Table>,
    dir: PathBuf,
    options: DiskOptions,
    /// Whether files are opened with `O_DIRECT`; off for good once refused.
    direct: AtomicBool,
    lock: LockFile,
    pending: Mutex<Vec<Finish>>,
    touches: Mutex<Vec<Vec<ObjectKey>>>,
    negative: Mutex<HashMap<ObjectKey, Negative>>,
    negatives: AtomicUsize,
    health: health::Health,
    counters: Counters,
    closing: AtomicBool,
    /// Whether it was said that the table is full.
    full: AtomicBool,
    scanner: Mutex<Option<JoinHandle<()>>>,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DiskStore {
    /// Opens the objects under `cache_dir`. Where no other process uses them, nothing is stored
    /// until [`DiskStore::start_scan`] has compared the records with the directory.
    pub fn open(pool: Arc<Pool>, cache_dir: PathBuf, options: DiskOptions) -> Result<Arc<Self>> {
        sys::file::create_dirs(&cache_dir)?;
        sys::file::dir_is_ours(&cache_dir)?;
        let direct = probe(&cache_dir)?;
        let lock = LockFile::open(&cache_dir.join("objects.lock"))?;
        let table = Table::new(&pool);
        join(&lock, &table, &cache_dir)?;
        sys::limits::raise_nofile();
        Ok(Arc::new(Self {
            pool,
            table,
            dir: cache_dir,
            options,
            direct: AtomicBool::new(direct),
            lock,
            pending: Mutex::default(),
            touches: Mutex::default(),
            negative: Mutex::default(),
            negatives: AtomicUsize::new(0),
            health: health::Health::default(),
            counters: Counters::default(),
            closing: AtomicBool::new(false),
            full: AtomicBool::new(false),
            scanner: Mutex::default(),
        }))
    }

    /// Appends for each key whether it is on disk. No lock, no system call.
    pub fn lookup(&self, keys: &[ObjectKey], out: &mut Vec<bool>) {
        let first = out.len();
        for attempt in 0.. {
            let epoch = self.pool.epoch();
            self.table.lookup(keys, out);
            let calm = epoch.is_multiple_of(2) && self.pool.epoch() == epoch;
            if calm || attempt == 3 || out[first..].iter().all(|&found| found) {
                break;
            }
            out.truncate(first);
        }
        if self.negatives.load(Ordering::Relaxed) > 0 {
            for (found, key) in out[first..].iter_mut().zip(keys) {
                *found = *found && !self.is_negative(key);
            }
        }
    }

    /// Whether the stored object of `key` was found damaged and not published anew since.
    pub fn is_negative(&self, key: &ObjectKey) -> bool {
        if self.negatives.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let Some(negative) = locked(&self.negative).get(key).copied() else { return false };
        self.table.find(key).is_none_or(|(i, word)| negative.covers(i, word))
    }

    /// Notes the use of a chain of objects. Never waits.
    pub fn touch(&self, keys_root_first: &[ObjectKey]) {
        {
            let mut touches = locked(&self.touches);
            let held: usize = touches.iter().map(Vec::len).sum();
            if held + keys_root_first.len() <= TOUCHES_MAX {
                touches.push(keys_root_first.to_vec());
            }
        }
        let drained = self.write_lock(Wait::Try, |_| ());
        log::trace!("touched: {drained:?}");
    }

    /// Numbers for operators.
    pub fn gauges(&self) -> L2Gauges {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let root = self.table.root();
        let counters = &self.counters;
        L2Gauges {
            bytes: get(&root.bytes),
            objects: u64::from(root.count.load(Ordering::Relaxed)),
            capacity: self.pool.disk_capacity(),
            scan_done: self.scan_done(),
            evicted: get(&counters.evicted),
            leased_skips: get(&counters.leased_skips),
            leases: get(&counters.leases),
            missing: get(&counters.missing),
            damaged: std::array::from_fn(|kind| get(&counters.damaged[kind])),
            errors: get(&counters.errors),
            degraded: self.health.rests(),
            swept: get(&counters.swept),
        }
    }

    /// Writes what the namespace is, for people, beside its objects.
    pub fn write_manifest(&self, namespace: &Namespace, json: &str) -> Result<()> {
        self.check_in_place()?;
        let dir = self.namespace_dir(namespace);
        make_in(&dir, || sys::object::replace(&dir.join(MANIFEST), json.as_bytes()))
    }

    /// Compares the table with itself: for tests.
    pub fn check(&self) -> Result<(), String> {
        match self.write_lock(LOCK_WAIT.into(), |writer| self.table.check(writer)) {
            Ok(Some(verdict)) => verdict,
            other => Err(format!("no writer lock: {other:?}")),
        }
    }

    /// Ends the scan, settles what is left, and writes the snapshot.
    pub fn close(&self) {
        self.closing.store(true, Ordering::Release);
        let scanner = locked(&self.scanner).take();
        if let Some(scanner) = scanner.filter(|s| s.thread().id() != std::thread::current().id()) {
            drop(scanner.join());
        }
        if self.scan_done()
            && let Err(error) = self.snapshot()
        {
            log::warn!("the list of stored objects was not saved: {error}");
        }
    }

    fn namespace_dir(&self, namespace: &Namespace) -> PathBuf {
        self.dir.join(namespace.hex())
    }

    fn path(&self, namespace: &Namespace, key: &ObjectKey) -> PathBuf {
        let hex = key.hex();
        self.namespace_dir(namespace).join(&hex[..2]).join(format!("{hex}.kv"))
    }

    /// The writer lock, with everything settled that waited for it.
    fn write_lock<R>(&self, wait: Wait, f: impl FnOnce(&mut Writer) -> R) -> Result<Option<R>> {
        self.pool.write(wait, |writer| {
            for finish in std::mem::take(&mut *locked(&self.pending)) {
                if !self.table.finish(writer, finish.record, finish.word, finish.to) {
                    log::debug!("record {} changed hands: {finish:?}", finish.record);
                }
            }
            for chain in std::mem::take(&mut *locked(&self.touches)) {
                self.table.touch(writer, &chain);
            }
            f(writer)
        })
    }

    /// Queues results and settles them, now or with the next use of the lock.
    fn settle(&self, finished: impl IntoIterator<Item = Finish>) {
        locked(&self.pending).extend(finished);
        match self.write_lock(LOCK_WAIT.into(), |_| ()) {
            Ok(Some(())) => {}
            other => log::debug!("settled later: {other:?}"),
        }
    }
}

/// Makes a file in a directory, which is made as well, also where others remove it meanwhile
/// because it is empty.
fn make_in<T>(dir: &Path, make: impl Fn() -> Result<T>) -> Result<T> {
    let attempt = || sys::file::create_dirs(dir).and_then(|()| make());
    for _ in 1..DIR_ATTEMPTS {
        match attempt() {
            // The latter from ext4, where it goes between being found and getting the file.
            Err(error) if matches!(error.errno(), Some(libc::ENOENT | libc::EPERM)) => {}
            made => return made,
        }
    }
    attempt()
}

impl Negative {
    /// Whether `word` is still that of the damaged object.
    fn covers(&self, i: u32, word: Word) -> bool {
        self.record.is_some_and(|(record, damaged)| record == i && damaged.same_object(word))
    }
}

impl From<Duration> for Wait {
    fn from(time: Duration) -> Self {
        Self::Within(time)
    }
}

/// The first store marks the records as not compared with the directory yet.
fn join(lock: &LockFile, table: &Table, dir: &Path) -> Result<()> {
    if lock.try_exclusive(IN_USE)? {
        table.set_scan_done(false);
    }
    // An opener that found itself the first holds the byte for a moment only.
    for _ in 0..10_000 {
        if lock.try_shared(IN_USE)? {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let message = format!("{} has been locked by a starting process for 10 s", dir.display());
    Err(Error::new(ErrorKind::Timeout, message))
}

/// Makes a file to see whether that is allowed, and whether `O_DIRECT` is.
fn probe(dir: &Path) -> Result<bool> {
    let refused = |error: &Error| {
        Error::new(
            ErrorKind::Config,
            format!(
                "cache_dir {} is not writable for this user ({error}): give it to the user that \
                 runs the engine, or choose another cache_dir",
                dir.display()
            ),
        )
    };
    for direct in [true, false] {
        match sys::file::unnamed_in(dir, direct) {
            Ok(Some(_)) => return Ok(direct),
            Ok(None) => {}
            Err(error) if direct && error.errno() == Some(libc::EINVAL) => {}
            Err(error) => return Err(refused(&error)),
        }
        let random: [u8; 8] = sys::file::random_bytes();
        let path = dir.join(format!(".probe.{:016x}.tmp", u64::from_le_bytes(random)));
        match sys::object::create_new(&path, direct) {
            Ok(_) => return sys::file::unlink(&path).map(|_| direct),
            Err(error) if direct && error.raw_os_error() == Some(libc::EINVAL) => {
                sys::file::unlink(&path)?;
            }
            Err(error) => return Err(refused(&Error::io("making a file", error))),
        }
    }
    Ok(false)
}
