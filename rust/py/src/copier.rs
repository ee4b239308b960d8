//! `Copier`: copies by threads without the GIL.

use std::sync::Arc;

use lakecache_core::cache::{Cache, Copier, Fragments, Outcome};
use lakecache_core::l1::Slot;
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;

use crate::cache::seconds;

/// Threads that copy between objects and pages in this process's memory.
#[pyclass(frozen, name = "Copier", module = "lakecache._core")]
pub(crate) struct PyCopier {
    copier: Copier,
    _cache: Arc<Cache>,
}

impl PyCopier {
    pub(crate) fn new(cache: &Arc<Cache>, threads: usize) -> Self {
        let copier = Copier::new(Arc::clone(cache.arena()), threads);
        Self { copier, _cache: Arc::clone(cache) }
    }
}

fn fragments(
    py: Python<'_>,
    object_offset: u64,
    addresses: &PyBuffer<u64>,
    fragment_bytes: u64,
) -> PyResult<Fragments> {
    Ok(Fragments { object_offset, addresses: addresses.to_vec(py)?, fragment_bytes })
}

#[pymethods]
impl PyCopier {
    /// Copies an object's bytes from `object_offset` on to the fragments at `addresses`, as soon as
    /// the object is readable; gives up after `deadline` seconds if it is not by then. The memory
    /// must stay valid until the job's result was polled.
    #[pyo3(signature = (job, entry, generation, object_offset, addresses, fragment_bytes, deadline,
        verify=false))]
    #[expect(clippy::too_many_arguments, reason = "one flat call per job keeps its cost small")]
    fn load(
        &self,
        py: Python<'_>,
        job: u64,
        entry: u32,
        generation: u64,
        object_offset: u64,
        addresses: PyBuffer<u64>,
        fragment_bytes: u64,
        deadline: f64,
        verify: bool,
    ) -> PyResult<()> {
        let fragments = fragments(py, object_offset, &addresses, fragment_bytes)?;
        let slot = Slot { entry, generation };
        // SAFETY: the caller's promise, stated above; the connector keeps the blocks allocated until
        // it has polled the result.
        unsafe { self.copier.load(job, slot, fragments, seconds(deadline), verify) };
        Ok(())
    }

    /// Copies the fragments at `addresses` into a slot being filled, from `object_offset` on. The
    /// memory must stay valid and unchanged until the job's result was polled.
    #[expect(clippy::too_many_arguments, reason = "one flat call per job keeps its cost small")]
    fn store(
        &self,
        py: Python<'_>,
        job: u64,
        entry: u32,
        generation: u64,
        object_offset: u64,
        addresses: PyBuffer<u64>,
        fragment_bytes: u64,
    ) -> PyResult<()> {
        let fragments = fragments(py, object_offset, &addresses, fragment_bytes)?;
        // SAFETY: the caller's promise, stated above.
        unsafe { self.copier.store(job, Slot { entry, generation }, fragments) };
        Ok(())
    }

    /// The jobs that ended since the last call: 0 copied, 1 the object is gone, 2 the deadline passed,
    /// 3 what was copied is not what is stored.
    fn poll(&self) -> Vec<(u64, u8)> {
        let code = |outcome| match outcome {
            Outcome::Done => 0,
            Outcome::Gone => 1,
            Outcome::Deadline => 2,
            Outcome::Mismatch => 3,
        };
        self.copier.poll().into_iter().map(|(job, outcome)| (job, code(outcome))).collect()
    }

    /// Ends the threads; queued jobs end as gone.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.copier.close());
    }
}
