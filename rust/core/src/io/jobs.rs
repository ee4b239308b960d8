//! A few threads for blocking work: opens and leases before write-back.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::queue::IDLE;
use super::{Job, JobPriority, locked};
use crate::sys::fork;
use crate::{Error, Result};

/// Opens that wait at most: the chunks of a few very long prompts.
const DEMAND_LIMIT: usize = 64 << 10;

/// Write-backs that wait at most.
const WRITE_BACK_LIMIT: usize = 1024;

/// Runs jobs until it is dropped. Callers push and threads pop, both under the mutex.
pub(super) struct Jobs {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Write-backs that may run at a time, less than all threads: an open never waits for a write.
    writers_limit: usize,
    generation: u64,
}

#[derive(Default)]
struct State {
    demand: VecDeque<Job>,
    write_back: VecDeque<Job>,
    running: usize,
    writing: usize,
    closed: bool,
}

impl Jobs {
    pub(super) fn start(threads: usize) -> Result<Self> {
        let threads = threads.max(2);
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
            writers_limit: threads / 2,
            generation: fork::generation(),
        });
        let jobs = Self { shared };
        for index in 0..threads {
            let shared = Arc::clone(&jobs.shared);
            std::thread::Builder::new()
                .name(format!("lakecache-job-{index}"))
                .spawn(move || shared.work())
                .map_err(|error| Error::io("starting a thread for jobs", error))?;
        }
        Ok(jobs)
    }

    pub(super) fn run(&self, job: Job, priority: JobPriority) -> std::result::Result<(), Job> {
        if fork::generation() != self.shared.generation {
            return Err(job);
        }
        let mut state = locked(&self.shared.state);
        let closed = state.closed;
        let (queue, limit) = match priority {
            JobPriority::Demand => (&mut state.demand, DEMAND_LIMIT),
            JobPriority::WriteBack => (&mut state.write_back, WRITE_BACK_LIMIT),
        };
        if closed || queue.len() >= limit {
            return Err(job);
        }
        queue.push_back(job);
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
        let waiting = (std::mem::take(&mut state.demand), std::mem::take(&mut state.write_back));
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
        while let Some((job, priority)) = self.next() {
            if catch_unwind(AssertUnwindSafe(job)).is_err() {
                log::error!("a background job panicked; its thread goes on");
            }
            let mut state = locked(&self.state);
            state.running -= 1;
            if priority == JobPriority::WriteBack {
                state.writing -= 1;
            }
            drop(state);
            self.changed.notify_all();
        }
    }

    fn next(&self) -> Option<(Job, JobPriority)> {
        let mut state = locked(&self.state);
        loop {
            if let Some(job) = state.demand.pop_front() {
                state.running += 1;
                return Some((job, JobPriority::Demand));
            }
            if state.writing < self.writers_limit
                && let Some(job) = state.write_back.pop_front()
            {
                state.running += 1;
                state.writing += 1;
                return Some((job, JobPriority::WriteBack));
            }
            if state.closed {
                return None;
            }
            state =
                self.changed.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
