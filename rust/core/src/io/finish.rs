//! Threads that tell how reads ended: a checksum on the ring's thread would hold up the next reads.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::locked;
use super::queue::{IDLE, Queue};
use super::request::Ending;
use crate::{Error, Result};

/// Takes endings until it is dropped; those it has taken are told in any case.
pub(super) struct Finisher {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Ending>,
    telling: usize,
    closed: bool,
}

impl Finisher {
    /// Starts the threads, which count among those that `queue` waits for.
    pub(super) fn start(threads: usize, queue: &Arc<Queue>) -> Result<Self> {
        let finisher = Self { shared: Arc::default() };
        for index in 0..threads.max(1) {
            let presence = queue.enter();
            let shared = Arc::clone(&finisher.shared);
            std::thread::Builder::new()
                .name(format!("lakecache-done-{index}"))
                .spawn(move || {
                    let _presence = presence;
                    while let Some(ending) = shared.next() {
                        ending.tell();
                        locked(&shared.state).telling -= 1;
                    }
                })
                .map_err(|error| Error::io("starting a thread for completions", error))?;
        }
        Ok(finisher)
    }

    /// Whether it has told all that it took.
    pub(super) fn is_idle(&self) -> bool {
        let state = locked(&self.shared.state);
        state.waiting.is_empty() && state.telling == 0
    }

    pub(super) fn push(&self, ending: Ending) {
        locked(&self.shared.state).waiting.push_back(ending);
        self.shared.changed.notify_one();
    }
}

impl Drop for Finisher {
    fn drop(&mut self) {
        locked(&self.shared.state).closed = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn next(&self) -> Option<Ending> {
        let mut state = locked(&self.state);
        loop {
            if let Some(ending) = state.waiting.pop_front() {
                state.telling += 1;
                return Some(ending);
            }
            if state.closed {
                return None;
            }
            state =
                self.changed.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
