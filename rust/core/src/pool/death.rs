//! When what a dead member held may be given away.
//!
//! A member's liveness lock says that its process will run no more, and (because its rings hold the
//! lock's file) that its reads from files have landed. It says nothing of a GPU: the kernel closes
//! a dying process's files in the order of their numbers, so the lock may come free while the
//! driver's files are open still, and a copy from the GPU is yet to land. A member that has said
//! that it makes such copies is given time, and its process must have closed all of its files.

use std::collections::HashMap;
use std::io::ErrorKind as IoKind;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// From when its death was first seen here until such a member may be reaped. A driver may put the
/// closing of its files off to a thread of its own, and a process in another PID namespace can't
/// be seen to end: for both a copy gets this long to land.
const SETTLE: Duration = Duration::from_secs(1);
/// A process that takes longer to end than this is worth a warning. What it holds stays held.
const WARN_AFTER: Duration = Duration::from_mins(1);

/// What tells the holders of a member's number apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) pid: u32,
    pub(super) start_time: u64,
    /// No two joins of a pool have the same.
    pub(super) joined: u64,
}

/// Whether a process may still have files open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Process {
    MayHaveFiles,
    /// It has closed all of them, or can't be seen from here.
    Ended,
}

/// The deaths that this handle has seen, by member number.
#[derive(Debug, Default)]
pub(super) struct Deaths {
    seen: Mutex<HashMap<u8, Death>>,
}

#[derive(Debug)]
struct Death {
    who: Identity,
    since: Instant,
    warned: bool,
}

impl Deaths {
    /// Whether no copy of a GPU can be under way any more for `who`, which is dead as `member`.
    /// False the first time that this is asked of a death. `process` is asked late and seldom.
    pub(super) fn is_settled(
        &self,
        member: u8,
        who: Identity,
        now: Instant,
        process: impl FnOnce() -> Process,
    ) -> bool {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let unseen = || Death { who, since: now, warned: false };
        let death = seen.entry(member).or_insert_with(unseen);
        if death.who != who {
            *death = unseen();
        }
        let passed = now.saturating_duration_since(death.since);
        if passed < SETTLE {
            return false;
        }
        if process() == Process::Ended {
            return true;
        }
        if passed >= WARN_AFTER && !death.warned {
            death.warned = true;
            log::warn!(
                "process {} was killed {} s ago and has still not ended (is its GPU stuck?): the \
                 memory that it was copying to is used again once it has",
                who.pid,
                passed.as_secs()
            );
        }
        false
    }

    /// Its number may be another's from now on.
    pub(super) fn forget(&self, member: u8) {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).remove(&member);
    }
}

/// What `proc`, a directory like `/proc`, says of a process. Errors that prove nothing count as
/// [`Process::MayHaveFiles`].
pub(super) fn look_up(proc: &Path, pid: u32, start_time: u64) -> Process {
    let stat = match std::fs::read(proc.join(pid.to_string()).join("stat")) {
        Ok(bytes) => Stat::parse(&bytes),
        Err(error) => {
            // Refused: a process of another user, hence another process.
            let gone = matches!(error.kind(), IoKind::NotFound | IoKind::PermissionDenied)
                || error.raw_os_error() == Some(libc::ESRCH);
            return if gone { Process::Ended } else { Process::MayHaveFiles };
        }
    };
    match stat {
        // Zero: the member could not tell when it started.
        Some(stat)
            if stat.has_closed_files() || (start_time != 0 && stat.start_time != start_time) =>
        {
            Process::Ended
        }
        _ => Process::MayHaveFiles,
    }
}

/// When this process started, in clock ticks since boot; 0 where that cannot be known.
pub(super) fn own_start_time() -> u64 {
    let bytes = std::fs::read("/proc/self/stat").unwrap_or_default();
    Stat::parse(&bytes).map_or(0, |stat| stat.start_time)
}

/// Of `/proc/<pid>/stat`.
struct Stat {
    state: char,
    threads: u64,
    start_time: u64,
}

impl Stat {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let text = String::from_utf8_lossy(bytes);
        // The second field is the program's name, in parentheses, and may hold anything.
        let (_, after_name) = text.rsplit_once(')')?;
        let fields: Vec<&str> = after_name.split_whitespace().collect();
        Some(Self {
            state: fields.first()?.chars().next()?,
            threads: fields.get(17)?.parse().ok()?,
            start_time: fields.get(19)?.parse().ok()?,
        })
    }

    /// A thread is a zombie after it has let go of the files, which the threads share; it goes from
    /// the count of threads later still, but for the first one, which stays while others live.
    fn has_closed_files(&self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x') && self.threads <= 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PID: u32 = 77;
    const WHO: Identity = Identity { pid: PID, start_time: 5000, joined: 1 };

    fn never() -> Process {
        panic!("the process is looked for too early")
    }

    #[test]
    fn a_death_settles_a_second_after_it_was_first_seen() {
        let (deaths, start) = (Deaths::default(), Instant::now());
        let after = |millis| start + Duration::from_millis(millis);
        assert!(!deaths.is_settled(3, WHO, start, never));
        assert!(!deaths.is_settled(3, WHO, after(999), never));
        assert!(deaths.is_settled(3, WHO, after(1000), || Process::Ended));
        assert!(!deaths.is_settled(4, WHO, after(1000), never), "another number");
    }

    #[test]
    fn a_process_with_files_is_waited_for_without_end() {
        let (deaths, start) = (Deaths::default(), Instant::now());
        assert!(!deaths.is_settled(3, WHO, start, never));
        for seconds in [1, 59, 60, 61, 100_000] {
            let now = start + Duration::from_secs(seconds);
            assert!(!deaths.is_settled(3, WHO, now, || Process::MayHaveFiles));
            assert_eq!(deaths.seen.lock().unwrap()[&3].warned, seconds >= 60);
        }
        let now = start + Duration::from_secs(100_001);
        assert!(deaths.is_settled(3, WHO, now, || Process::Ended));
    }

    #[test]
    fn a_number_given_away_does_not_inherit_the_time() {
        let (deaths, start) = (Deaths::default(), Instant::now());
        let later = start + Duration::from_secs(10);
        let others = [
            Identity { pid: PID + 1, ..WHO },
            Identity { start_time: 5001, ..WHO },
            Identity { joined: 2, ..WHO },
        ];
        for other in others {
            assert!(!deaths.is_settled(3, WHO, start, never));
            assert!(!deaths.is_settled(3, other, later, never), "{other:?}");
            deaths.forget(3);
        }
        assert!(!deaths.is_settled(3, WHO, start, never));
        deaths.forget(3);
        assert!(!deaths.is_settled(3, WHO, later, never));
    }

    /// What a directory like `/proc` says where the process's file is `stat`.
    fn with_stat(stat: &[u8]) -> Process {
        let proc = tempfile::tempdir().unwrap();
        let dir = proc.path().join(PID.to_string());
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join("stat"), stat).unwrap();
        look_up(proc.path(), PID, 5000)
    }

    fn stat(state: char, threads: u32, start_time: u64) -> Vec<u8> {
        let before = "1 77 77 0 -1 4194560 0 0 0 0 0 0 0 0 20 0";
        format!("77 (a ) Z 1 (b) {state} {before} {threads} 0 {start_time} 0 0\n").into_bytes()
    }

    #[test]
    fn only_a_zombie_without_further_threads_has_closed_its_files() {
        for state in ['R', 'S', 'D', 'T', 't'] {
            assert_eq!(with_stat(&stat(state, 1, 5000)), Process::MayHaveFiles, "{state}");
        }
        assert_eq!(with_stat(&stat('Z', 2, 5000)), Process::MayHaveFiles, "a thread lives");
        assert_eq!(with_stat(&stat('Z', 1, 5000)), Process::Ended);
        assert_eq!(with_stat(&stat('X', 0, 5000)), Process::Ended);
    }

    #[test]
    fn another_process_of_that_number_is_another_one() {
        assert_eq!(with_stat(&stat('R', 8, 5001)), Process::Ended);
        let mut unreadable_name = stat('R', 8, 5000);
        unreadable_name[4] = 0xff;
        assert_eq!(with_stat(&unreadable_name), Process::MayHaveFiles);
    }

    #[test]
    fn what_is_not_there_has_ended_and_what_says_nothing_proves_nothing() {
        assert_eq!(look_up(tempfile::tempdir().unwrap().path(), PID, 5000), Process::Ended);
        assert_eq!(with_stat(b""), Process::MayHaveFiles);
        assert_eq!(with_stat(b"77 (name) Z 1"), Process::MayHaveFiles);
        let proc = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(proc.path().join(PID.to_string()).join("stat")).unwrap();
        assert_eq!(look_up(proc.path(), PID, 5000), Process::MayHaveFiles);
    }

    #[test]
    fn this_process_is_found() {
        let (proc, pid) = (Path::new("/proc"), std::process::id());
        assert_ne!(own_start_time(), 0);
        assert_eq!(look_up(proc, pid, own_start_time()), Process::MayHaveFiles);
        assert_eq!(look_up(proc, pid, own_start_time() + 1), Process::Ended);
        assert_eq!(look_up(proc, pid, 0), Process::MayHaveFiles);
    }
}
