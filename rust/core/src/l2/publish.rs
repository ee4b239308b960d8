//! Storing an object: reserve its bytes, write a file without a name, name it, count it present.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use super::evict::Room;
use super::format::{Header, Page, file_bytes};
use super::lease::header_of;
use super::table::{Begin, Outcome, Word};
use super::{DiskStore, Durability, Finish, LOCK_WAIT, ObjectInfo, count, locked, make_in};
use crate::units::PAGE_BYTES;
use crate::{Error, ErrorKind, Namespace, ObjectKey, Result, sys};

/// Times that a writer makes room and finds it taken by another.
const ROUNDS: usize = 64;
/// Objects that one process stores between two savings of the list.
const SNAPSHOT_EVERY: u64 = 4096;

/// Memory that holds a part of a payload.
#[derive(Debug, Clone, Copy)]
pub struct Segment {
    address: *const u8,
    bytes: u64,
}

// SAFETY: an address and a length; whoever made it vouched for them wherever it is used.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// A part of a payload. Page-aligned ones are written straight from where they are.
    ///
    /// # Safety
    /// The bytes must stay readable and unchanged for as long as the segment is in use.
    pub unsafe fn new(address: *const u8, bytes: u64) -> Self {
        Self { address, bytes }
    }
}

/// Why an object was not stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoRoom {
    /// It is larger than the limit.
    TooLarge,
    /// Everything that could go is being read.
    Leased,
    /// The disk is full, and nothing of ours can go.
    DiskFull,
    /// Others hold the lock, or take the room first.
    Busy,
    /// The disk failed a moment ago.
    Degraded,
}

/// What became of an object that was to be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// It is on disk now.
    Stored,
    /// It was on disk, or another writer is at it.
    Exists,
    /// It is not stored.
    NoRoom(NoRoom),
    /// The directory is not known yet: try again later, or not at all.
    ScanPending,
}

/// What the file is made of.
struct Content<'a> {
    header: &'a Header,
    page: Box<Page>,
    segments: &'a [Segment],
}

enum Linked {
    New,
    Adopted,
}

impl DiskStore {
    /// Stores an object, evicting others where the limit asks for it. Errors are system calls that
    /// failed; writes then rest for a while.
    pub fn write(
        &self,
        info: &ObjectInfo,
        namespace: &Namespace,
        checksum: u64,
        segments: &[Segment],
    ) -> Result<Written> {
        let given: u64 = segments.iter().map(|segment| segment.bytes).sum();
        let whole = info.ranks > 0 && info.payload_bytes.is_multiple_of(info.ranks.into());
        if given != info.payload_bytes || !whole || info.first_token > info.last_token {
            let message = format!("an object with {given} bytes of payload says {info:?}");
            return Err(Error::new(ErrorKind::Config, message));
        }
        let written = self.write_checked(info, namespace, checksum, segments);
        match &written {
            Ok(Written::Stored) if self.health.worked() => log::info!("the disk works again"),
            Ok(_) => {}
            Err(error) => {
                count(&self.counters.errors);
                self.health.failed();
                log::warn!("objects are not stored for a while: {error}");
            }
        }
        written
    }

    fn write_checked(
        &self,
        info: &ObjectInfo,
        namespace: &Namespace,
        checksum: u64,
        segments: &[Segment],
    ) -> Result<Written> {
        if !self.scan_done() {
            return Ok(Written::ScanPending);
        }
        if self.health.rests() {
            return Ok(Written::NoRoom(NoRoom::Degraded));
        }
        self.check_in_place()?;
        let Some(file_bytes) = file_bytes(info.payload_bytes) else {
            return Ok(Written::NoRoom(NoRoom::TooLarge));
        };
        let Some(number) = self.pool.intern_namespace(namespace, LOCK_WAIT.into())? else {
            return Ok(Written::NoRoom(NoRoom::Busy));
        };
        self.settle_orphans()?;
        let header = Header { namespace: *namespace, info: *info, payload_checksum: checksum };
        let content = Content { header: &header, page: header.encode(), segments };
        for last_try in [false, true] {
            let (record, word) = match self.reserve(info, number, file_bytes)? {
                Ok(reserved) => reserved,
                Err(refused) => return Ok(refused),
            };
            let linked = self.make_file(&content);
            let to = if linked.is_ok() { Outcome::Present } else { Outcome::Free };
            self.settle([Finish { record, word, to }]);
            match linked {
                Ok(Linked::New) => {
                    self.forget_negative(&info.key);
                    self.count_stored();
                    return Ok(Written::Stored);
                }
                Ok(Linked::Adopted) => return Ok(Written::Exists),
                Err(error) if error.kind() == ErrorKind::NoSpace && !last_try => {
                    if !matches!(self.make_room(file_bytes)?, Room::Made) {
                        return Ok(Written::NoRoom(NoRoom::DiskFull));
                    }
                }
                Err(error) if error.kind() == ErrorKind::NoSpace => {
                    return Ok(Written::NoRoom(NoRoom::DiskFull));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Written::NoRoom(NoRoom::DiskFull))
    }

    /// Refuses to write where the directory was taken away: whoever uses what is there now counts other
    /// bytes.
    pub(super) fn check_in_place(&self) -> Result<()> {
        if self.lock.is_in_place()? && self.pool.is_in_place()? {
            return Ok(());
        }
        let dir = self.dir.display();
        let text = format!("{dir} was removed or replaced while in use: restart what uses it");
        Err(Error::new(ErrorKind::Unavailable, text))
    }

    /// Counts a new object, and saves the list now and then.
    fn count_stored(&self) {
        let stored = self.counters.stored.fetch_add(1, Ordering::Relaxed) + 1;
        if stored.is_multiple_of(SNAPSHOT_EVERY)
            && let Err(error) = self.snapshot()
        {
            log::debug!("the list of stored objects was not saved: {error}");
        }
    }

    /// A WRITING record that counts `file_bytes`, or why there is none.
    fn reserve(
        &self,
        info: &ObjectInfo,
        namespace: u16,
        file_bytes: u64,
    ) -> Result<Result<(u32, Word), Written>> {
        let limit = self.pool.disk_capacity().unwrap_or(u64::MAX);
        let refuse = |why| Ok(Err(Written::NoRoom(why)));
        if file_bytes > limit {
            return refuse(NoRoom::TooLarge);
        }
        for _ in 0..ROUNDS {
            let free = sys::limits::fs_space(&self.dir)?.free;
            let wanted = self.options.reserve_bytes.saturating_add(file_bytes);
            if free < wanted {
                match self.make_room(wanted - free)? {
                    Room::Made => continue,
                    _ => return refuse(NoRoom::DiskFull),
                }
            }
            let begun = self.write_lock(LOCK_WAIT.into(), |writer| {
                self.table.begin(writer, info, namespace, file_bytes, limit)
            })?;
            let bytes = match begun {
                Some(Begin::Reserved(record, word)) => return Ok(Ok((record, word))),
                Some(Begin::Exists) => return Ok(Err(Written::Exists)),
                Some(Begin::Evict(bytes)) => bytes,
                Some(Begin::Busy) | None => return refuse(NoRoom::Busy),
            };
            match self.make_room(bytes)? {
                Room::Made => {}
                Room::Leased => return refuse(NoRoom::Leased),
                Room::Nothing => return refuse(NoRoom::Busy),
            }
        }
        refuse(NoRoom::Busy)
    }

    fn make_file(&self, content: &Content) -> Result<Linked> {
        let path = self.path(&content.header.namespace, &content.header.info.key);
        let dir = path.parent().unwrap_or(&self.dir);
        let aligned = content
            .segments
            .iter()
            .all(|segment| segment.address.addr().is_multiple_of(size_of::<Page>()));
        let mut direct = aligned && self.direct.load(Ordering::Relaxed);
        loop {
            match make_in(dir, || self.attempt(content, &path, dir, direct)) {
                Err(error) if direct && error.errno() == Some(libc::EINVAL) => {
                    log::info!("{} takes no direct writes: going on with buffers", dir.display());
                    direct = false;
                }
                other => return other,
            }
        }
    }

    fn attempt(&self, content: &Content, path: &Path, dir: &Path, direct: bool) -> Result<Linked> {
        let failed = |error| Error::io(format!("writing {}", path.display()), error);
        let file = Temporary::make(dir, &content.header.info.key, direct)?;
        write_content(&file.file, content).map_err(failed)?;
        if self.options.durability == Durability::Data {
            sys::object::sync_data(&file.file).map_err(failed)?;
        }
        if file.publish(path)? {
            return Ok(Linked::New);
        }
        if self.is_same(content.header, path)? {
            return Ok(Linked::Adopted);
        }
        // What has the name is not this object: nothing else could ever be stored under it.
        log::warn!("{} was not the object of its name: replaced", path.display());
        sys::file::remove(path)?;
        if file.publish(path)? {
            return Ok(Linked::New);
        }
        let message = format!("{} keeps coming back", path.display());
        Err(Error::new(ErrorKind::Io, message))
    }

    /// Whether the file of that name is the object that `header` describes.
    fn is_same(&self, header: &Header, path: &Path) -> Result<bool> {
        let file = match sys::file::open_read(path, false) {
            Ok(Some(file)) => file,
            Ok(None) => return Ok(false),
            Err(error) if sys::file::is_unopenable(&error) => return Ok(false),
            Err(error) => return Err(error),
        };
        let stat = sys::file::stat(&file)?;
        if !stat.is_file {
            return Ok(false);
        }
        let damaged = locked(&self.negative).get(&header.info.key).map(|negative| negative.inode);
        if damaged == Some(stat.inode) {
            return Ok(false);
        }
        let found = header_of(&file, path)?;
        let fits =
            |found: &Header| found.check(&header.namespace, &header.info.key, stat.len).is_ok();
        Ok(found.is_ok_and(|found| fits(&found) && found == *header))
    }

    pub(super) fn forget_negative(&self, key: &ObjectKey) {
        if self.negatives.load(Ordering::Relaxed) > 0 {
            let mut negative = locked(&self.negative);
            negative.remove(key);
            self.negatives.store(negative.len(), Ordering::Relaxed);
        }
    }
}

fn write_content(file: &OwnedFd, content: &Content) -> io::Result<()> {
    let mut parts = vec![(content.page.0.as_ptr(), content.page.0.len())];
    let mut left = content.header.info.payload_bytes;
    for segment in content.segments {
        parts.push((segment.address, usize::try_from(segment.bytes).map_err(io::Error::other)?));
        left -= segment.bytes;
    }
    debug_assert_eq!(left, 0);
    // The tail goes through a page of its own: what lies behind it in memory is another object's.
    let mut tail = Page::zeroed();
    let tail_bytes = content.header.info.payload_bytes % PAGE_BYTES;
    if tail_bytes > 0 {
        cut_tail(&mut parts, &mut tail, usize::try_from(tail_bytes).map_err(io::Error::other)?);
        parts.push((tail.0.as_ptr(), tail.0.len()));
    }
    // SAFETY: the pages are alive; the makers of the segments vouched for them.
    unsafe { sys::object::pwritev_all(file, &parts, 0) }
}

/// Moves the last bytes of `parts` into `tail`.
fn cut_tail(parts: &mut Vec<(*const u8, usize)>, tail: &mut Page, mut bytes: usize) {
    while bytes > 0 {
        let Some((address, length)) = parts.pop() else { return };
        let taken = bytes.min(length);
        let kept = length - taken;
        // SAFETY: within the part, whose maker vouched for it.
        let from = unsafe { address.add(kept) };
        let to = tail.0[bytes - taken..bytes].as_mut_ptr();
        // SAFETY: `taken` bytes on both sides, of which one is ours alone.
        unsafe { std::ptr::copy_nonoverlapping(from, to, taken) };
        if kept > 0 {
            parts.push((address, kept));
        }
        bytes -= taken;
    }
}

/// A file that vanishes unless it is published: without a name, else under a temporary one.
struct Temporary {
    file: OwnedFd,
    name: Option<PathBuf>,
}

/// How the names of temporaries of `key` begin.
pub(super) fn temporary_prefix(key: &ObjectKey) -> String {
    format!(".{}.", key.hex())
}

impl Temporary {
    fn make(dir: &Path, key: &ObjectKey, direct: bool) -> Result<Self> {
        if let Some(file) = sys::file::unnamed_in(dir, direct)? {
            return Ok(Self { file, name: None });
        }
        Self::named(dir, key, direct)
    }

    fn named(dir: &Path, key: &ObjectKey, direct: bool) -> Result<Self> {
        let random = u64::from_le_bytes(sys::file::random_bytes());
        let name = dir.join(format!("{}{random:016x}.tmp", temporary_prefix(key)));
        let file = sys::object::create_new(&name, direct)
            .map_err(|error| Error::io(format!("making {}", name.display()), error))?;
        // Shared, as leases are: it tells a sweep that the file is being written.
        sys::lock::flock_shared(&file)?;
        Ok(Self { file, name: Some(name) })
    }

    fn publish(&self, path: &Path) -> Result<bool> {
        match &self.name {
            None => sys::file::link_fd(self.file.as_fd(), path),
            Some(name) => sys::object::rename_new(name, path),
        }
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Some(name) = &self.name
            && let Err(error) = sys::file::unlink(name)
        {
            log::warn!("a temporary file is left for the next scan: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_temporary_is_published_or_vanishes() {
        let dir = tempfile::tempdir().unwrap();
        let key = ObjectKey([5; 32]);
        let path = dir.path().join("object.kv");
        for expected in [true, false] {
            let file = Temporary::named(dir.path(), &key, false).unwrap();
            assert_eq!(sys::object::list(dir.path()).unwrap().len(), 2 - usize::from(expected));
            assert_eq!(file.publish(&path).unwrap(), expected);
            drop(file);
            assert_eq!(sys::object::list(dir.path()).unwrap().len(), 1);
        }
    }

    #[test]
    fn a_tail_over_several_parts_keeps_its_order() {
        let bytes: Vec<u8> = (0..20).collect();
        let mut parts =
            vec![(bytes.as_ptr(), 10), (bytes[10..].as_ptr(), 4), (bytes[14..].as_ptr(), 6)];
        let mut tail = Page::zeroed();
        cut_tail(&mut parts, &mut tail, 13);
        assert_eq!(parts, [(bytes.as_ptr(), 7)]);
        assert_eq!(tail.0[..13], bytes[7..]);
        assert_eq!(tail.0[13], 0);
    }
}
