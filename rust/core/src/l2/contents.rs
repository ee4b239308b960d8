//! What lies in a cache directory, seen without a pool. Nothing is ours but by its name and place.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::lease::header_of;
use super::scan::is_temporary;
use super::{MANIFEST, snapshot};
use crate::{Error, Namespace, ObjectKey, Result, sys};

/// The saved list of all objects.
const LIST: &str = "objects.snapshot";
/// How fast a namespace's loads were; written by the Python half.
const ESTIMATES: &str = "estimates.json";
/// These tell processes of each other, and always stay.
const KEPT: [&str; 4] = ["lock", "objects.lock", "pool-id", "pool-incarnation"];

/// Objects of one namespace on disk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stored {
    /// Number and bytes, headers included, by kind.
    pub kinds: BTreeMap<u8, (u64, u64)>,
    /// Number and bytes of files that are not what their name says; engines remove them.
    pub damaged: (u64, u64),
}

/// What lies in a cache directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Contents {
    /// By namespace.
    pub stored: BTreeMap<String, Stored>,
    /// What is not ours.
    pub foreign: Vec<PathBuf>,
}

/// What was removed from a cache directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Removed {
    /// Object files.
    pub objects: u64,
    /// Their bytes, headers included.
    pub bytes: u64,
    /// What is not ours and stays.
    pub foreign: Vec<PathBuf>,
}

/// What a name stands for.
enum What {
    Object(Namespace, ObjectKey),
    /// Can be made again from the objects, or was never finished.
    About,
    /// A directory that has been walked.
    Directory,
    Foreign,
}

/// Lists the objects under `cache_dir`; reads headers only of files that the saved list lacks.
pub fn contents(cache_dir: &Path) -> Result<Contents> {
    let known = snapshot::read(cache_dir);
    let mut found = Contents::default();
    walk(cache_dir, &mut |path, what| {
        let (namespace, key) = match what {
            What::Object(namespace, key) => (namespace, key),
            What::Foreign => {
                found.foreign.push(path.to_path_buf());
                return Ok(());
            }
            What::About | What::Directory => return Ok(()),
        };
        let Some(bytes) = length(path) else { return Ok(()) };
        let listed = known.get(&key).filter(|known| {
            known.namespace == namespace
                && super::format::file_bytes(known.info.payload_bytes) == Some(bytes)
        });
        let kind = match listed {
            Some(known) => Some(known.info.kind),
            None => kind_of(path, &namespace, &key, bytes)?,
        };
        let stored = found.stored.entry(namespace.hex()).or_default();
        let sum = match kind {
            Some(kind) => stored.kinds.entry(kind).or_default(),
            None => &mut stored.damaged,
        };
        *sum = (sum.0 + 1, sum.1 + bytes);
        Ok(())
    })?;
    Ok(found)
}

/// Removes the objects under `cache_dir` and what describes them. Nobody may use it meanwhile.
pub fn remove_contents(cache_dir: &Path) -> Result<Removed> {
    let mut removed = Removed::default();
    walk(cache_dir, &mut |path, what| {
        match what {
            What::Object(..) => {
                let bytes = length(path).unwrap_or(0);
                if sys::file::unlink(path)? {
                    removed.objects += 1;
                    removed.bytes += bytes;
                }
            }
            What::About => drop(sys::file::unlink(path)?),
            // One with something foreign in it stays.
            What::Directory => drop(sys::object::remove_dir(path)),
            What::Foreign => removed.foreign.push(path.to_path_buf()),
        }
        Ok(())
    })?;
    Ok(removed)
}

/// A file's length; `None` where it vanished.
fn length(path: &Path) -> Option<u64> {
    std::fs::symlink_metadata(path).ok().map(|found| found.len())
}

/// The kind of object that a file holds. `None`: it is damaged, or has just gone.
fn kind_of(path: &Path, namespace: &Namespace, key: &ObjectKey, bytes: u64) -> Result<Option<u8>> {
    let file = match sys::file::open_read(path, false) {
        Ok(Some(file)) => file,
        Ok(None) => return Ok(None),
        Err(error) if sys::file::is_unopenable(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    let header = header_of(&file, path)?;
    Ok(header.ok().filter(|it| it.check(namespace, key, bytes).is_ok()).map(|it| it.info.kind))
}

type Visit<'a> = &'a mut dyn FnMut(&Path, What) -> Result<()>;

fn walk(cache_dir: &Path, visit: Visit) -> Result<()> {
    for (path, name, is_dir) in names(cache_dir)? {
        let what = match Namespace::from_hex(&name) {
            Ok(namespace) if is_dir => {
                walk_namespace(&path, namespace, visit)?;
                What::Directory
            }
            _ if is_dir => What::Foreign,
            _ if KEPT.contains(&name.as_str()) => continue,
            _ if name == LIST || is_unfinished(&name) => What::About,
            _ => What::Foreign,
        };
        visit(&path, what)?;
    }
    Ok(())
}

fn walk_namespace(dir: &Path, namespace: Namespace, visit: Visit) -> Result<()> {
    for (path, name, is_dir) in names(dir)? {
        let shard = name.len() == 2 && name.bytes().all(|c| c.is_ascii_hexdigit());
        let what = if is_dir && shard {
            walk_shard(&path, &name, namespace, visit)?;
            What::Directory
        } else if !is_dir && (name == MANIFEST || name == ESTIMATES || is_unfinished(&name)) {
            What::About
        } else {
            What::Foreign
        };
        visit(&path, what)?;
    }
    Ok(())
}

fn walk_shard(dir: &Path, shard: &str, namespace: Namespace, visit: Visit) -> Result<()> {
    for (path, name, is_dir) in names(dir)? {
        let key = name.strip_suffix(".kv").filter(|hex| !is_dir && hex.starts_with(shard));
        let what = match key.and_then(|hex| ObjectKey::from_hex(hex).ok()) {
            Some(key) => What::Object(namespace, key),
            None if !is_dir && is_unfinished(&name) => What::About,
            None => What::Foreign,
        };
        visit(&path, what)?;
    }
    Ok(())
}

/// Whether a file has a name that only unfinished files of ours have.
fn is_unfinished(name: &str) -> bool {
    is_temporary(name) || matches!(name, ".pool-id.new" | ".pool-incarnation.new")
}

/// Every name in a directory, links not followed; empty where it vanished.
fn names(dir: &Path) -> Result<Vec<(PathBuf, String, bool)>> {
    let failed = |error| Error::io(format!("listing {}", dir.display()), error);
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        let is_dir = entry.file_type().map_err(failed)?.is_dir();
        found.push((entry.path(), entry.file_name().to_string_lossy().into_owned(), is_dir));
    }
    found.sort_unstable();
    Ok(found)
}
