//! How much there is: of file systems, memory, control groups and descriptors.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::{Resource, Rlimit};

use crate::{Error, Result};

/// The size of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FsSpace {
    /// All of it, in bytes.
    pub total: u64,
    /// What we may still use, in bytes.
    pub free: u64,
}

/// The memory limit of our control group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CgroupMemory {
    /// The limit in bytes.
    pub limit: u64,
    /// What is used, less the inactive file pages, which the kernel gives back on demand.
    pub used_without_inactive_file: u64,
}

/// The space of the file system that holds `path`.
pub fn fs_space(path: &Path) -> Result<FsSpace> {
    let stat = rustix::fs::statvfs(path).map_err(|error| {
        Error::io(format!("asking for the free space of {}", path.display()), error)
    })?;
    Ok(FsSpace { total: stat.f_blocks * stat.f_frsize, free: stat.f_bavail * stat.f_frsize })
}

/// `MemAvailable`, in bytes; the largest number where the system doesn't tell.
pub fn mem_available() -> u64 {
    fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| {
            let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
            line.split_whitespace().nth(1)?.parse::<u64>().ok()
        })
        .map_or(u64::MAX, |kib| kib.saturating_mul(1024))
        .min(super::fault::memory_available())
}

/// The tightest memory limit above us (cgroup v2, else v1), where there is one.
pub fn cgroup_limit() -> Option<CgroupMemory> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    groups
        .lines()
        .filter_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            let path = path.trim_start_matches('/');
            if controllers.is_empty() {
                Some(levels(Path::new("/sys/fs/cgroup"), path, &V2))
            } else if controllers.split(',').any(|name| name == "memory") {
                Some(levels(Path::new("/sys/fs/cgroup/memory"), path, &V1))
            } else {
                None
            }
        })
        .flatten()
        .min_by_key(|group| group.limit.saturating_sub(group.used_without_inactive_file))
}

struct Names {
    limit: &'static str,
    used: &'static str,
    inactive: &'static str,
}

const V2: Names = Names { limit: "memory.max", used: "memory.current", inactive: "inactive_file " };
const V1: Names = Names {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    inactive: "total_inactive_file ",
};

/// The limits of a group and of those above it.
fn levels(root: &Path, path: &str, names: &Names) -> Vec<CgroupMemory> {
    let mut found = Vec::new();
    let mut dir: PathBuf = root.join(path);
    loop {
        found.extend(group(&dir, names));
        if dir == root || !dir.pop() {
            return found;
        }
    }
}

fn group(dir: &Path, names: &Names) -> Option<CgroupMemory> {
    let number = |file: &str| fs::read_to_string(dir.join(file)).ok()?.trim().parse::<u64>().ok();
    let limit = number(names.limit)?;
    let used = number(names.used)?;
    let stat = fs::read_to_string(dir.join("memory.stat")).ok().unwrap_or_default();
    let inactive = stat
        .lines()
        .find_map(|line| line.strip_prefix(names.inactive)?.trim().parse::<u64>().ok())
        .unwrap_or(0);
    Some(CgroupMemory { limit, used_without_inactive_file: used.saturating_sub(inactive) })
}

/// Raises the soft limit of open descriptors to the hard one: every disk lease is an open file.
pub fn raise_nofile() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
        if let Err(error) = rustix::process::setrlimit(Resource::Nofile, raised) {
            log::debug!("the limit of open files stays at {:?}: {error}", limit.current);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_tells_its_sizes() {
        let space = fs_space(Path::new("/")).unwrap();
        assert!(space.total > 0 && space.free <= space.total);
        assert!(mem_available() > 0);
        let error = fs_space(Path::new("/nowhere/at/all")).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENOENT));
    }

    #[test]
    fn a_group_counts_inactive_file_pages_as_free() {
        let dir = tempfile::tempdir().unwrap();
        let child = dir.path().join("child");
        fs::create_dir(&child).unwrap();
        for (name, text) in [
            ("memory.max", "1000\n"),
            ("memory.current", "700\n"),
            ("memory.stat", "anon 5\ninactive_file 300\nactive_file 9\n"),
        ] {
            fs::write(child.join(name), text).unwrap();
        }
        fs::write(dir.path().join("memory.max"), "max\n").unwrap();
        let found = levels(dir.path(), "child", &V2);
        assert_eq!(found, [CgroupMemory { limit: 1000, used_without_inactive_file: 400 }]);
    }
}
