//! The two tiers as one store: lookup, lease, load and promote; store, publish and write back.
//!
//! Ownership: the caller's threads look up, lease and reserve, and never wait for a disk; the I/O
//! engine's threads open, read and verify files; the background threads compute checksums and write
//! back. A slot being filled belongs to whoever reserved it; a readable one to nobody, and its bytes
//! never change.

mod checkpoint;
mod copy;
mod lease;
mod outside;
mod stats;
#[cfg(test)]
mod testing;
mod writeback;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

pub use checkpoint::Checkpoint;
pub use copy::{Copier, Fragments, Outcome};
use crc_fast::{CrcAlgorithm, Digest};
pub use lease::{Lease, Tier};
pub use outside::{Cleared, DiskAbilities, clear, disk_abilities};
pub use stats::{Counters, Event, Stats};

use crate::io::{self, Engine, EngineChoice};
use crate::l1::{Arena, ObjectMeta, Purpose, Reserve, Slot, SlotState};
use crate::l2::{DiskOptions, DiskStore, Durability, L2Gauges};
use crate::pool::{Pool, PoolOptions, Role, Wait};
use crate::{Error, ErrorKind, Namespace, ObjectKey, Result, sys};
use writeback::{Background, rescue};

/// When an object goes to disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WritePolicy {
    /// As soon as it is in memory: what a restart needs.
    WriteThrough,
    /// When memory gets short, and at shutdown.
    OnEvict,
    /// When it is used a second time while in memory.
    SecondUse,
}

/// How to open a cache.
#[derive(Debug, Clone)]
pub struct CacheOptions {
    /// The directory of the disk tier; `None` keeps objects in memory only.
    pub cache_dir: Option<PathBuf>,
    /// Where shared pools live.
    pub ram_dir: PathBuf,
    /// Bytes of the pool, its metadata included; 0 keeps a transit area only.
    pub cpu_bytes: u64,
    /// The disk tier's limit, headers included.
    pub disk_capacity_bytes: Option<u64>,
    /// Whether other processes share the pool.
    pub shared: bool,
    /// Which engine reads files.
    pub io_engine: EngineChoice,
    /// Whether payload checksums are checked on read.
    pub checksum: bool,
    /// What a write waits for.
    pub durability: Durability,
    /// When an object goes to disk.
    pub write_policy: WritePolicy,
    /// A worker maps the pool to copy to and from it and does no I/O.
    pub worker: bool,
}

/// The share of the disk's file system that stays free: one part in this many.
const FREE_SPACE_RESERVE: u64 = 100;

/// Transit area of a cache without memory tier.
const TRANSIT_BYTES: u64 = 256 << 20;

/// How long a load may wait for room or for its bytes before it is given up.
const LOAD_DEADLINE: Duration = Duration::from_secs(10);

struct Inner {
    pool: Arc<Pool>,
    arena: Arc<Arena>,
    disk: Option<Arc<DiskStore>>,
    engine: Option<Arc<dyn Engine>>,
    stats: Arc<Stats>,
    checksum: bool,
    write_policy: WritePolicy,
    closed: AtomicBool,
}

/// One open store.
pub struct Cache {
    inner: Arc<Inner>,
    background: Option<Background>,
    views: AtomicUsize,
    /// The views alone keep this member in the pool.
    stopped: AtomicBool,
    engine_name: &'static str,
    engine_reason: Option<String>,
}

impl Cache {
    /// Opens the store: joins the pool that serves `cache_dir`, or creates it.
    pub fn open(options: &CacheOptions) -> Result<Self> {
        let stats = Arc::new(Stats::default());
        let pool_options = PoolOptions {
            ram_dir: options.ram_dir.clone(),
            cache_dir: options.cache_dir.clone(),
            cpu_bytes: options.cpu_bytes,
            disk_capacity_bytes: options.disk_capacity_bytes,
            shared: options.shared,
            l1_entries: None,
            l2_records: None,
            transit_bytes: TRANSIT_BYTES,
            role: if options.worker { Role::Worker } else { Role::Engine },
        };
        let pool = Pool::open_with(pool_options, &mut |old| rescue(old, options, &stats))?;
        let arena = Arc::new(Arena::new(Arc::clone(&pool)));
        let mut engine_name = "none";
        let mut engine_reason = None;
        let (mut disk, mut engine) = (None, None);
        if let Some(cache_dir) = &options.cache_dir {
            if options.worker {
                crate::l2::Table::new(&pool);
            } else {
                let store = open_disk(&pool, options, cache_dir)?;
                let opened = io::open_engine(
                    options.io_engine,
                    cache_dir,
                    pool.life_fd(),
                    &io::EngineOptions::default(),
                )?;
                engine_name = opened.engine.kind().name();
                engine_reason = opened.reason;
                store.start_scan();
                (disk, engine) = (Some(store), Some(opened.engine));
            }
        }
        let inner = Arc::new(Inner {
            pool,
            arena,
            disk,
            engine,
            stats,
            checksum: options.checksum,
            write_policy: options.write_policy,
            closed: AtomicBool::new(false),
        });
        let background =
            if options.worker { None } else { Some(Background::start(Arc::clone(&inner))?) };
        let (views, stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
        Ok(Self { inner, background, views, stopped, engine_name, engine_reason })
    }

    fn check_open(&self) -> Result<()> {
        if self.inner.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, "the cache was closed"));
        }
        self.inner.pool.check_usable()
    }

    /// The id of the pool, in hexadecimal; ranks on one node see the same.
    pub fn pool_id(&self) -> String {
        self.inner.pool.id_hex()
    }

    /// The engine that reads files, and why it is not the one preferred.
    pub fn engine(&self) -> (&'static str, Option<&str>) {
        (self.engine_name, self.engine_reason.as_deref())
    }

    /// The pool's number for a namespace; its manifest is written for people to read, in the
    /// background. `None` when the pool's table of namespaces is full, or where it has no number yet
    /// and the writer lock can't be had within `wait`. Not `persistent`: nothing of it ever reaches
    /// the disk, whoever else names it, for as long as the pool exists.
    pub fn namespace(
        &self,
        namespace: &Namespace,
        manifest: &str,
        persistent: bool,
        wait: Wait,
    ) -> Result<Option<u16>> {
        self.check_open()?;
        let pool = &self.inner.pool;
        let Some(id) = pool.intern_namespace(namespace, wait)? else { return Ok(None) };
        if !persistent {
            pool.set_memory_only(id);
        }
        if let Some(background) = self.background.as_ref().filter(|_| self.inner.disk.is_some())
            && !pool.is_memory_only(id)
        {
            background.write_manifest(namespace, manifest);
        }
        Ok(Some(id))
    }

    /// How many leading keys are in either tier, and how many of those are readable in memory.
    pub fn lookup(&self, keys: &[ObjectKey]) -> (usize, usize) {
        self.inner.lookup(keys)
    }

    /// Takes leases on the leading keys that are present, see [`Lease`]. Never waits.
    pub fn lease(&self, keys: &[ObjectKey]) -> Result<Lease> {
        self.check_open()?;
        Ok(Lease::take(&self.inner, keys))
    }

    /// Makes room in memory for an object and marks it as being filled, pinned by us. `None` when it
    /// is there already, when there is no room, or when the writer lock can't be had within `wait`.
    pub fn reserve(&self, meta: &ObjectMeta, wait: Wait) -> Result<Option<Slot>> {
        self.check_open()?;
        let counters = &self.inner.stats.counters;
        match self.inner.arena.reserve(meta, Purpose::Store, wait)? {
            Reserve::Slot(slot) => return Ok(Some(slot)),
            Reserve::Exists(_) => {}
            Reserve::NoRoom => Stats::add(&counters.stores_no_room, 1),
            Reserve::Busy => Stats::add(&counters.stores_busy, 1),
        }
        Ok(None)
    }

    /// Hands a filled slot over: its checksum is computed, it becomes readable, and it is written to
    /// disk as the policy says; all in the background.
    pub fn commit(&self, slot: Slot) -> Result<()> {
        self.check_open()?;
        match &self.background {
            Some(background) => background.commit(slot),
            None => self.inner.abandon(slot),
        }
        Ok(())
    }

    /// Gives a reserved slot up.
    pub fn abandon(&self, slot: Slot) {
        self.inner.abandon(slot);
    }

    /// Marks a chain, root first, as used now in both tiers.
    pub fn touch(&self, keys: &[ObjectKey]) {
        self.inner.arena.touch(keys);
        if let Some(disk) = &self.inner.disk {
            disk.touch(keys);
        }
    }

    /// Address in this process, length and whether it has memory by now, of each piece of the memory
    /// tier. No run of an object's bytes crosses from one to another.
    pub fn pieces(&self) -> Vec<(*mut u8, u64, bool)> {
        let pool = &self.inner.pool;
        (0..pool.pieces())
            .map(|piece| {
                let (address, bytes) = pool.piece(piece);
                (address, bytes, pool.piece_reserved(piece))
            })
            .collect()
    }

    /// Whether a readable object's bytes in memory have the checksum they were published with; where
    /// they have not, nobody gets it from memory any more. False as well where the object is gone or
    /// not readable yet.
    pub fn checksum_ok(&self, slot: Slot) -> bool {
        let arena = &self.inner.arena;
        if !arena.pin(slot) {
            return false;
        }
        let sound = arena.state(slot) == SlotState::Ready && is_sound(arena, slot);
        arena.unpin(slot);
        sound
    }

    /// The memory tier, for copies.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.inner.arena
    }

    /// Counters and events.
    pub fn stats(&self) -> &Stats {
        &self.inner.stats
    }

    /// Gauges of both tiers and of the queues, by name.
    pub fn gauges(&self) -> Vec<(&'static str, u64)> {
        let mut gauges = Vec::new();
        gauges.extend(self.inner.arena.gauges().named());
        if let Some(disk) = &self.inner.disk {
            gauges.extend(disk_gauges(&disk.gauges()));
        }
        let pool = self.inner.pool.gauges();
        gauges.extend([
            ("pool_file_bytes", pool.file_bytes),
            ("pool_metadata_bytes", pool.metadata_bytes),
            ("pool_members", u64::from(pool.members)),
            ("pool_recoveries", pool.recoveries),
            ("pool_members_reaped", pool.reaped),
            ("pool_reservation_put_off", u64::from(pool.reservation_put_off)),
        ]);
        if let Some(engine) = &self.inner.engine {
            gauges.push(("io_queue_depth", engine.queue_depth() as u64));
            gauges.push(("io_bytes_registered", engine.registered_bytes()));
        }
        if let Some(background) = &self.background {
            gauges.push(("commits_pending", background.pending() as u64));
        }
        gauges
    }

    /// Waits until the objects committed so far are readable and written, or skipped. `false` when
    /// `timeout` passed first.
    pub fn flush(&self, timeout: Duration) -> bool {
        self.background.as_ref().is_none_or(|background| background.flush(timeout))
    }

    /// Waits until the disk index is complete. `false` when `timeout` passed first.
    pub fn wait_scanned(&self, timeout: Duration) -> bool {
        self.inner.disk.as_ref().is_none_or(|disk| disk.wait_scanned(timeout))
    }

    /// Drops every object from memory that nobody pins and that need not be written first. The
    /// number of bytes freed.
    pub fn clear_memory(&self) -> u64 {
        self.inner.arena.clear()
    }

    /// Says that GPUs copy into the pool's memory for this cache, before the first such copy: see
    /// [`Pool::declare_gpu_copies`].
    pub fn declare_gpu_copies(&self) {
        self.inner.pool.declare_gpu_copies();
    }

    /// Pins an object for a view of its bytes, which may outlive [`Cache::close`]. False: it is gone.
    pub fn pin_view(&self, slot: Slot) -> bool {
        self.views.fetch_add(1, Ordering::SeqCst);
        let pinned = !self.inner.closed.load(Ordering::SeqCst) && self.inner.arena.pin(slot);
        if !pinned {
            self.end_view();
        }
        pinned
    }

    /// Takes the pin of a view back. The last one of a closed cache leaves the pool.
    pub fn unpin_view(&self, slot: Slot) {
        self.inner.arena.unpin(slot);
        self.end_view();
    }

    fn end_view(&self) {
        let last = self.views.fetch_sub(1, Ordering::SeqCst) == 1;
        if last && self.stopped.load(Ordering::SeqCst) {
            self.inner.pool.leave();
        }
    }

    /// Writes back what is dirty for at most `drain`, ends the threads and leaves the pool, but not
    /// before the last view has ended. Idempotent; leases and slots are void afterwards. Copies of
    /// GPUs must be over; where they may not be, the cache is dropped instead, and what it has pinned
    /// stays pinned until the process has ended.
    pub fn close(&self, drain: Duration) {
        if self.stop(drain) {
            self.stopped.store(true, Ordering::SeqCst);
            if self.views.load(Ordering::SeqCst) == 0 {
                self.inner.pool.leave();
            }
        }
    }

    /// True: it was this call that did so.
    fn stop(&self, drain: Duration) -> bool {
        if self.inner.closed.swap(true, Ordering::SeqCst) || self.inner.pool.is_forked_child() {
            return false;
        }
        if let Some(background) = &self.background {
            background.drain(drain);
            background.stop();
        }
        if let Some(engine) = &self.inner.engine {
            engine.shutdown(Duration::from_secs(5));
        }
        if let Some(disk) = &self.inner.disk {
            disk.close();
        }
        true
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        if self.inner.pool.is_forked_child() {
            // Its threads are not there, nor what they were at.
            Box::leak(Box::new((Arc::clone(&self.inner), self.background.take())));
            return;
        }
        // Without `close` nobody has said that the GPUs' copies are over: the pool sees to that.
        if self.stop(Duration::from_secs(5)) && !self.inner.pool.has_gpu_copies() {
            self.inner.pool.leave();
        }
    }
}

impl Inner {
    fn lookup(&self, keys: &[ObjectKey]) -> (usize, usize) {
        let mut memory = Vec::with_capacity(keys.len());
        self.arena.lookup(keys, &mut memory);
        let present = |found: &Option<(Slot, SlotState)>| found.is_some();
        let in_memory = memory.iter().take_while(|found| present(found)).count();
        let Some(disk) = self.disk.as_ref().filter(|_| in_memory < keys.len()) else {
            return (in_memory, in_memory);
        };
        let mut on_disk = Vec::with_capacity(keys.len() - in_memory);
        disk.lookup(&keys[in_memory..], &mut on_disk);
        let rest = memory[in_memory..]
            .iter()
            .zip(&on_disk)
            .take_while(|(memory, disk)| memory.is_some() || **disk)
            .count();
        let extra =
            memory[in_memory..in_memory + rest].iter().filter(|found| present(found)).count();
        (in_memory + rest, in_memory + extra)
    }

    fn abandon(&self, slot: Slot) {
        Stats::add(&self.stats.counters.stores_abandoned, 1);
        self.arena.abandon(slot);
        self.arena.unpin(slot);
    }

    /// Whether a pinned object belongs on disk and is not there yet.
    fn is_wanted_on_disk(&self, slot: Slot) -> bool {
        let (Some(disk), Some(meta)) = (&self.disk, self.arena.meta(slot)) else { return false };
        if self.pool.is_memory_only(meta.namespace) {
            return false;
        }
        let mut found = Vec::with_capacity(1);
        disk.lookup(std::slice::from_ref(&meta.key), &mut found);
        found.first() != Some(&true)
    }
}

fn open_disk(pool: &Arc<Pool>, options: &CacheOptions, dir: &Path) -> Result<Arc<DiskStore>> {
    let disk_options =
        DiskOptions { durability: options.durability, reserve_bytes: free_space_reserve(dir) };
    DiskStore::open(Arc::clone(pool), dir.to_path_buf(), disk_options)
}

/// Bytes of the file system that are left free for others.
fn free_space_reserve(cache_dir: &Path) -> u64 {
    let space = sys::file::create_dirs(cache_dir).and_then(|()| sys::limits::fs_space(cache_dir));
    match space {
        Ok(space) => space.total / FREE_SPACE_RESERVE,
        Err(error) => {
            log::debug!("no reserve of free space: {error}");
            0
        }
    }
}

fn disk_gauges(disk: &L2Gauges) -> [(&'static str, u64); 11] {
    [
        ("disk_bytes_used", disk.bytes),
        ("disk_objects", disk.objects),
        ("disk_capacity_bytes", disk.capacity.unwrap_or(u64::MAX)),
        ("disk_scan_done", u64::from(disk.scan_done)),
        ("disk_evictions", disk.evicted),
        ("disk_victims_leased", disk.leased_skips),
        ("disk_leases", disk.leases),
        ("disk_objects_missing", disk.missing),
        ("disk_objects_damaged", disk.damaged.iter().sum()),
        ("disk_degraded", u64::from(disk.degraded)),
        ("disk_files_swept", disk.swept),
    ]
}

/// Whether a pinned READY object has the checksum it was published with. One that has not is
/// discarded: its file, if it has one, is read and checked by the next load.
fn is_sound(arena: &Arena, slot: Slot) -> bool {
    let sound = arena.checksum(slot) == Some(checksum_of(arena, slot));
    if !sound && arena.discard(slot) {
        log::warn!("an object's bytes in memory have changed: it is dropped there");
    }
    sound
}

/// CRC-64/NVME of a pinned object's payload.
pub(crate) fn checksum_of(arena: &Arena, slot: Slot) -> u64 {
    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
    for (address, bytes) in arena.spans(slot).unwrap_or_default() {
        let bytes = usize::try_from(bytes).unwrap_or_default();
        // SAFETY: the run belongs to a slot pinned by the caller, and is READY (its bytes never
        // change) or FILLING with all its fillers done.
        let run = unsafe { std::slice::from_raw_parts(address.cast_const(), bytes) };
        digest.update(run);
    }
    digest.finalize()
}
