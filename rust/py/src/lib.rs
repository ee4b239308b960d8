//! Python bindings of `lakecache-core`: batches in, batches out, the GIL released around every wait.

use pyo3::prelude::*;

/// The compiled half of the package `lakecache`.
#[pymodule(gil_used = false)]
mod _core {
    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
