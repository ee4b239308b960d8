//! Pieces that wait to be read: first come, first served.
//!
//! Callers push under the mutex, I/O threads pop under it; nobody runs foreign code while holding it.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::locked;
use super::request::Piece;
use crate::sys::fork;
use crate::{Error, ErrorKind, Result};

/// An idle thread looks around this often even if nobody wakes it, so that no wait is unbounded.
pub(super) const IDLE: Duration = Duration::from_secs(5);

pub(super) struct Queue {
    state: Mutex<State>,
    ready: Condvar,
    /// Signalled when an I/O thread ends.
    ended: Condvar,
    /// Pieces that wait or are in flight.
    depth: AtomicUsize,
    limit: usize,
    generation: u64,
}

#[derive(Default)]
struct State {
    pieces: VecDeque<Piece>,
    closed: bool,
    threads: usize,
}

impl Queue {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            state: Mutex::default(),
            ready: Condvar::new(),
            ended: Condvar::new(),
            depth: AtomicUsize::new(0),
            limit,
            generation: fork::generation(),
        }
    }

    /// Whether the queue can take a request now.
    pub(super) fn admit(&self) -> Result<()> {
        if fork::generation() != self.generation {
            return Err(Error::new(
                ErrorKind::Forked,
                "reads can't be submitted in a forked child",
            ));
        }
        let state = locked(&self.state);
        if state.closed {
            return Err(Error::new(ErrorKind::Closed, "the I/O engine was shut down"));
        }
        // The limit is one of requests; each has at least one piece and mostly not many.
        if state.pieces.len() > self.limit.saturating_mul(32) {
            return Err(Error::new(ErrorKind::NoSpace, "too many reads wait"));
        }
        Ok(())
    }

    /// Adds a request's pieces. Closed meanwhile: the I/O threads or we refuse them.
    pub(super) fn push(&self, pieces: Vec<Piece>) {
        self.depth.fetch_add(pieces.len(), Ordering::Relaxed);
        let many = pieces.len() > 1;
        let mut state = locked(&self.state);
        if state.closed && state.threads == 0 {
            drop(state);
            for piece in pieces {
                piece.refuse(Some(closed()));
                self.ended_one();
            }
            return;
        }
        state.pieces.extend(pieces);
        drop(state);
        if many {
            self.ready.notify_all();
        } else {
            self.ready.notify_one();
        }
    }

    /// The next piece worth reading. Moot ones, and all after the close, are ended here.
    pub(super) fn pop(&self) -> Option<Piece> {
        loop {
            let (piece, closed) = locked(&self.state).pop()?;
            if let Some(piece) = self.sift(piece, closed) {
                return Some(piece);
            }
        }
    }

    /// As [`Queue::pop`], waiting for one; `None` after the close.
    pub(super) fn wait(&self) -> Option<Piece> {
        loop {
            let mut state = locked(&self.state);
            let (piece, closed) = loop {
                if let Some(next) = state.pop() {
                    break next;
                }
                if state.closed {
                    return None;
                }
                state =
                    self.ready.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner).0;
            };
            drop(state);
            if let Some(piece) = self.sift(piece, closed) {
                return Some(piece);
            }
        }
    }

    fn sift(&self, piece: Piece, is_closed: bool) -> Option<Piece> {
        if is_closed {
            piece.refuse(Some(closed()));
        } else if piece.is_moot() {
            piece.refuse(None);
        } else {
            return Some(piece);
        }
        self.ended_one();
        None
    }

    /// A popped piece has ended.
    pub(super) fn ended_one(&self) {
        self.depth.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn depth(&self) -> usize {
        self.depth.load(Ordering::Relaxed)
    }

    pub(super) fn is_closed(&self) -> bool {
        locked(&self.state).closed
    }

    pub(super) fn close(&self) {
        if fork::generation() == self.generation {
            locked(&self.state).closed = true;
            self.ready.notify_all();
        }
    }

    /// Counts an I/O thread until the guard is dropped.
    pub(super) fn enter(self: &std::sync::Arc<Self>) -> Presence {
        locked(&self.state).threads += 1;
        Presence(std::sync::Arc::clone(self))
    }

    /// Waits until no I/O thread is left; `false` when `deadline` passed before.
    pub(super) fn wait_ended(&self, deadline: Duration) -> bool {
        if fork::generation() != self.generation {
            return false;
        }
        let end = Instant::now() + deadline;
        let mut state = locked(&self.state);
        while state.threads > 0 {
            let Some(rest) = end.checked_duration_since(Instant::now()) else { return false };
            state = self.ended.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl State {
    fn pop(&mut self) -> Option<(Piece, bool)> {
        Some((self.pieces.pop_front()?, self.closed))
    }
}

/// An I/O thread's entry in the count. The last one to go ends what is still queued.
pub(super) struct Presence(std::sync::Arc<Queue>);

impl Drop for Presence {
    fn drop(&mut self) {
        let left = {
            let mut state = locked(&self.0.state);
            state.threads -= 1;
            state.threads
        };
        if left == 0 && self.0.is_closed() {
            while self.0.pop().is_some() {}
        }
        self.0.ended.notify_all();
    }
}

fn closed() -> io::Error {
    io::Error::other("the I/O engine was shut down")
}
