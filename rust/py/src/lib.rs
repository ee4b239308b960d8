//! Python bindings of `lakecache-core`: batches in, batches out.
//!
//! The GIL is released around what may wait for longer than a millisecond, and kept in what takes
//! microseconds: a thread that takes it meanwhile, such as the one in which vLLM decodes requests,
//! gives it back after 5 ms only (`sys.getswitchinterval`).

#![expect(
    clippy::needless_pass_by_value,
    clippy::elidable_lifetime_names,
    reason = "the interpreter hands arguments over by value and with a lifetime"
)]

mod cache;
mod copier;
mod digest;
mod error;
mod lease;
mod messages;
mod outside;
mod view;

use pyo3::prelude::*;

/// The compiled half of the package `lakecache`.
#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use super::cache::PyCache;
    #[pymodule_export]
    use super::copier::PyCopier;
    #[pymodule_export]
    use super::digest::{blake3, blake3_file, derive_keys};
    #[pymodule_export]
    use super::lease::PyLease;
    #[pymodule_export]
    use super::messages::take_messages;
    #[pymodule_export]
    use super::outside::{clear_store, contents, look, pool_lacks, probe_disk};
    #[pymodule_export]
    use super::view::View;
    use super::{Bound, PyModule, PyModuleMethods, PyResult, messages};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        messages::keep();
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
