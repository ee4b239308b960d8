//! The shared-memory file of a node: who uses it, who may write, and where its tables lie.
//!
//! A pool is one file in memory, mapped by every process (each opening is a *member*) that serves
//! the same cache directory. It knows nothing of objects: [`crate::l1`] and [`crate::l2`] keep
//! their tables in its regions and register [`TableHooks`] to repair them.
//!
//! - Members prove their life by a kernel lock, never by a process id.
//! - [`Pool::write`] gives the writer lock; whoever dies under it leaves the epoch odd.
//! - Space in the data area is reserved piece by piece in the background.

pub mod index;
pub mod layout;
pub mod list;
mod stub;
mod writer;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use stub as sys;

pub use self::layout::{
    Geometry, L1_ENTRY_BYTES, L2_RECORD_BYTES, MEMBERS_MAX, NONE, Region, Table, TableRoot,
};
pub use self::writer::{TableHooks, Wait, Writer};

use self::index::Index;
use self::layout::{Header, MAGIC, NAMESPACES_MAX, NAMESPACES_OFFSET, NamespaceRecord, Sizes};
use self::sys::lock::LockFile;
use self::sys::map::Mapping;
use crate::{Error, ErrorKind, Namespace, Result};

/// Bytes of the lock file and what holding each means.
pub(crate) mod lock_byte {
    pub(crate) const WRITER: u64 = 1;
    pub(crate) const MEMBER_0: u64 = 16;
}

/// What a member does besides mapping the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Reserves the data area in the background.
    Engine,
    /// Maps and copies only.
    Worker,
}

/// How to open a pool.
#[derive(Debug, Clone)]
pub struct PoolOptions {
    /// Shared-memory root, a directory on a tmpfs.
    pub ram_dir: PathBuf,
    /// The directory whose pool this is; `None`: memory only, one pool for each user.
    pub cache_dir: Option<PathBuf>,
    /// Bytes of the whole file; 0: metadata and `transit_bytes` of data.
    pub cpu_bytes: u64,
    /// This member's limit for the disk tier.
    pub disk_capacity_bytes: Option<u64>,
    /// False: a pool that no other process sees; `cache_dir` is then locked for it alone.
    pub shared: bool,
    /// Entries of the memory table; `None`: by `cpu_bytes`.
    pub l1_entries: Option<u32>,
    /// Records of the disk table; `None`: by `disk_capacity_bytes` and `cpu_bytes`.
    pub l2_records: Option<u32>,
    /// Data bytes where `cpu_bytes` is 0.
    pub transit_bytes: u64,
    /// What this member does.
    pub role: Role,
}

impl PoolOptions {
    /// A private pool of `cpu_bytes` in memory only.
    pub fn private(cpu_bytes: u64) -> Self {
        Self {
            ram_dir: PathBuf::from("/dev/shm/lakecache"),
            cache_dir: None,
            cpu_bytes,
            disk_capacity_bytes: None,
            shared: false,
            l1_entries: None,
            l2_records: None,
            transit_bytes: 256 << 20,
            role: Role::Engine,
        }
    }
}

/// One opening of a pool: a member.
pub struct Pool {
    mapping: Arc<Mapping>,
    geometry: Geometry,
    id: [u8; 16],
    member: u8,
    /// Proof of life; its file is registered with every ring, so that the kernel keeps it locked
    /// until the last read into the arena has landed.
    life: LockFile,
    /// Short locks: free at once when the process dies.
    ctl: LockFile,
    turn: writer::Turn,
    hooks: RwLock<Vec<Arc<dyn TableHooks>>>,
    fork_generation: u64,
    closed: AtomicBool,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool")
            .field("member", &self.member)
            .field("geometry", &self.geometry)
            .finish_non_exhaustive()
    }
}

impl Pool {
    /// Joins the pool that `options` name, or creates it.
    pub fn open(options: PoolOptions) -> Result<Arc<Self>> {
        let geometry = Geometry::new(&Sizes {
            cpu_bytes: options.cpu_bytes,
            transit_bytes: options.transit_bytes,
            l1_entries: options.l1_entries,
            l2_records: options.l2_records,
            disk_capacity_bytes: options.disk_capacity_bytes,
            disk: options.cache_dir.is_some() || options.l2_records.is_some(),
        })?;
        let fd = sys::file::memfd("lakecache-pool")?;
        use std::os::fd::AsFd;
        sys::file::set_len(fd.as_fd(), geometry.file_bytes)?;
        sys::file::allocate(fd.as_fd(), 0, geometry.file_bytes)?;
        let mapping = Arc::new(Mapping::of(fd.as_fd(), geometry.file_bytes)?);
        let id = sys::file::random_bytes();
        let name = std::env::temp_dir().join(format!(".lakecache-{:x}", u128::from_ne_bytes(id)));
        let (life, ctl) = (LockFile::open(&name)?, LockFile::open(&name)?);
        std::fs::remove_file(&name).map_err(|e| Error::io("unlink", e))?;
        let pool = Self {
            mapping,
            geometry,
            id,
            member: 0,
            life,
            ctl,
            turn: writer::Turn::default(),
            hooks: RwLock::default(),
            fork_generation: sys::fork::generation(),
            closed: AtomicBool::new(false),
        };
        pool.root(Table::L1).clear();
        pool.root(Table::L2).clear();
        pool.life.try_exclusive(lock_byte::MEMBER_0)?;
        for piece in 0..geometry.pieces {
            pool.piece_word(piece).store(1, Ordering::Release);
        }
        pool.header().magic.store(MAGIC, Ordering::Release);
        Ok(Arc::new(pool))
    }

    /// The pool's random id.
    pub fn id(&self) -> [u8; 16] {
        self.id
    }

    /// This member's number.
    pub fn member(&self) -> u8 {
        self.member
    }

    /// The description whose lock proves this member's life.
    pub fn life_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.life.as_fd()
    }

    /// The whole file, mapped.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Whether `member` lives, or may still have reads under way into the arena.
    pub fn is_alive(&self, member: u8) -> Result<bool> {
        if member == self.member {
            return Ok(!self.closed.load(Ordering::Relaxed));
        }
        self.ctl.is_held_elsewhere(lock_byte::MEMBER_0 + u64::from(member))
    }

    /// Odd while a writer changes the tables; another number after every change.
    pub fn epoch(&self) -> u64 {
        self.header().epoch.0.load(Ordering::SeqCst)
    }

    /// The next tick of the pool's clock.
    pub fn clock(&self) -> u64 {
        self.header().clock.0.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The address and length of a region.
    pub fn region(&self, region: Region) -> (*mut u8, u64) {
        let (offset, bytes) = self.geometry.region(region);
        (self.mapping.at(offset, bytes), bytes)
    }

    /// The list ends, counts and totals of a table.
    pub fn root(&self, table: Table) -> &TableRoot {
        &self.header().roots[table as usize]
    }

    /// The hash index of a table.
    pub fn index(&self, table: Table) -> Index {
        let (region, slots) = match table {
            Table::L1 => (Region::L1Index, self.geometry.l1_slots),
            Table::L2 => (Region::L2Index, self.geometry.l2_slots),
        };
        Index::mapped(&self.mapping, self.geometry.region(region).0, slots)
    }

    /// Sizes and places of everything in the file.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Number of L1 entries.
    pub fn l1_entries(&self) -> u32 {
        self.geometry.l1_entries
    }

    /// Number of L2 records; 0 without a cache directory.
    pub fn l2_records(&self) -> u32 {
        self.geometry.l2_records
    }

    /// Offset of the data area in the mapping.
    pub fn data_offset(&self) -> u64 {
        self.geometry.data_offset
    }

    /// Pages of the data area.
    pub fn data_pages(&self) -> u64 {
        self.geometry.data_pages
    }

    /// Pages of a piece; the last one may be shorter.
    pub fn piece_pages(&self) -> u64 {
        self.geometry.piece_pages
    }

    /// Number of pieces.
    pub fn pieces(&self) -> u32 {
        self.geometry.pieces
    }

    /// Whether a piece has memory of its own. Extents may only come from such pieces.
    pub fn piece_reserved(&self, piece: u32) -> bool {
        self.piece_word(piece).load(Ordering::Acquire) & 1 == 1
    }

    fn piece_word(&self, piece: u32) -> &AtomicU64 {
        assert!(piece < self.geometry.pieces, "piece {piece} of {}", self.geometry.pieces);
        let (offset, _) = self.geometry.region(Region::Pieces);
        // SAFETY: within the region, aligned, atomic, and mapped as long as `self`.
        unsafe { &*self.mapping.at(offset + u64::from(piece) * 8, 8).cast() }
    }

    /// Registers a table. Hooks should not hold the pool strongly: they get it from the writer.
    pub fn add_hooks(&self, hooks: Arc<dyn TableHooks>) {
        self.hooks.write().unwrap_or_else(PoisonError::into_inner).push(hooks);
    }

    fn hooks(&self) -> Vec<Arc<dyn TableHooks>> {
        self.hooks.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The smallest limit of the live members for the disk tier.
    pub fn disk_capacity(&self) -> Option<u64> {
        None
    }

    /// Releases what dead members held.
    pub fn reap_dead(&self) {}

    /// The number of a namespace, given to it now if it has none. `None`: the table is full, or the
    /// writer lock is not to be had soon.
    pub fn intern_namespace(&self, namespace: &Namespace) -> Result<Option<u16>> {
        if let Some(id) = self.find_namespace(namespace) {
            return Ok(Some(id));
        }
        let wait = Wait::Within(std::time::Duration::from_secs(2));
        let added = self.write(wait, |_| {
            if let Some(id) = self.find_namespace(namespace) {
                return Some(id);
            }
            let count = &self.header().namespaces;
            let id = u16::try_from(count.load(Ordering::Relaxed)).ok()?;
            let record = self.namespace_record(id)?;
            for (word, bytes) in record.digest.iter().zip(namespace.0.as_chunks().0) {
                word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
            }
            count.store(u32::from(id) + 1, Ordering::Release);
            Some(id)
        })?;
        Ok(added.flatten())
    }

    /// The namespace with number `id`.
    pub fn namespace(&self, id: u16) -> Option<Namespace> {
        let count = self.header().namespaces.load(Ordering::Acquire);
        let record = self.namespace_record(id).filter(|_| u32::from(id) < count)?;
        let mut digest = [0; 32];
        for (bytes, word) in digest.as_chunks_mut().0.iter_mut().zip(&record.digest) {
            *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
        }
        Some(Namespace(digest))
    }

    fn find_namespace(&self, namespace: &Namespace) -> Option<u16> {
        let count = self.header().namespaces.load(Ordering::Acquire);
        let mut ids = 0..u16::try_from(count).unwrap_or(u16::MAX);
        ids.find(|&id| self.namespace(id).as_ref() == Some(namespace))
    }

    fn namespace_record(&self, id: u16) -> Option<&NamespaceRecord> {
        if usize::from(id) >= NAMESPACES_MAX {
            return None;
        }
        let size = size_of::<NamespaceRecord>() as u64;
        let offset = NAMESPACES_OFFSET + u64::from(id) * size;
        // SAFETY: within the namespace table, aligned, atomic, and mapped as long as `self`.
        Some(unsafe { &*self.mapping.at(offset, size).cast() })
    }

    fn header(&self) -> &Header {
        // SAFETY: the mapping is at least a header long and page-aligned; all fields that change
        // after publication are atomics.
        unsafe { &*self.mapping.at(0, size_of::<Header>() as u64).cast() }
    }

    fn check_usable(&self) -> Result<()> {
        if sys::fork::generation() != self.fork_generation {
            return Err(Error::new(
                ErrorKind::Forked,
                "the pool was opened before this process was forked: open it again here",
            ));
        }
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, "the pool is closed"));
        }
        Ok(())
    }
}
