//! What a forked child must not inherit: descriptors whose locks prove its parent's life.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// Descriptors registered at a time, in all: two for each member and one for each ring.
const SLOTS: usize = 1024;

const FREE: i32 = -1;

static GENERATION: AtomicU64 = AtomicU64::new(0);
static FILES: [AtomicI32; SLOTS] = [const { AtomicI32::new(FREE) }; SLOTS];
static HANDLER: Once = Once::new();

/// A number that changes in a forked child. What was opened under another one is not ours.
pub fn generation() -> u64 {
    install();
    GENERATION.load(Ordering::Relaxed)
}

/// Closes `file` in every child forked from now on, until the guard is dropped. Drop it before the
/// descriptor is closed.
pub fn close_in_child(file: BorrowedFd<'_>) -> Guard {
    install();
    let file = file.as_raw_fd();
    for (index, slot) in FILES.iter().enumerate() {
        if slot.compare_exchange(FREE, file, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            return Guard(Some(index));
        }
    }
    log::warn!("more than {SLOTS} lock files are open; a forked child may keep a lock alive");
    Guard(None)
}

/// Ends a registration when dropped.
#[derive(Debug)]
pub struct Guard(Option<usize>);

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(index) = self.0 {
            FILES[index].store(FREE, Ordering::Release);
        }
    }
}

fn install() {
    HANDLER.call_once(|| {
        // SAFETY: the handler makes only calls that are safe after fork: atomics and close(2).
        let status = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        if status != 0 {
            log::warn!("no fork handler could be installed (error {status})");
        }
    });
}

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    for slot in &FILES {
        let file = slot.load(Ordering::Relaxed);
        if file != FREE {
            // SAFETY: the child's copy of a descriptor that its owner, a value that the child must
            // not use and that checks the generation, still lists. The slot stays taken: the child's
            // copy of the guard frees it.
            unsafe { libc::close(file) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::sys::lock::LockFile;

    #[test]
    fn a_forked_child_keeps_no_lock_alive() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let lock = LockFile::open(&path).unwrap();
        assert!(lock.try_exclusive(0).unwrap());
        // SAFETY: the child only sleeps and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: async-signal-safe calls.
            unsafe {
                libc::sleep(60);
                libc::_exit(0)
            }
        }
        assert!(child > 0);
        drop(lock);
        let other = LockFile::open(&path).unwrap();
        let freed = other.exclusive_within(0, Duration::from_secs(20));
        // SAFETY: our own child.
        unsafe { libc::kill(child, libc::SIGKILL) };
        // SAFETY: as above; no status is wanted.
        unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
        assert!(freed.unwrap());
    }
}
