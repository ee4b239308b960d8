//! The shared-memory file of a node: who uses it, who may write, and where its tables lie.
//!
//! A pool is one file in memory, mapped by every process (each opening is a *member*) that serves
//! the same cache directory. It knows nothing of objects: [`crate::l1`] and [`crate::l2`] keep
//! their tables in its regions and register [`TableHooks`] to repair them.
//!
//! - Members prove their life by a kernel lock, never by a process id. A dead one's memory is given
//!   away when nothing can land in it any more ([`death`]).
//! - [`Pool::write`] gives the writer lock; whoever dies under it leaves the epoch odd.
//! - Space in the data area is reserved piece by piece in the background.

mod death;
pub mod index;
mod join;
pub mod layout;
pub mod list;
mod members;
mod outside;
mod place;
mod private;
mod reserve;
mod sweep;
mod writer;

use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::JoinHandle;

pub use self::join::BeforeRecreate;
pub use self::layout::{
    Geometry, L1_ENTRY_BYTES, L2_RECORD_BYTES, MEMBERS_MAX, NONE, Region, Table, TableRoot,
};
pub use self::outside::{MemberView, PoolView, Unused};
pub use self::writer::{TableHooks, Wait, Writer};

use self::index::Index;
use self::layout::{Header, NAMESPACES_MAX, NAMESPACES_OFFSET, NamespaceRecord};
use crate::sys::lock::LockFile;
use crate::sys::map::Mapping;
use crate::units::PAGE_BYTES;
use crate::{Error, ErrorKind, Namespace, Result, sys};

/// Bytes of the lock file and what holding each means.
pub(crate) mod lock_byte {
    /// Exclusive while joining, creating, removing.
    pub(crate) const JOIN: u64 = 0;
    pub(crate) const WRITER: u64 = 1;
    pub(crate) const RESERVER: u64 = 2;
    /// Shared by every member for its life; exclusive for a private pool.
    pub(crate) const USE: u64 = 3;
    /// Byte 16 + i: exclusive for the life of member i.
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
    core: Arc<Core>,
    id: [u8; 16],
    member: u8,
    turn: writer::Turn,
    hooks: RwLock<Vec<Arc<dyn TableHooks>>>,
    closed: AtomicBool,
    /// Members that died before this one joined have not been reaped by it yet.
    reap_due: AtomicBool,
    deaths: death::Deaths,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What the background thread shares with the pool that waits for its end.
struct Core {
    mapping: Arc<Mapping>,
    geometry: Geometry,
    /// `None`: private.
    path: Option<PathBuf>,
    files: ManuallyDrop<Files>,
    fork_generation: u64,
    reserver: reserve::Reserver,
}

/// What a member keeps open. The forked child of a member must not close it again.
struct Files {
    _in_child: sys::fork::Guard,
    /// With a shared `flock`, against sweeps.
    file: File,
    /// Proof of life; its file is registered with every ring, so that the kernel keeps it locked
    /// until the last read into the arena has landed.
    life: LockFile,
    /// Short locks: free at once when the process dies.
    ctl: LockFile,
}

/// Numbers for operators.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolGauges {
    /// Bytes of the whole file.
    pub file_bytes: u64,
    /// Of these, what the tables take.
    pub metadata_bytes: u64,
    /// Of these, what objects can take.
    pub data_bytes: u64,
    /// Of the data bytes, those that have memory.
    pub reserved_bytes: u64,
    /// Whether the next piece is put off for lack of memory.
    pub reservation_put_off: bool,
    /// How often this member put a piece off.
    pub put_offs: u64,
    /// Members with a record, dead ones that are not reaped yet included.
    pub members: u32,
    /// Rebuilds after a writer's death, since the pool was made.
    pub recoveries: u64,
    /// Dead members reaped since then.
    pub reaped: u64,
}

/// The parts of an attached pool: mapping, geometry, id, member number, open files.
type Parts = (Arc<Mapping>, Geometry, [u8; 16], u8, ManuallyDrop<Files>);

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool")
            .field("member", &self.member)
            .field("geometry", &self.core.geometry)
            .finish_non_exhaustive()
    }
}

impl Pool {
    fn assemble(parts: Parts, path: Option<PathBuf>) -> Arc<Self> {
        let (mapping, geometry, id, member, files) = parts;
        let fork_generation = sys::fork::generation();
        let reserver = reserve::Reserver::default();
        Arc::new(Self {
            core: Arc::new(Core { mapping, geometry, path, files, fork_generation, reserver }),
            id,
            member,
            turn: writer::Turn::default(),
            hooks: RwLock::default(),
            closed: AtomicBool::new(false),
            reap_due: AtomicBool::new(true),
            deaths: death::Deaths::default(),
            thread: Mutex::default(),
        })
    }

    /// The pool's random id.
    pub fn id(&self) -> [u8; 16] {
        self.id
    }

    /// The id as directories are named by it: 32 hexadecimal digits.
    pub fn id_hex(&self) -> String {
        place::hex16(&self.id)
    }

    /// Where the pool's file lies; `None`: private.
    pub fn path(&self) -> Option<&Path> {
        self.core.path.as_deref()
    }

    /// This member's number.
    pub fn member(&self) -> u8 {
        self.member
    }

    /// The description whose lock proves this member's life.
    pub fn life_fd(&self) -> BorrowedFd<'_> {
        self.core.files.life.as_fd()
    }

    /// Whether the lock file has its name still. Without it others do not see that we live.
    pub(crate) fn is_in_place(&self) -> Result<bool> {
        self.core.files.life.is_in_place()
    }

    /// The whole file, mapped.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.core.mapping
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
        let (offset, bytes) = self.core.geometry.region(region);
        (self.core.mapping.at(offset, bytes), bytes)
    }

    /// The list ends, counts and totals of a table.
    pub fn root(&self, table: Table) -> &TableRoot {
        &self.header().roots[table as usize]
    }

    /// The hash index of a table.
    pub fn index(&self, table: Table) -> Index {
        let (region, slots) = match table {
            Table::L1 => (Region::L1Index, self.core.geometry.l1_slots),
            Table::L2 => (Region::L2Index, self.core.geometry.l2_slots),
        };
        Index::mapped(&self.core.mapping, self.core.geometry.region(region).0, slots)
    }

    /// Number of L1 entries.
    pub fn l1_entries(&self) -> u32 {
        self.core.geometry.l1_entries
    }

    /// Number of L2 records; 0 without a cache directory.
    pub fn l2_records(&self) -> u32 {
        self.core.geometry.l2_records
    }

    /// Offset of the data area in the mapping.
    pub fn data_offset(&self) -> u64 {
        self.core.geometry.data_offset
    }

    /// Pages of the data area.
    pub fn data_pages(&self) -> u64 {
        self.core.geometry.data_pages
    }

    /// Pages of a piece; the last one may be shorter.
    pub fn piece_pages(&self) -> u64 {
        self.core.geometry.piece_pages
    }

    /// Number of pieces.
    pub fn pieces(&self) -> u32 {
        self.core.geometry.pieces
    }

    /// The address and length of a piece. No extent crosses from one to another.
    pub fn piece(&self, piece: u32) -> (*mut u8, u64) {
        let (offset, bytes) = self.core.geometry.piece(piece);
        (self.core.mapping.at(offset, bytes), bytes)
    }

    /// Whether a piece has memory of its own. Extents may only come from such pieces.
    pub fn piece_reserved(&self, piece: u32) -> bool {
        self.core.piece_reserved(piece)
    }

    /// Registers a table. Hooks should not hold the pool strongly: they get it from the writer.
    pub fn add_hooks(&self, hooks: Arc<dyn TableHooks>) {
        self.hooks.write().unwrap_or_else(PoisonError::into_inner).push(hooks);
    }

    fn hooks(&self) -> Vec<Arc<dyn TableHooks>> {
        self.hooks.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn clear_hooks(&self) {
        self.hooks.write().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Numbers for operators.
    pub fn gauges(&self) -> PoolGauges {
        let (reservation_put_off, put_offs) = self.core.reserver.put_offs();
        PoolGauges {
            file_bytes: self.core.geometry.file_bytes,
            metadata_bytes: self.core.geometry.data_offset,
            data_bytes: self.core.geometry.data_pages * PAGE_BYTES,
            reserved_bytes: self.reserved_bytes(),
            reservation_put_off,
            put_offs,
            members: u32::try_from(self.used_members().count()).unwrap_or(u32::MAX),
            recoveries: self.header().recoveries.load(Ordering::Relaxed),
            reaped: self.header().reaped.load(Ordering::Relaxed),
        }
    }

    /// The number of a namespace, given to it now if it has none. `None`: the table is full, or the
    /// writer lock is not to be had within `wait`.
    pub fn intern_namespace(&self, namespace: &Namespace, wait: Wait) -> Result<Option<u16>> {
        if let Some(id) = self.find_namespace(namespace) {
            return Ok(Some(id));
        }
        let added = self.write(wait, |_| {
            if let Some(id) = self.find_namespace(namespace) {
                return Some(id);
            }
            let count = &self.header().namespaces;
            let id = u16::try_from(count.load(Ordering::Relaxed)).ok()?;
            let record = self.namespace_record(id)?;
            namespace.store(&record.digest);
            count.store(u32::from(id) + 1, Ordering::Release);
            Some(id)
        })?;
        Ok(added.flatten())
    }

    /// The namespace with number `id`.
    pub fn namespace(&self, id: u16) -> Option<Namespace> {
        let count = self.header().namespaces.load(Ordering::Acquire);
        let record = self.namespace_record(id).filter(|_| u32::from(id) < count)?;
        Some(Namespace::load(&record.digest))
    }

    /// Keeps the objects of namespace `id` off the disk, for as long as the pool exists.
    pub fn set_memory_only(&self, id: u16) {
        if let Some(record) = self.namespace_record(id) {
            record.memory_only.store(1, Ordering::SeqCst);
        }
    }

    /// Whether the objects of namespace `id` must never reach the disk.
    pub fn is_memory_only(&self, id: u16) -> bool {
        self.namespace_record(id)
            .is_some_and(|record| record.memory_only.load(Ordering::SeqCst) != 0)
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
        Some(unsafe { &*self.core.mapping.at(offset, size).cast() })
    }

    fn header(&self) -> &Header {
        Header::of(&self.core.mapping)
    }

    /// Whether this is the copy that a fork made: its member is the parent.
    pub fn is_forked_child(&self) -> bool {
        self.core.is_forked_child()
    }

    /// Refuses a closed pool, and a forked child's copy.
    pub(crate) fn check_usable(&self) -> Result<()> {
        if self.core.is_forked_child() {
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

impl Core {
    fn is_forked_child(&self) -> bool {
        sys::fork::generation() != self.fork_generation
    }

    fn piece_reserved(&self, piece: u32) -> bool {
        piece_word(&self.mapping, &self.geometry, piece).load(Ordering::Acquire) & 1 == 1
    }
}

fn piece_word<'a>(mapping: &'a Mapping, geometry: &Geometry, piece: u32) -> &'a AtomicU64 {
    assert!(piece < geometry.pieces, "piece {piece} of {}", geometry.pieces);
    let (offset, _) = geometry.region(Region::Pieces);
    // SAFETY: within the region, aligned, atomic, and borrowed from the mapping.
    unsafe { &*mapping.at(offset + u64::from(piece) * 8, 8).cast() }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // A forked child has no lock to give back.
        if !self.core.is_forked_child() {
            if self.has_gpu_copies() {
                self.leave_held();
            } else {
                self.leave();
            }
            self.stop_reserver();
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        // In a forked child the descriptors are closed already.
        if !self.is_forked_child() {
            // SAFETY: dropped here only, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.files) };
        }
    }
}
