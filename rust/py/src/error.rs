//! The one table from the core's error kinds to the package's exceptions, which Python defines.

use lakecache_core::{Error, ErrorKind};
use pyo3::prelude::*;

mod classes {
    pyo3::import_exception!(lakecache.errors, CapacityError);
    pyo3::import_exception!(lakecache.errors, ClosedError);
    pyo3::import_exception!(lakecache.errors, ConfigError);
    pyo3::import_exception!(lakecache.errors, DeadlineError);
    pyo3::import_exception!(lakecache.errors, EngineUnavailableError);
    pyo3::import_exception!(lakecache.errors, PoolIncompatibleError);
    pyo3::import_exception!(lakecache.errors, StorageError);
}

pub(crate) use classes::{ClosedError, ConfigError};

/// The exception for an error of the core.
pub(crate) fn to_python(error: Error) -> PyErr {
    let text = error.to_string();
    match error.kind() {
        ErrorKind::Config => ConfigError::new_err(text),
        ErrorKind::PoolIncompatible => classes::PoolIncompatibleError::new_err(text),
        ErrorKind::NoSpace => classes::CapacityError::new_err((error.errno().unwrap_or(28), text)),
        ErrorKind::Unavailable => classes::EngineUnavailableError::new_err(text),
        ErrorKind::Closed | ErrorKind::Forked => ClosedError::new_err(text),
        ErrorKind::Timeout => classes::DeadlineError::new_err(text),
        _ => classes::StorageError::new_err((error.errno().unwrap_or(5), text)),
    }
}
