//! `Lease`: the held prefix of a chain.

use std::sync::Arc;

use lakecache_core::cache::{Cache, Lease, Tier};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Leases on the leading keys of a chain that are present.
#[pyclass(frozen, name = "Lease", module = "lakecache._core")]
pub(crate) struct PyLease {
    pub(crate) lease: Lease,
    pub(crate) _cache: Arc<Cache>,
}

#[pymethods]
impl PyLease {
    /// How many leading keys are held; None while files are being opened.
    fn poll(&self) -> Option<usize> {
        self.lease.poll()
    }

    /// Settles for the leading keys held now.
    fn settle(&self) -> usize {
        self.lease.settle()
    }

    /// Gives back the keys from index `count` on.
    fn truncate(&self, count: usize) {
        self.lease.truncate(count);
    }

    /// One byte per key: 0 memory, 1 disk.
    fn tiers<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let tiers: Vec<_> =
            self.lease.tiers().into_iter().map(|tier| u8::from(tier == Tier::Disk)).collect();
        PyBytes::new(py, &tiers)
    }

    /// Begins to read what is on disk.
    fn start(&self) {
        self.lease.start();
    }

    /// (index, entry, generation) of the slots not handed out before.
    fn slots(&self) -> Vec<(usize, u32, u64)> {
        self.lease
            .slots()
            .into_iter()
            .map(|(index, slot)| (index, slot.entry, slot.generation))
            .collect()
    }

    /// The lowest index that can't arrive any more.
    fn failed(&self) -> Option<usize> {
        self.lease.failed()
    }

    /// Gives one object back.
    fn release(&self, index: usize) {
        self.lease.release(index);
    }

    /// Gives everything back. Idempotent.
    fn close(&self) {
        self.lease.close();
    }
}
