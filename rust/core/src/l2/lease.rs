//! Reading an object: an open file with a shared lock keeps it from eviction; the kernel frees the
//! lock when the process dies.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::format::{Header, Page};
use super::table::{Outcome, Snapshot, State};
use super::{Damage, DiskStore, Finish, LOCK_WAIT, Negative, count, locked};
use crate::{Error, Namespace, ObjectKey, Result, sys};

/// Damaged keys to remember; when more turn up, the first are forgotten and found again.
const NEGATIVES_MAX: usize = 64 << 10;

/// An object that stays on disk while this lives.
#[derive(Debug, Clone)]
pub struct DiskLease {
    /// The file; its lock goes with the last owner.
    pub file: Arc<OwnedFd>,
    /// Whether it was opened with `O_DIRECT`.
    pub direct: bool,
    /// What its record says it is.
    pub info: super::ObjectInfo,
    /// The object's namespace.
    pub namespace: Namespace,
    /// The namespace's number in the pool.
    pub namespace_id: u16,
    /// The file's inode.
    pub inode: u64,
    /// The file's length.
    pub len: u64,
}

impl DiskLease {
    /// Compares what the file's header says with what its record and its name say.
    pub fn check(&self, header: Header) -> Result<Header, Damage> {
        header.check(&self.namespace, &self.info.key, self.len)?;
        if header.info.payload_bytes == self.info.payload_bytes {
            Ok(header)
        } else {
            Err(Damage::Fields)
        }
    }
}

impl DiskStore {
    /// Opens an object for reading. `None`: it is not there, or about to go. Blocks on the disk.
    pub fn lease(&self, key: &ObjectKey) -> Result<Option<DiskLease>> {
        let Some(record) = self.present(key) else { return Ok(None) };
        let Some(namespace) = self.pool.namespace(record.namespace) else { return Ok(None) };
        let path = self.path(&namespace, key);
        let (file, direct) = match self.open_object(&path) {
            Ok(Some(opened)) => opened,
            Ok(None) => {
                count(&self.counters.missing);
                let (record, word) = (record.index, record.word);
                self.settle([Finish { record, word, to: Outcome::Free }]);
                return Ok(None);
            }
            Err(error) if sys::file::is_unopenable(&error) => {
                log::warn!("{error}");
                // 0 where not even that can be told; no inode has that number.
                let inode = sys::file::inode_of(&path).ok().flatten().map_or(0, |(_, inode)| inode);
                self.drop_object(key, &namespace, inode, Damage::Unopenable);
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        if !sys::lock::flock_shared(&file)? {
            count(&self.counters.missing);
            return Ok(None);
        }
        let stat = sys::file::stat(&file)?;
        let damaged = locked(&self.negative).get(key).map(|negative| negative.inode);
        if stat.nlink == 0 || damaged == Some(stat.inode) {
            count(&self.counters.missing);
            return Ok(None);
        }
        let lease = DiskLease {
            file: Arc::new(file),
            direct,
            info: record.info,
            namespace,
            namespace_id: record.namespace,
            inode: stat.inode,
            len: stat.len,
        };
        if stat.len != record.file_bytes {
            let longer = stat.len > record.file_bytes;
            self.quarantine(&lease, if longer { Damage::Longer } else { Damage::Truncated });
            return Ok(None);
        }
        count(&self.counters.leases);
        Ok(Some(lease))
    }

    /// Reads and checks the header. `None`: it is damaged, and the object is out of the store.
    pub fn read_header(&self, lease: &DiskLease) -> Result<Option<Header>> {
        let path = self.path(&lease.namespace, &lease.info.key);
        let verdict = header_of(&lease.file, &path)?.and_then(|header| lease.check(header));
        Ok(verdict.inspect_err(|damage| self.quarantine(lease, *damage)).ok())
    }

    /// Takes a damaged object out of the store: counted, and a miss until it is published anew.
    pub fn quarantine(&self, lease: &DiskLease, why: Damage) {
        self.drop_object(&lease.info.key, &lease.namespace, lease.inode, why);
    }

    fn drop_object(&self, key: &ObjectKey, namespace: &Namespace, inode: u64, why: Damage) {
        count(&self.counters.damaged[why.index()]);
        let path = self.path(namespace, key);
        log::warn!("{}: {why}; the object is dropped", path.display());
        let found = self.table.find(key);
        {
            let mut negative = locked(&self.negative);
            if negative.len() >= NEGATIVES_MAX {
                negative.clear();
            }
            negative.insert(*key, Negative { record: found, inode });
            self.negatives.store(negative.len(), Ordering::Relaxed);
        }
        let removed = self.write_lock(LOCK_WAIT.into(), |writer| {
            let Some((i, word)) = self.table.find(key) else { return Ok(()) };
            let same = matches!(sys::file::inode_of(&path)?, Some((_, now)) if now == inode);
            if same && word.state() == State::Present {
                sys::file::remove(&path)?;
                self.table.finish(writer, i, word, Outcome::Free);
            }
            Ok(())
        });
        match removed.and_then(|removed| removed.unwrap_or(Ok(()))) {
            Ok(()) => {}
            Err(error) => {
                count(&self.counters.errors);
                log::warn!("the damaged file stays for now: {error}");
            }
        }
    }

    /// The record of a present object. While others change the table, a reader can miss it.
    fn present(&self, key: &ObjectKey) -> Option<Snapshot> {
        for _ in 0..4 {
            let epoch = self.pool.epoch();
            let found = self.table.find(key).and_then(|(i, _)| self.table.read(i));
            let present = |record: &Snapshot| {
                record.info.key == *key && record.word.state() == State::Present
            };
            let found = found.filter(present);
            if found.is_some() || (epoch.is_multiple_of(2) && self.pool.epoch() == epoch) {
                return found;
            }
        }
        None
    }

    /// The file, and whether it was opened with `O_DIRECT`.
    fn open_object(&self, path: &Path) -> Result<Option<(OwnedFd, bool)>> {
        let direct = self.direct.load(Ordering::Relaxed);
        if direct {
            match sys::file::open_read(path, true) {
                Err(error) if error.errno() == Some(libc::EINVAL) => {}
                opened => return Ok(opened?.map(|file| (file, true))),
            }
        }
        let Some(file) = sys::file::open_read(path, false)? else { return Ok(None) };
        if direct && sys::file::stat(&file)?.is_file {
            // Of a directory it would say nothing about the file system.
            self.direct.store(false, Ordering::Relaxed);
        }
        Ok(Some((file, false)))
    }
}

/// The header of a file, or what is wrong with it.
pub(super) fn header_of(file: &OwnedFd, path: &Path) -> Result<Result<Header, Damage>> {
    let mut page = Page::zeroed();
    let read = sys::file::pread_full(file, &mut page.0, 0)
        .map_err(|error| Error::io(format!("reading {}", path.display()), error))?;
    Ok(Header::parse(&page.0[..read]))
}
