//! A store seen from outside, for the command line: nothing here becomes a member of a pool.

use std::path::PathBuf;

use lakecache_core::cache::{DiskAbilities, clear, disk_abilities};
use lakecache_core::l2;
use lakecache_core::pool::{Pool, PoolOptions, PoolView};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::to_python;

/// Whether anybody uses a place, and its pool: a dict, or None where there is none.
#[pyfunction]
pub(crate) fn look(
    py: Python<'_>,
    ram_dir: PathBuf,
    cache_dir: Option<PathBuf>,
) -> PyResult<(bool, Option<Bound<'_, PyDict>>)> {
    let (used, pool) =
        py.detach(|| Pool::look(&ram_dir, cache_dir.as_deref())).map_err(to_python)?;
    Ok((used, pool.map(|pool| pool_dict(py, &pool)).transpose()?))
}

fn pool_dict<'py>(py: Python<'py>, pool: &PoolView) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("path", pool.path.display().to_string())?;
    dict.set_item("file_bytes", pool.file_bytes)?;
    dict.set_item("metadata_bytes", pool.metadata_bytes)?;
    dict.set_item("reserved_bytes", pool.reserved_bytes)?;
    dict.set_item("used_bytes", pool.used_bytes)?;
    dict.set_item("objects", pool.objects)?;
    dict.set_item("disk_capacity_bytes", pool.disk_capacity_bytes)?;
    let mut members = Vec::with_capacity(pool.members.len());
    for member in &pool.members {
        let row = PyDict::new(py);
        row.set_item("pid", member.pid)?;
        row.set_item("alive", member.alive)?;
        members.push(row);
    }
    dict.set_item("members", members)?;
    Ok(dict)
}

/// What lies in a cache directory: {"namespaces": {digest: {"kinds": {kind: (objects, bytes)},
/// "damaged": (objects, bytes)}}, "foreign": [path]}.
#[pyfunction]
pub(crate) fn contents(py: Python<'_>, cache_dir: PathBuf) -> PyResult<Bound<'_, PyDict>> {
    let found = py.detach(|| l2::contents(&cache_dir)).map_err(to_python)?;
    let namespaces = PyDict::new(py);
    for (digest, stored) in found.stored {
        let row = PyDict::new(py);
        row.set_item("kinds", stored.kinds)?;
        row.set_item("damaged", stored.damaged)?;
        namespaces.set_item(digest, row)?;
    }
    let dict = PyDict::new(py);
    dict.set_item("namespaces", namespaces)?;
    dict.set_item("foreign", found.foreign)?;
    Ok(dict)
}

/// What a pool of these settings would lack now, in words; raises where it can never fit.
#[pyfunction]
#[pyo3(signature = (ram_dir, cache_dir, cpu_bytes, disk_capacity_bytes))]
pub(crate) fn pool_lacks(
    py: Python<'_>,
    ram_dir: PathBuf,
    cache_dir: Option<PathBuf>,
    cpu_bytes: u64,
    disk_capacity_bytes: Option<u64>,
) -> PyResult<Option<String>> {
    let private = PoolOptions::private(cpu_bytes);
    let options = PoolOptions { ram_dir, cache_dir, disk_capacity_bytes, shared: true, ..private };
    py.detach(|| Pool::lacks(&options)).map_err(to_python)
}

/// What a cache directory's file system and the kernel allow, found by trying: a dict.
#[pyfunction]
pub(crate) fn probe_disk(py: Python<'_>, cache_dir: PathBuf) -> PyResult<Bound<'_, PyDict>> {
    let found: DiskAbilities = py.detach(|| disk_abilities(&cache_dir)).map_err(to_python)?;
    let dict = PyDict::new(py);
    dict.set_item("io_engine", found.io_engine)?;
    dict.set_item("io_engine_reason", found.io_engine_reason)?;
    dict.set_item("direct", found.direct)?;
    dict.set_item("unnamed", found.unnamed)?;
    dict.set_item("total_bytes", found.total_bytes)?;
    dict.set_item("free_bytes", found.free_bytes)?;
    dict.set_item("reserve_bytes", found.reserve_bytes)?;
    Ok(dict)
}

/// Removes what a store keeps in memory, on disk, or both: a dict, or None where there never was
/// one. Raises while anybody uses it.
#[pyfunction(name = "clear")]
pub(crate) fn clear_store(
    py: Python<'_>,
    ram_dir: PathBuf,
    cache_dir: Option<PathBuf>,
    memory: bool,
    disk: bool,
) -> PyResult<Option<Bound<'_, PyDict>>> {
    let cleared =
        py.detach(|| clear(&ram_dir, cache_dir.as_deref(), memory, disk)).map_err(to_python)?;
    let Some(cleared) = cleared else { return Ok(None) };
    let dict = PyDict::new(py);
    dict.set_item("memory_bytes", cleared.memory_bytes)?;
    dict.set_item("objects", cleared.disk.objects)?;
    dict.set_item("disk_bytes", cleared.disk.bytes)?;
    dict.set_item("foreign", cleared.disk.foreign)?;
    Ok(Some(dict))
}
