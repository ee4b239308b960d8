//! The engine without `io_uring`: threads that call `pread`, with direct I/O like the ring.
//!
//! A killed process's reads need no care here: its threads end only when their reads have.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::jobs::Jobs;
use super::queue::Queue;
use super::request::{Piece, Progress};
use super::{Engine, EngineKind, EngineOptions, Job, ReadRequest};
use crate::sys;
use crate::{Error, Result};

pub(super) struct Pread {
    queue: Arc<Queue>,
    jobs: Jobs,
    piece_bytes: u32,
}

impl Pread {
    pub(super) fn start(options: &EngineOptions) -> Result<Self> {
        let queue = Arc::new(Queue::new(options.queued_requests));
        let engine = Self {
            queue,
            jobs: Jobs::start(options.job_threads)?,
            piece_bytes: options.piece_bytes,
        };
        spawn(&engine.queue, options.pread_threads)?;
        Ok(engine)
    }
}

/// Starts threads that serve `queue` until it is closed.
pub(super) fn spawn(queue: &Arc<Queue>, threads: usize) -> Result<()> {
    for index in 0..threads.max(1) {
        let presence = queue.enter();
        let queue = Arc::clone(queue);
        std::thread::Builder::new()
            .name(format!("lakecache-read-{index}"))
            .spawn(move || {
                let _presence = presence;
                while let Some(piece) = queue.wait() {
                    read(piece);
                    queue.ended_one();
                }
            })
            .map_err(|error| Error::io("starting a thread for reads", error))?;
    }
    Ok(())
}

/// Reads a piece to its end.
pub(super) fn read(mut piece: Piece) {
    loop {
        let next = piece.next_read();
        // SAFETY: the submitter vouches for the memory until the request is done.
        let result =
            unsafe { sys::file::pread_at(piece.file(), next.address, next.bytes, next.offset) };
        match piece.completed(result) {
            Progress::Unfinished(unfinished) => piece = unfinished,
            Progress::Ended => return,
            Progress::Last(ending) => return ending.tell(),
        }
    }
}

impl Engine for Pread {
    fn submit(&self, request: ReadRequest) -> Result<()> {
        self.queue.admit()?;
        self.queue.push(Piece::cut(request, self.piece_bytes));
        Ok(())
    }

    fn run(&self, job: Job) -> std::result::Result<(), Job> {
        self.jobs.run(job)
    }

    fn kind(&self) -> EngineKind {
        EngineKind::Pread
    }

    fn queue_depth(&self) -> usize {
        self.queue.depth()
    }

    fn shutdown(&self, deadline: Duration) {
        let end = Instant::now() + deadline;
        self.queue.close();
        if !self.queue.wait_ended(deadline) {
            log::warn!("reads were still in progress after {deadline:?}");
        }
        self.jobs.shutdown(end.saturating_duration_since(Instant::now()));
    }
}

impl Drop for Pread {
    fn drop(&mut self) {
        self.queue.close();
    }
}
