//! Comparing the records with the directory: whoever holds the scan lock, in the background, once
//! for each time that nobody used the directory. Until it is done nothing is stored.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::evict::{Fate, Room, remove_idle};
use super::format::{HEADER_BYTES, Header, Page};
use super::snapshot::{self, Known};
use super::table::{Outcome, State};
use super::{Damage, DiskStore, LOCK_WAIT, ObjectInfo, SCANNING, count, locked};
use crate::pool::Writer;
use crate::pool::layout::NAMESPACES_MAX;
use crate::sys::object::{Directory, Entry};
use crate::{Error, ErrorKind, Namespace, ObjectKey, Result, sys};

const THREADS_MAX: usize = 8;
/// Records made in one hold of the writer lock.
const BATCH: usize = 512;
/// In use once the pool can remember no more namespaces.
#[allow(clippy::cast_possible_truncation, reason = "a constant of 1023")]
const LAST_NAMESPACE: u16 = (NAMESPACES_MAX - 1) as u16;
/// How often a member looks whether another's scan is over.
const LOOK: Duration = Duration::from_millis(50);
/// How long after a failed scan the next one begins.
const AGAIN: Duration = Duration::from_secs(5);

/// Whether a name is one that unfinished files have.
pub(super) fn is_temporary(name: &str) -> bool {
    name.strip_prefix('.').is_some_and(|rest| rest.strip_suffix(".tmp").is_some())
}

/// An object file that is what its name says.
struct Found {
    namespace: Namespace,
    info: ObjectInfo,
    file_bytes: u64,
    /// Files that the list lacks come after all that it has, by time.
    order: (bool, i64),
}

impl DiskStore {
    /// Whether the records were compared with the directory.
    pub fn scan_done(&self) -> bool {
        self.table.scan_done()
    }

    /// Waits until they were, here or by another member; `false` when `timeout` passed first.
    pub fn wait_scanned(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        while !self.scan_done() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        true
    }

    /// Starts the comparison in the background, if it is due. Whichever member gets the scan lock
    /// does it; the others see to it that it gets done. What is there above our limit goes.
    pub fn start_scan(self: &Arc<Self>) {
        let mut scanner = locked(&self.scanner);
        if scanner.is_some() || (self.scan_done() && self.excess() == 0) {
            return;
        }
        let store = self.clone();
        let thread = std::thread::Builder::new().name("lakecache-scan".into());
        match thread.spawn(move || store.scan_and_shrink()) {
            Ok(thread) => *scanner = Some(thread),
            Err(error) => log::warn!("no thread for the scan, so nothing is stored: {error}"),
        }
    }

    fn scan_and_shrink(&self) {
        self.scan_when_due();
        if self.scan_done()
            && let Err(error) = self.shrink()
        {
            log::warn!("there is more on disk than disk_capacity_bytes allows: {error}");
            count(&self.counters.errors);
        }
    }

    /// Bytes on disk above the limit: that of a member that came later may be a smaller one.
    fn excess(&self) -> u64 {
        let limit = self.pool.disk_capacity().unwrap_or(u64::MAX);
        self.table.root().bytes.load(Ordering::Relaxed).saturating_sub(limit)
    }

    fn shrink(&self) -> Result<()> {
        let excess = self.excess();
        if excess > 0 {
            self.make_room(excess)?;
        }
        Ok(())
    }

    fn scan_when_due(&self) {
        while !self.scan_done() && !self.closing.load(Ordering::Acquire) {
            let pause = match self.scan_if_free() {
                Ok(true) => return,
                Ok(false) => LOOK,
                Err(error) => {
                    log::warn!("the stored objects could not be listed: {error}");
                    count(&self.counters.errors);
                    AGAIN
                }
            };
            let mut slept = Duration::ZERO;
            while slept < pause && !self.closing.load(Ordering::Acquire) {
                std::thread::sleep(LOOK);
                slept += LOOK;
            }
        }
    }

    fn scan_if_free(&self) -> Result<bool> {
        if !self.lock.try_exclusive(SCANNING)? {
            return Ok(false);
        }
        let scanned = if self.scan_done() { Ok(()) } else { self.scan() };
        self.lock.unlock(SCANNING);
        scanned.map(|()| true)
    }

    /// The comparison itself. The caller holds the scan lock.
    fn scan(&self) -> Result<()> {
        self.settle_orphans()?;
        let known = snapshot::read(&self.dir);
        let mut found = self.walk(&known)?;
        found.sort_unstable_by_key(|found| found.order);
        let scan = self.table.next_scan();
        for batch in found.chunks(BATCH) {
            self.add(batch, scan)?;
        }
        self.forget_missing(scan)?;
        self.shrink()?;
        self.table.set_scan_done(true);
        log::info!("{} objects are on disk", found.len());
        Ok(())
    }

    fn walk(&self, known: &HashMap<ObjectKey, Known>) -> Result<Vec<Found>> {
        let mut work = Vec::new();
        for entry in sys::object::list(&self.dir)? {
            if !entry.is_dir {
                if is_temporary(&entry.name) {
                    self.sweep(&self.dir.join(&entry.name))?;
                }
                continue;
            }
            let Ok(namespace) = Namespace::from_hex(&entry.name) else { continue };
            let dir = self.dir.join(&entry.name);
            for entry in sys::object::list(&dir)? {
                let path = dir.join(&entry.name);
                if entry.is_dir && entry.name.len() == 2 {
                    work.push((namespace, path));
                } else if is_temporary(&entry.name) {
                    self.sweep(&path)?;
                }
            }
        }
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
        let (next, all) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        let one = || -> Result<()> {
            let mut found = Vec::new();
            while let Some((namespace, dir)) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
                if self.closing.load(Ordering::Acquire) {
                    return Err(Error::new(ErrorKind::Closed, "closed during the scan"));
                }
                self.walk_one(*namespace, dir, known, &mut found)?;
            }
            locked(&all).append(&mut found);
            Ok(())
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
            threads.into_iter().try_for_each(|thread| {
                let panicked = |_| Err(Error::new(ErrorKind::Io, "a thread of the scan failed"));
                thread.join().unwrap_or_else(panicked)
            })
        })?;
        Ok(std::mem::take(&mut *locked(&all)))
    }

    fn walk_one(
        &self,
        namespace: Namespace,
        dir: &Path,
        known: &HashMap<ObjectKey, Known>,
        found: &mut Vec<Found>,
    ) -> Result<()> {
        let Some(directory) = Directory::open(dir)? else { return Ok(()) };
        let mut page = Page::zeroed();
        for (name, is_file) in directory.names()? {
            if is_temporary(&name) {
                self.sweep(&dir.join(&name))?;
                continue;
            }
            let key = name.strip_suffix(".kv").and_then(|hex| ObjectKey::from_hex(hex).ok());
            let Some(key) = key else { continue };
            let listed = known.get(&key).filter(|known| known.namespace == namespace);
            // A file that is opened anyway says what it is without another look-up of its name.
            if listed.is_some() || !is_file {
                let Some(entry) = directory.stat(&name).filter(|entry| !entry.is_dir) else {
                    continue;
                };
                if let Some(object) = listed.and_then(|known| as_listed(known, &entry)) {
                    found.push(object);
                    continue;
                }
            }
            let judged = match directory.open_file(&name) {
                Ok(Some((file, entry))) => judge(namespace, key, &file, &entry, dir, &mut page)?,
                Ok(None) => continue,
                Err(error) if sys::file::is_unopenable(&error) => Err(Damage::Unopenable),
                Err(error) => return Err(error),
            };
            match judged {
                Ok(object) => found.push(object),
                Err(damage) => {
                    let path = dir.join(&name);
                    log::warn!("{}: {damage}; removed", path.display());
                    count(&self.counters.damaged[damage.index()]);
                    self.sweep(&path)?;
                }
            }
        }
        Ok(())
    }

    /// Removes a file that nobody is at.
    fn sweep(&self, path: &Path) -> Result<()> {
        if remove_idle(path)? == Fate::Removed {
            count(&self.counters.swept);
        }
        Ok(())
    }

    /// Makes records for files that have none, and corrects those that have a wrong length.
    fn add(&self, batch: &[Found], scan: u64) -> Result<()> {
        let mut numbers = Vec::with_capacity(batch.len());
        for found in batch {
            let number = self.pool.intern_namespace(&found.namespace, LOCK_WAIT.into())?;
            // Files go only where the pool can never name their namespace, not where it is busy.
            if number.is_none() && self.pool.namespace(LAST_NAMESPACE).is_none() {
                return Err(Error::new(ErrorKind::Timeout, "the writer lock is held"));
            }
            numbers.push(number);
        }
        let mut left: Vec<_> = batch.iter().zip(numbers).collect();
        while !left.is_empty() {
            let waiting = self.write_lock(LOCK_WAIT.into(), |writer| {
                left.retain(|(found, number)| {
                    !number.is_some_and(|number| self.add_one(writer, found, number, scan))
                });
                left.iter().filter(|(_, number)| number.is_some()).count()
            })?;
            let Some(waiting) = waiting else {
                return Err(Error::new(ErrorKind::Timeout, "the writer lock is held"));
            };
            // The table is full. The files come from the least recent to the most recent, so those
            // that have a record already go for those that have none, as for a new object.
            if waiting == 0 || self.make_room(0)? != Room::Made {
                break;
            }
            self.warn_evicting();
        }
        for (found, _) in left {
            // Without a record it would count for no limit and never be found.
            self.warn_evicting();
            self.sweep(&self.path(&found.namespace, &found.info.key))?;
        }
        Ok(())
    }

    fn warn_evicting(&self) {
        if !self.full.swap(true, Ordering::Relaxed) {
            log::warn!(
                "{} holds more objects than this pool can keep account of ({} in {} namespaces): \
                 the least recent go; a larger disk_capacity_bytes makes a larger table",
                self.dir.display(),
                self.pool.l2_records(),
                NAMESPACES_MAX
            );
        }
    }

    fn add_one(&self, writer: &mut Writer, found: &Found, number: u16, scan: u64) -> bool {
        if let Some((i, word)) = self.table.find(&found.info.key) {
            let record = self.table.read(i);
            let right = record.is_some_and(|record| record.file_bytes == found.file_bytes);
            if word.state() != State::Present || right {
                self.table.mark_seen(i, scan);
                return true;
            }
            self.table.finish(writer, i, word, Outcome::Free);
        }
        let owner = writer.pool().member();
        let made = self.table.make(writer, &found.info, number, found.file_bytes, owner);
        let Some((i, word)) = made else { return false };
        self.table.finish(writer, i, word, Outcome::InUse);
        self.table.mark_seen(i, scan);
        true
    }

    /// Frees the records of files that the scan did not see and that are not there.
    fn forget_missing(&self, scan: u64) -> Result<()> {
        let mut finished = Vec::new();
        for i in 0..self.table.high_water() {
            let Some(record) = self.table.read(i) else { continue };
            if record.word.state() != State::Present || self.table.seen(i) == scan {
                continue;
            }
            let there = match self.pool.namespace(record.namespace) {
                Some(namespace) => {
                    let path = self.path(&namespace, &record.info.key);
                    sys::file::inode_of(&path)?.is_some()
                }
                None => false,
            };
            if !there {
                let (record, word) = (i, record.word);
                finished.push(super::Finish { record, word, to: Outcome::Free });
            }
        }
        self.settle(finished);
        Ok(())
    }
}

/// The object that the list says a file is, if it has the length for that.
fn as_listed(known: &Known, entry: &Entry) -> Option<Found> {
    let file_bytes = super::format::file_bytes(known.info.payload_bytes)?;
    (file_bytes == entry.len).then(|| Found {
        namespace: known.namespace,
        info: known.info,
        file_bytes,
        order: (false, i64::try_from(known.order).unwrap_or(i64::MAX)),
    })
}

/// The object that a file is by its header, or what is wrong with it.
fn judge(
    namespace: Namespace,
    key: ObjectKey,
    file: &OwnedFd,
    entry: &Entry,
    dir: &Path,
    page: &mut Page,
) -> Result<std::result::Result<Found, Damage>> {
    let read = match sys::file::pread_full(file, &mut page.0, 0) {
        Ok(read) => read,
        Err(error) => {
            let error = Error::io(format!("reading {}", dir.join(&entry.name).display()), error);
            // One bad sector must not cost all that can be read.
            return if error.errno() == Some(libc::EIO) {
                log::warn!("{error}");
                Ok(unread(namespace, key, entry).ok_or(Damage::Truncated))
            } else {
                Err(error)
            };
        }
    };
    Ok(Header::parse(&page.0[..read]).and_then(|header| {
        header.check(&namespace, &key, entry.len)?;
        let order = (true, entry.modified);
        Ok(Found { namespace, info: header.info, file_bytes: entry.len, order })
    }))
}

/// An object whose header cannot be read now. It counts by its length, and whoever wants it reads it,
/// or finds that it is damaged.
fn unread(namespace: Namespace, key: ObjectKey, entry: &Entry) -> Option<Found> {
    let payload_bytes = entry.len.checked_sub(HEADER_BYTES)?;
    let info = ObjectInfo {
        key,
        parent: None,
        kind: 0,
        first_token: 0,
        last_token: 0,
        ranks: 1,
        payload_bytes,
    };
    let order = (true, entry.modified);
    let whole = super::format::file_bytes(payload_bytes) == Some(entry.len);
    whole.then_some(Found { namespace, info, file_bytes: entry.len, order })
}
