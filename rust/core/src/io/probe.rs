//! Chooses an engine by a real read: that a ring can be made says little, and reads of nothing lie.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use super::pread::Pread;
use super::uring::Uring;
use super::{BLOCK_BYTES, Engine, EngineChoice, EngineOptions};
use crate::sys::map::Mapping;
use crate::sys::{self, file};
use crate::{Error, ErrorKind, Result};

const BLOCK: usize = 4096;
const _: () = assert!(BLOCK as u64 == BLOCK_BYTES);

/// An engine, and why it is this one.
pub struct Opened {
    /// The engine.
    pub engine: Arc<dyn Engine>,
    /// Why it is not the best one, in words for the user.
    pub reason: Option<String>,
    /// Whether files in the probed directory can be read with direct I/O.
    pub direct: bool,
}

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opened")
            .field("engine", &self.engine.kind())
            .field("reason", &self.reason)
            .field("direct", &self.direct)
            .finish()
    }
}

/// A file to read and memory to read it into.
pub(super) struct Probe {
    pub(super) file: OwnedFd,
    /// What the file holds; nothing where the file system had no room for a block.
    expected: Vec<u8>,
    memory: Mapping,
    direct: bool,
}

/// Opens the engine of `choice` for files in `probe_dir`. A ring holds `life`, the open file whose
/// lock proves that this member lives, until the kernel has ended all its reads.
///
/// # Errors
/// [`ErrorKind::Unavailable`] if `io_uring` is asked for by name and doesn't work here.
pub fn open_engine(
    choice: EngineChoice,
    probe_dir: &Path,
    life: BorrowedFd<'_>,
    options: &EngineOptions,
) -> Result<Opened> {
    let mut probe = Probe::new(probe_dir)?;
    probe.by_pread(probe_dir)?;
    let direct = probe.direct;
    let buffered = (!direct).then(|| {
        format!(
            "the file system of {} has no direct I/O (O_DIRECT): reads go through the page cache, \
             which costs more CPU and memory; another file system (ext4, xfs) for cache_dir has it",
            probe_dir.display()
        )
    });
    if choice == EngineChoice::Pread {
        let engine = Arc::new(Pread::start(options)?);
        return Ok(Opened { engine, reason: buffered, direct });
    }
    match Uring::start(options, life, probe) {
        Ok(engine) => Ok(Opened { engine: Arc::new(engine), reason: buffered, direct }),
        Err(error) if choice == EngineChoice::IoUring => Err(Error::new(
            ErrorKind::Unavailable,
            format!("io_engine: io_uring was asked for, but {}", why_not(&error)),
        )),
        Err(error) => {
            let threads = options.pread_threads;
            let mut reason = format!("{}; reading with {threads} threads instead", why_not(&error));
            if let Some(buffered) = buffered {
                reason = format!("{reason}; and {buffered}");
            }
            log::warn!("{reason}");
            Ok(Opened { engine: Arc::new(Pread::start(options)?), reason: Some(reason), direct })
        }
    }
}

/// Why the ring can't be had and what to do about it.
fn why_not(error: &Error) -> String {
    match error.errno() {
        Some(libc::EPERM) => {
            let by_sysctl = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled")
                .is_ok_and(|value| value.trim() != "0");
            if by_sysctl {
                "io_uring is blocked (EPERM) by kernel.io_uring_disabled; to allow it: `sysctl \
                 kernel.io_uring_disabled=0` on the host"
                    .into()
            } else {
                "io_uring is blocked (EPERM), most likely by the container's seccomp profile; to \
                 allow it: run the container with a profile that permits io_uring_setup, \
                 io_uring_enter and io_uring_register (Docker: --security-opt seccomp=<profile>), \
                 and keep the sysctl kernel.io_uring_disabled at 0"
                    .into()
            }
        }
        Some(libc::ENOSYS) => {
            "this kernel or sandbox has no io_uring (ENOSYS); Linux 5.11 or newer has it".into()
        }
        Some(libc::ENOMEM) => format!(
            "io_uring was refused memory ({error}); raise the limit of locked memory (ulimit -l, \
             Docker: --ulimit memlock=-1)"
        ),
        _ => format!("io_uring does not work here ({error})"),
    }
}

impl Probe {
    fn new(dir: &Path) -> Result<Self> {
        let file = match file::unnamed_in(dir, false)? {
            Some(file) => file,
            None => named_and_removed(dir)?,
        };
        let block = file::random_bytes::<BLOCK>();
        let expected = match file::pwrite_all(&file, &block, 0) {
            Ok(()) => block.to_vec(),
            // A full file system: then the file stays empty, and a read must say so.
            Err(error) => {
                log::debug!("no block for the probe in {}: {error}", dir.display());
                file::set_len(file.as_fd(), 0)?;
                Vec::new()
            }
        };
        let direct = file::set_direct(&file)?;
        Ok(Self { file, expected, memory: shared_block()?, direct })
    }

    /// Finds out whether direct reads work, by one.
    fn by_pread(&mut self, dir: &Path) -> Result<()> {
        loop {
            let what = || format!("reading a file in {}", dir.display());
            // SAFETY: a block that is ours.
            match unsafe { file::pread_at(self.file.as_fd(), self.address(), 4096, 0) } {
                Ok(read) => return self.check(read).map_err(|error| Error::io(what(), error)),
                Err(error) if self.direct && error.raw_os_error() == Some(libc::EINVAL) => {
                    self.direct = false;
                    sys::file::clear_direct(&self.file)?;
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::io(what(), error)),
            }
        }
    }

    /// Gives the memory up for good: a read that never ended may still write to it (I1).
    pub(super) fn abandon(self) {
        // Once in a process's life, one block.
        Box::leak(Box::new(self.memory));
    }

    /// Where to read to.
    pub(super) fn address(&self) -> *mut u8 {
        self.memory.at(0, BLOCK_BYTES)
    }

    /// Whether `read` bytes arrived and are the right ones; wipes them for the next try.
    pub(super) fn check(&self, read: u32) -> std::io::Result<()> {
        let mut found = vec![0; self.expected.len()];
        // SAFETY: a block that is ours and no longer written to by the kernel.
        unsafe { self.address().copy_to(found.as_mut_ptr(), found.len()) };
        // SAFETY: as above.
        unsafe { self.address().write_bytes(0, BLOCK) };
        if read as usize == self.expected.len() && found == self.expected {
            return Ok(());
        }
        Err(std::io::Error::other(format!(
            "a test read gave {read} bytes that are not the {} written before",
            self.expected.len()
        )))
    }
}

fn shared_block() -> Result<Mapping> {
    let memory = file::memfd("lakecache-probe")?;
    file::set_len(memory.as_fd(), BLOCK_BYTES)?;
    file::allocate(memory.as_fd(), 0, BLOCK_BYTES)?;
    Mapping::of(memory.as_fd(), BLOCK_BYTES)
}

fn named_and_removed(dir: &Path) -> Result<OwnedFd> {
    let name = u64::from_ne_bytes(file::random_bytes());
    let path = dir.join(format!(".probe-{name:016x}"));
    let opened = file::open_or_create(&path)?;
    file::unlink(&path)?;
    Ok(opened)
}
