//! Digests for identities: BLAKE3 of buffers and of parts of files, and object keys.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use lakecache_core::{Error, Namespace, ObjectKey};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{ConfigError, to_python};

/// Bytes of a file hashed per read.
const CHUNK_BYTES: usize = 1 << 20;

/// Reads `N * 32` bytes as keys.
pub(crate) fn parse_keys(keys: &[u8]) -> PyResult<Vec<ObjectKey>> {
    let (keys, rest) = keys.as_chunks::<32>();
    if !rest.is_empty() {
        return Err(ConfigError::new_err(format!(
            "keys are a multiple of 32 bytes, not {}",
            keys.len() * 32 + rest.len()
        )));
    }
    Ok(keys.iter().map(|key| ObjectKey(*key)).collect())
}

/// Reads exactly 32 bytes.
pub(crate) fn parse_digest(what: &str, digest: &[u8]) -> PyResult<[u8; 32]> {
    digest
        .try_into()
        .map_err(|_| ConfigError::new_err(format!("{what} is {} bytes long, not 32", digest.len())))
}

/// The keys of the objects of `kind` whose last token blocks have these hashes, 32 bytes each.
#[pyfunction]
pub(crate) fn derive_keys<'py>(
    py: Python<'py>,
    namespace: &[u8],
    kind: u8,
    block_hashes: Vec<Vec<u8>>,
) -> PyResult<Bound<'py, PyBytes>> {
    let namespace = Namespace(parse_digest("a namespace digest", namespace)?);
    let mut keys = Vec::with_capacity(block_hashes.len() * 32);
    for hash in &block_hashes {
        keys.extend_from_slice(&ObjectKey::derive(&namespace, kind, hash).0);
    }
    Ok(PyBytes::new(py, &keys))
}

/// The BLAKE3 digest of a contiguous buffer, 32 bytes.
#[pyfunction]
pub(crate) fn blake3<'py>(py: Python<'py>, data: PyBuffer<u8>) -> PyResult<Bound<'py, PyBytes>> {
    let bytes = data.to_vec(py)?;
    let digest = py.detach(move || ::blake3::hash(&bytes));
    Ok(PyBytes::new(py, digest.as_bytes()))
}

/// The BLAKE3 digest of the given (offset, length) ranges of a file, one after the other, or of the
/// whole file; 32 bytes. A range that ends past the file's end raises.
#[pyfunction]
#[pyo3(signature = (path, ranges=None))]
pub(crate) fn blake3_file<'py>(
    py: Python<'py>,
    path: PathBuf,
    ranges: Option<Vec<(u64, u64)>>,
) -> PyResult<Bound<'py, PyBytes>> {
    let digest = py
        .detach(|| hash_ranges(&path, ranges))
        .map_err(|error| to_python(Error::io(format!("reading {}", path.display()), error)))?;
    Ok(PyBytes::new(py, digest.as_bytes()))
}

fn hash_ranges(
    path: &std::path::Path,
    ranges: Option<Vec<(u64, u64)>>,
) -> std::io::Result<::blake3::Hash> {
    let file = File::open(path)?;
    let ranges = match ranges {
        Some(ranges) => ranges,
        None => vec![(0, file.metadata()?.len())],
    };
    let mut hasher = ::blake3::Hasher::new();
    let mut buffer = vec![0; CHUNK_BYTES];
    for (mut offset, mut left) in ranges {
        while left > 0 {
            let count = usize::try_from(left).unwrap_or(usize::MAX).min(CHUNK_BYTES);
            file.read_exact_at(&mut buffer[..count], offset)?;
            hasher.update(&buffer[..count]);
            offset += count as u64;
            left -= count as u64;
        }
    }
    Ok(hasher.finalize())
}
