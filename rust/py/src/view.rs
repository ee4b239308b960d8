//! `View`: an object's bytes through the buffer protocol.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use lakecache_core::cache::Cache;
use lakecache_core::l1::{Slot, SlotState};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyMemoryView;

/// One extent of an object, pinned for as long as it lives. Use it through `memoryview`.
#[pyclass(frozen, module = "lakecache._core")]
pub(crate) struct View {
    cache: Arc<Cache>,
    slot: Slot,
    address: usize,
    bytes: usize,
    writable: bool,
}

impl View {
    pub(crate) fn of(
        py: Python<'_>,
        cache: &Arc<Cache>,
        slot: Slot,
    ) -> PyResult<Vec<Py<PyMemoryView>>> {
        let arena = cache.arena();
        let writable = matches!(arena.state(slot), SlotState::Filling);
        let mut views = Vec::new();
        for (address, bytes) in arena.spans(slot).unwrap_or_default() {
            if !cache.pin_view(slot) {
                break;
            }
            let view = Self {
                cache: Arc::clone(cache),
                slot,
                address: address.expose_provenance(),
                bytes: usize::try_from(bytes)?,
                writable,
            };
            views.push(PyMemoryView::from(Bound::new(py, view)?.as_any())?.unbind());
        }
        Ok(views)
    }
}

impl Drop for View {
    fn drop(&mut self) {
        self.cache.unpin_view(self.slot);
    }
}

#[pymethods]
impl View {
    // SAFETY: called by the interpreter with a buffer to fill; every field is set by PyBuffer_FillInfo.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        let bytes = ffi::Py_ssize_t::try_from(this.bytes)?;
        let address = std::ptr::with_exposed_provenance_mut::<c_void>(this.address);
        // SAFETY: the run is mapped for as long as the cache lives and pinned for as long as this
        // object lives, which the buffer keeps alive by its reference.
        let status = unsafe {
            ffi::PyBuffer_FillInfo(
                view,
                slf.as_ptr(),
                address,
                bytes,
                c_int::from(!this.writable),
                flags,
            )
        };
        if status != 0 {
            return Err(PyErr::take(slf.py())
                .unwrap_or_else(|| PyBufferError::new_err("the view is read-only")));
        }
        Ok(())
    }
}
