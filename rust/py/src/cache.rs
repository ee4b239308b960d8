//! `Cache`: the store as Python sees it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use lakecache_core::cache::{Cache, CacheOptions, Checkpoint, Lease, Tier, WritePolicy};
use lakecache_core::io::EngineChoice;
use lakecache_core::l1::{ObjectMeta, Slot, SlotState};
use lakecache_core::l2::Durability;
use lakecache_core::pool::Wait;
use lakecache_core::{Namespace, ObjectKey};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyMemoryView};

use crate::copier::PyCopier;
use crate::digest::{parse_digest, parse_keys};
use crate::error::{ConfigError, to_python};
use crate::lease::PyLease;
use crate::view::View;

/// How long a call of the engine's thread may wait for the writer lock: the default of all.
const LOCK_WAIT_SECONDS: f64 = 0.001;

/// One open store: the member of a pool, with the threads that read, check and write.
#[pyclass(frozen, name = "Cache", module = "lakecache._core")]
pub(crate) struct PyCache {
    pub(crate) cache: Arc<Cache>,
}

fn choice<T: Copy>(setting: &str, value: &str, known: &[(&str, T)]) -> PyResult<T> {
    known.iter().find(|(name, _)| *name == value).map(|(_, choice)| *choice).ok_or_else(|| {
        let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
        ConfigError::new_err(format!("{setting} is {value:?}; it can be {}", names.join(", ")))
    })
}

/// Seconds as Python gives them; negative, infinite or no number counts as none at all or as long.
pub(crate) fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value).unwrap_or(if value > 0.0 {
        Duration::from_secs(1 << 32)
    } else {
        Duration::ZERO
    })
}

fn state_code(state: SlotState) -> u8 {
    match state {
        SlotState::Filling => 0,
        SlotState::Ready => 1,
        SlotState::Gone => 2,
    }
}

#[pymethods]
impl PyCache {
    #[new]
    #[pyo3(signature = (*, cache_dir, ram_dir, cpu_bytes, disk_capacity_bytes, shared=true,
        io_engine="auto", checksum=true, durability="none", write_policy="write_through",
        worker=false))]
    #[expect(clippy::too_many_arguments, reason = "one keyword for each setting")]
    fn new(
        py: Python<'_>,
        cache_dir: Option<PathBuf>,
        ram_dir: PathBuf,
        cpu_bytes: u64,
        disk_capacity_bytes: Option<u64>,
        shared: bool,
        io_engine: &str,
        checksum: bool,
        durability: &str,
        write_policy: &str,
        worker: bool,
    ) -> PyResult<Self> {
        let options = CacheOptions {
            cache_dir,
            ram_dir,
            cpu_bytes,
            disk_capacity_bytes,
            shared,
            io_engine: choice(
                "io_engine",
                io_engine,
                &[
                    ("auto", EngineChoice::Auto),
                    ("io_uring", EngineChoice::IoUring),
                    ("pread", EngineChoice::Pread),
                ],
            )?,
            checksum,
            durability: choice(
                "durability",
                durability,
                &[("none", Durability::None), ("data", Durability::Data)],
            )?,
            write_policy: choice(
                "write_policy",
                write_policy,
                &[
                    ("write_through", WritePolicy::WriteThrough),
                    ("on_evict", WritePolicy::OnEvict),
                    ("second_use", WritePolicy::SecondUse),
                ],
            )?,
            worker,
        };
        let cache = py.detach(|| Cache::open(&options)).map_err(to_python)?;
        Ok(Self { cache: Arc::new(cache) })
    }

    /// The pool's id in hexadecimal.
    #[getter]
    fn pool_id(&self) -> String {
        self.cache.pool_id()
    }

    /// The engine that reads files: `io_uring`, `pread` or `none`.
    #[getter]
    fn io_engine(&self) -> &'static str {
        self.cache.engine().0
    }

    /// Why it is not the engine preferred.
    #[getter]
    fn io_engine_reason(&self) -> Option<&str> {
        self.cache.engine().1
    }

    /// Registers a namespace by its 32-byte digest and writes its manifest (JSON text). Not
    /// `persistent`: nothing of it ever reaches the disk, neither objects nor the manifest, whoever
    /// else names it while the pool exists. None: the pool can remember no more namespaces, or has
    /// to remember this one and the writer lock is not to be had within `wait` seconds.
    #[pyo3(signature = (digest, manifest, persistent=true, wait=LOCK_WAIT_SECONDS))]
    fn namespace(
        &self,
        py: Python<'_>,
        digest: &[u8],
        manifest: &str,
        persistent: bool,
        wait: f64,
    ) -> PyResult<Option<u16>> {
        let namespace = Namespace(parse_digest("a namespace digest", digest)?);
        let wait = if wait > 0.0 { Wait::Within(seconds(wait)) } else { Wait::Try };
        py.detach(|| self.cache.namespace(&namespace, manifest, persistent, wait))
            .map_err(to_python)
    }

    /// How many leading keys are present, and how many of those are in memory.
    fn lookup(&self, keys: &[u8]) -> PyResult<(usize, usize)> {
        Ok(self.cache.lookup(&parse_keys(keys)?))
    }

    /// The deepest complete checkpoints, deepest first: (candidate, how many leading chunks it
    /// needs, how many of those are in memory, whether the state is). Candidate `i` of `states`
    /// needs the first `(i + 1) // per_chunk` of `chunks`.
    fn lookup_checkpoints(
        &self,
        chunks: &[u8],
        states: &[u8],
        per_chunk: usize,
        most: usize,
    ) -> PyResult<Vec<(usize, usize, usize, bool)>> {
        let (chunks, states) = (parse_keys(chunks)?, parse_keys(states)?);
        let found = self.cache.lookup_checkpoints(&chunks, &states, per_chunk, most);
        let row =
            |at: Checkpoint| (at.index, at.chunks, at.chunks_in_memory, at.state == Tier::Memory);
        Ok(found.into_iter().map(row).collect())
    }

    /// Leases the leading keys that are present; never waits.
    fn lease(&self, keys: &[u8]) -> PyResult<PyLease> {
        let keys = parse_keys(keys)?;
        let lease: Lease = self.cache.lease(&keys).map_err(to_python)?;
        Ok(PyLease { lease, _cache: Arc::clone(&self.cache) })
    }

    /// Makes room for an object; (entry, generation), or None where it exists, has no room, or the
    /// writer lock can't be had within `wait` seconds.
    #[pyo3(signature = (namespace, key, kind, parent, first_token, last_token, ranks,
        payload_bytes, wait=LOCK_WAIT_SECONDS))]
    #[expect(clippy::too_many_arguments, reason = "the fields of an object's header")]
    fn reserve(
        &self,
        py: Python<'_>,
        namespace: u16,
        key: &[u8],
        kind: u8,
        parent: Option<&[u8]>,
        first_token: u32,
        last_token: u32,
        ranks: u16,
        payload_bytes: u64,
        wait: f64,
    ) -> PyResult<Option<(u32, u64)>> {
        if ranks == 0 || payload_bytes == 0 || !payload_bytes.is_multiple_of(u64::from(ranks)) {
            return Err(ConfigError::new_err(format!(
                "payload_bytes is {payload_bytes}; it must be a positive multiple of ranks ({ranks})"
            )));
        }
        let meta = ObjectMeta {
            key: ObjectKey(parse_digest("a key", key)?),
            namespace,
            kind,
            parent: parent.map(|key| parse_digest("a parent key", key)).transpose()?.map(ObjectKey),
            first_token,
            last_token,
            ranks,
            payload_bytes,
        };
        let short = wait <= LOCK_WAIT_SECONDS;
        let wait = if wait > 0.0 { Wait::Within(seconds(wait)) } else { Wait::Try };
        let reserve = || self.cache.reserve(&meta, wait);
        let slot = if short { reserve() } else { py.detach(reserve) }.map_err(to_python)?;
        Ok(slot.map(|slot| (slot.entry, slot.generation)))
    }

    /// Hands a filled slot over to be checked, published and written.
    fn commit(&self, entry: u32, generation: u64) -> PyResult<()> {
        self.cache.commit(Slot { entry, generation }).map_err(to_python)
    }

    /// Gives a reserved slot up.
    fn abandon(&self, entry: u32, generation: u64) {
        self.cache.abandon(Slot { entry, generation });
    }

    /// Marks a chain, root first, as used now.
    fn touch(&self, keys: &[u8]) -> PyResult<()> {
        let keys = parse_keys(keys)?;
        self.cache.touch(&keys);
        Ok(())
    }

    /// 0 filling, 1 readable, 2 gone.
    fn state(&self, entry: u32, generation: u64) -> u8 {
        state_code(self.cache.arena().state(Slot { entry, generation }))
    }

    /// The states of many slots, given as (entry, generation): one byte for each, as in `state`.
    fn states<'py>(&self, py: Python<'py>, slots: Vec<(u32, u64)>) -> Bound<'py, PyBytes> {
        let state = |(entry, generation)| self.cache.arena().state(Slot { entry, generation });
        let states: Vec<_> = slots.into_iter().map(|slot| state_code(state(slot))).collect();
        PyBytes::new(py, &states)
    }

    /// (address in this process, bytes, whether it has memory by now) of each piece of the pool's data
    /// area, in order. No span of an object crosses from one to another. The addresses stay valid
    /// while this object lives.
    fn pieces(&self) -> Vec<(usize, u64, bool)> {
        let exposed = |(address, bytes, reserved): (*mut u8, _, _)| {
            (address.expose_provenance(), bytes, reserved)
        };
        self.cache.pieces().into_iter().map(exposed).collect()
    }

    /// Says that GPUs copy into or out of the pool's memory for this object, before the first such
    /// copy. From then on a `close` says that none is under way; without it what is pinned stays
    /// pinned until this process has ended.
    fn declare_gpu_copies(&self) {
        self.cache.declare_gpu_copies();
    }

    /// (address in this process, bytes) of each run of an object's payload, in order; together they
    /// are the payload. Empty where the object is gone. They hold while the caller has it pinned.
    fn spans(&self, entry: u32, generation: u64) -> Vec<(usize, u64)> {
        let spans = self.cache.arena().spans(Slot { entry, generation }).unwrap_or_default();
        spans.into_iter().map(|(address, bytes)| (address.expose_provenance(), bytes)).collect()
    }

    /// Whether a readable object's bytes in memory have the checksum they were published with. False
    /// as well where it is gone or not readable yet.
    fn checksum_ok(&self, py: Python<'_>, entry: u32, generation: u64) -> bool {
        py.detach(|| self.cache.checksum_ok(Slot { entry, generation }))
    }

    /// The payload of an object, one memoryview per extent, in order; writable while it is being
    /// filled. Each view pins the object until it is released.
    fn view(&self, py: Python<'_>, entry: u32, generation: u64) -> PyResult<Vec<Py<PyMemoryView>>> {
        View::of(py, &self.cache, Slot { entry, generation })
    }

    /// Pins an object. False where it is gone.
    fn pin(&self, entry: u32, generation: u64) -> bool {
        self.cache.arena().pin(Slot { entry, generation })
    }

    /// Takes a pin back.
    fn unpin(&self, entry: u32, generation: u64) {
        self.cache.arena().unpin(Slot { entry, generation });
    }

    /// Starts threads that copy between this pool and the engine's memory.
    fn copier(&self, threads: usize) -> PyCopier {
        PyCopier::new(&self.cache, threads)
    }

    /// Waits until what was committed is readable and written, or skipped.
    fn flush(&self, py: Python<'_>, timeout: f64) -> bool {
        py.detach(|| self.cache.flush(seconds(timeout)))
    }

    /// Waits until the index of the disk tier is complete.
    fn wait_scanned(&self, py: Python<'_>, timeout: f64) -> bool {
        py.detach(|| self.cache.wait_scanned(seconds(timeout)))
    }

    /// Drops every object from memory that nobody needs there; the bytes freed.
    fn clear_memory(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.cache.clear_memory())
    }

    /// Counters and gauges by name.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = PyDict::new(py);
        for (name, value) in self.cache.stats().counters.snapshot() {
            stats.set_item(name, value)?;
        }
        for (name, value) in self.cache.gauges() {
            stats.set_item(name, value)?;
        }
        stats.set_item("io_engine", self.cache.engine().0)?;
        Ok(stats)
    }

    /// The events since the last call, oldest first: dicts of op, tier, key and bytes.
    fn events<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        self.cache
            .stats()
            .drain_events()
            .into_iter()
            .map(|event| {
                let dict = PyDict::new(py);
                dict.set_item("op", event.op)?;
                dict.set_item("tier", event.tier)?;
                dict.set_item("key", event.key.hex())?;
                dict.set_item("bytes", event.bytes)?;
                Ok(dict)
            })
            .collect()
    }

    /// Writes back for at most `timeout` seconds, ends the threads and leaves the pool. Idempotent.
    #[pyo3(signature = (timeout=5.0))]
    fn close(&self, py: Python<'_>, timeout: f64) {
        py.detach(|| self.cache.close(seconds(timeout)));
    }
}
