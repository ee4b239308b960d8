//! A few threads for blocking work: opening files that requests wait for.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::queue::IDLE;
use super::{Job, locked};
use crate::sys::fork;
use crate::{Error, Result};

/// Jobs that wait at most: the chunks of a few very long prompts.
const WAITING_MAX: usize = 64 << 10;

/// Runs jobs until it is dropped. Callers push and threads pop, both under the mutex.
pub(super) struct Jobs {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    generation: u64,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    running: usize,
    closed: bool,
}

impl Jobs {
    pub(super) fn start(threads: usize) -> Result<Self> {
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
            generation: fork::generation(),
        });
        let jobs = Self { shared };
        for index in 0..threads.max(1) {
            let shared = Arc::clone(&jobs.shared);
            std::thread::Builder::new()
                .name(format!("lakecache-job-{index}"))
                .spawn(move || shared.work())
                .map_err(|error| Error::io("starting a thread for jobs", error))?;
        }
        Ok(jobs)
    }

    pub(super) fn run(&self, job: Job) -> std::result::Result<(), Job> {
        if fork::generation() != self.shared.generation {
            return Err(job);
        }
        let mut state = locked(&self.shared.state);
        if state.closed || state.waiting.len() >= WAITING_MAX {
            return Err(job);
        }
        state.waiting.push_back(job);
        drop(state);
        self.shared.changed.notify_one();
        Ok(())
    }

    /// Drops what waits and waits for what runs; `false` when `deadline` passed before.
    pub(super) fn shutdown(&self, deadline: Duration) -> bool {
        if fork::generation() != self.shared.generation {
            return false;
        }
        let end = Instant::now() + deadline;
        let mut state = locked(&self.shared.state);
        state.closed = true;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        // What the jobs own may call back; not under the mutex.
        drop(waiting);
        self.shared.changed.notify_all();
        let mut state = locked(&self.shared.state);
        while state.running > 0 {
            let Some(rest) = end.checked_duration_since(Instant::now()) else { return false };
            let waited = self.shared.changed.wait_timeout(state, rest);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl Drop for Jobs {
    fn drop(&mut self) {
        self.shutdown(Duration::ZERO);
    }
}

impl Shared {
    fn work(&self) {
        while let Some(job) = self.next() {
            if catch_unwind(AssertUnwindSafe(job)).is_err() {
                log::error!("a background job panicked; its thread goes on");
            }
            locked(&self.state).running -= 1;
            self.changed.notify_all();
        }
    }

    fn next(&self) -> Option<Job> {
        let mut state = locked(&self.state);
        loop {
            if let Some(job) = state.waiting.pop_front() {
                state.running += 1;
                return Some(job);
            }
            if state.closed {
                return None;
            }
            state =
                self.changed.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
