//! The `io_uring` engine: its handle, and the thread that owns the ring.
//!
//! The thread alone touches the ring, so the kernel may take the single-issuer shortcuts. Callers
//! push to the queue and signal an event, which the ring itself reads: a sleeping thread sees new
//! work and completions in one wait, and never spins.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use super::finish::Finisher;
use super::jobs::Jobs;
use super::probe::Probe;
use super::queue::{IDLE, Queue};
use super::request::{Piece, Progress};
use super::ring::{Completion, DEPTH, Ring};
use super::{Engine, EngineKind, EngineOptions, Job, ReadRequest, Segment, locked, pread};
use crate::sys::event::Event;
use crate::sys::fork;
use crate::{Error, ErrorKind, Result};

/// The ring must be made and have answered the probe by then.
const START: Duration = Duration::from_secs(20);

/// How often a ring that failed is looked at until the kernel has ended its reads.
const DRAIN: Duration = Duration::from_millis(100);

pub(super) struct Uring {
    shared: Arc<Shared>,
    jobs: Jobs,
    piece_bytes: u32,
}

struct Shared {
    queue: Arc<Queue>,
    event: Event,
    /// Whether the event was signalled since the thread last looked: saves callers the system call.
    signalled: AtomicBool,
    /// Memory to be registered.
    memory: Mutex<VecDeque<Segment>>,
    registered_bytes: AtomicU64,
    bytes_in_flight: u64,
    pread_threads: usize,
}

impl Uring {
    /// Makes a ring, on its thread, and reads the probe's block with it.
    pub(super) fn start(
        options: &EngineOptions,
        life: BorrowedFd<'_>,
        probe: Probe,
    ) -> Result<Self> {
        let life = life.try_clone_to_owned().map_err(|e| Error::io("copying a descriptor", e))?;
        let shared = Arc::new(Shared {
            queue: Arc::new(Queue::new(options.queued_requests)),
            event: Event::new()?,
            signalled: AtomicBool::new(false),
            memory: Mutex::default(),
            registered_bytes: AtomicU64::new(0),
            bytes_in_flight: options.bytes_in_flight,
            pread_threads: options.pread_threads,
        });
        let (answer, started) = mpsc::sync_channel(1);
        // The thread can't borrow the probe, as it may outlive this call; it gets what it needs to
        // read, and the bytes are judged here.
        let file = probe.file.try_clone().map_err(|e| Error::io("copying a descriptor", e))?;
        let target = Segment { address: probe.address(), bytes: super::BLOCK_BYTES };
        let of_thread = Arc::clone(&shared);
        let finisher = Finisher::start(options.done_threads, &shared.queue)?;
        std::thread::Builder::new()
            .name("lakecache-ring".into())
            .spawn(move || serve(&of_thread, finisher, (life, file), target, &answer))
            .map_err(|error| Error::io("starting a thread for the ring", error))?;
        let Ok(result) = started.recv_timeout(START) else {
            shared.queue.close();
            probe.abandon();
            return Err(Error::new(ErrorKind::Timeout, "the ring did not answer in time"));
        };
        let read = result?;
        let engine = Self {
            shared,
            jobs: Jobs::start(options.job_threads)?,
            piece_bytes: options.piece_bytes,
        };
        probe.check(read).map_err(|error| Error::io("reading through the ring", error))?;
        Ok(engine)
    }
}

impl Shared {
    fn signal(&self) {
        if !self.signalled.swap(true, Ordering::AcqRel) {
            self.event.signal();
        }
    }
}

impl Engine for Uring {
    fn submit(&self, request: ReadRequest) -> Result<()> {
        self.shared.queue.admit()?;
        self.shared.queue.push(Piece::cut(request, self.piece_bytes));
        self.shared.signal();
        Ok(())
    }

    fn run(&self, job: Job) -> std::result::Result<(), Job> {
        self.jobs.run(job)
    }

    fn register(&self, memory: Segment) {
        locked(&self.shared.memory).push_back(memory);
        self.shared.signal();
    }

    fn registered_bytes(&self) -> u64 {
        self.shared.registered_bytes.load(Ordering::Relaxed)
    }

    fn kind(&self) -> EngineKind {
        EngineKind::IoUring
    }

    fn queue_depth(&self) -> usize {
        self.shared.queue.depth()
    }

    fn shutdown(&self, deadline: Duration) {
        let end = Instant::now() + deadline;
        self.shared.queue.close();
        self.shared.signal();
        if !self.shared.queue.wait_ended(deadline) {
            log::warn!("reads were still in progress after {deadline:?}; their memory stays taken");
        }
        self.jobs.shutdown(end.saturating_duration_since(Instant::now()));
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.shared.queue.close();
        self.shared.signal();
    }
}

/// The ring's thread.
fn serve(
    shared: &Shared,
    finisher: Finisher,
    (life, file): (OwnedFd, OwnedFd),
    target: Segment,
    answer: &mpsc::SyncSender<Result<u32>>,
) {
    // Declared before the ring, so that it goes after it: who waits for the thread's end may rely on
    // the ring being closed.
    let presence = shared.queue.enter();
    let ring = make(life).and_then(|mut ring| {
        let read = ring.read_one(&file, target)?;
        Ok((ring, read))
    });
    drop(file);
    let mut ring = match ring {
        Ok((ring, read)) => {
            if answer.send(Ok(read)).is_err() {
                return;
            }
            ring
        }
        Err(error) => {
            // Nobody waits any more if this can't be sent.
            drop(answer.send(Err(error)));
            return;
        }
    };
    let in_child = fork::close_in_child(ring.as_fd());
    let (retry, slots) = (VecDeque::new(), Slots::new());
    let mut server = Server { shared, finisher, retry, bytes: 0, slots };
    if let Err(error) = server.run(&mut ring) {
        server.survive(&mut ring, &error);
    }
    drop(in_child);
    drop(ring);
    drop(presence);
}

/// Makes the ring. Our copy of `life` goes at once: from then on it lives in the ring's table only,
/// where no forked child inherits it.
fn make(life: OwnedFd) -> Result<Ring> {
    let in_child = fork::close_in_child(life.as_fd());
    let ring = Ring::new(life.as_raw_fd());
    drop(in_child);
    drop(life);
    ring
}

/// The state of the ring's thread.
struct Server<'a> {
    shared: &'a Shared,
    finisher: Finisher,
    /// Pieces that need another system call, before all others.
    retry: VecDeque<Piece>,
    bytes: u64,
    slots: Slots,
}

/// Pieces in flight, by the number that their completion carries.
struct Slots {
    pieces: Vec<Option<Piece>>,
    free: Vec<u32>,
}

impl Slots {
    fn new() -> Self {
        Self { pieces: (0..DEPTH).map(|_| None).collect(), free: (0..DEPTH).rev().collect() }
    }

    fn is_empty(&self) -> bool {
        self.free.len() == self.pieces.len()
    }

    fn put(&mut self, piece: Piece) -> Result<u32, Piece> {
        match self.free.pop() {
            Some(slot) => {
                self.pieces[slot as usize] = Some(piece);
                Ok(slot)
            }
            None => Err(piece),
        }
    }

    fn take(&mut self, slot: u32) -> Option<Piece> {
        let piece = self.pieces.get_mut(slot as usize)?.take()?;
        self.free.push(slot);
        Some(piece)
    }
}

impl Server<'_> {
    /// Serves until the queue is closed and every completion is reaped.
    fn run(&mut self, ring: &mut Ring) -> Result<()> {
        loop {
            self.register(ring);
            self.fill(ring);
            let closing = self.shared.queue.is_closed();
            if closing && self.slots.is_empty() && self.retry.is_empty() {
                return self.disarm(ring);
            }
            ring.arm(&self.shared.event)?;
            ring.submit_and_wait(IDLE)?;
            self.reap(ring);
        }
    }

    /// Registers one range at most: pinning takes milliseconds, for which reads must wait.
    fn register(&self, ring: &mut Ring) {
        let (memory, more) = {
            let mut waiting = locked(&self.shared.memory);
            (waiting.pop_front(), !waiting.is_empty())
        };
        if let Some(memory) = memory {
            let bytes = ring.register(memory);
            self.shared.registered_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        if more {
            self.shared.signal();
        }
    }

    /// Starts reads as long as there is room.
    fn fill(&mut self, ring: &mut Ring) {
        while !self.slots.free.is_empty() && self.bytes < self.shared.bytes_in_flight {
            let Some(piece) = self.retry.pop_front().or_else(|| self.shared.queue.pop()) else {
                return;
            };
            let (read, bytes) = (piece.next_read(), piece.bytes());
            let slot = match self.slots.put(piece) {
                Ok(slot) => slot,
                Err(piece) => return self.retry.push_front(piece),
            };
            if ring.push(&read, slot) {
                self.bytes += bytes;
            } else {
                self.retry.extend(self.slots.take(slot));
                return;
            }
        }
    }

    fn reap(&mut self, ring: &mut Ring) {
        while let Some(completion) = ring.next() {
            match completion {
                Completion::Event => self.shared.signalled.store(false, Ordering::Release),
                Completion::Read { slot, result } => {
                    let Some(piece) = self.slots.take(slot) else {
                        log::error!("the ring completed a read {slot} that nobody started");
                        continue;
                    };
                    self.bytes -= piece.bytes();
                    match piece.completed(result) {
                        Progress::Unfinished(piece) => self.retry.push_back(piece),
                        Progress::Ended => self.shared.queue.ended_one(),
                        Progress::Last(ending) => {
                            self.shared.queue.ended_one();
                            // With nothing else to read, this thread does it sooner.
                            if self.shared.queue.depth() == 0 && self.finisher.is_idle() {
                                ending.tell();
                            } else {
                                self.finisher.push(ending);
                            }
                        }
                    }
                }
            }
        }
    }

    /// Ends the read of the event, the last one in flight.
    fn disarm(&mut self, ring: &mut Ring) -> Result<()> {
        while ring.is_armed() {
            self.shared.event.signal();
            ring.submit_and_wait(IDLE)?;
            self.reap(ring);
        }
        Ok(())
    }

    /// The ring broke. Threads take the waiting reads over; those in flight keep their memory until
    /// the kernel has ended them (I1), for which the ring is looked at now and then.
    fn survive(&mut self, ring: &mut Ring, error: &Error) {
        log::error!("the ring failed, reading with threads from now on: {error}");
        if let Err(error) = pread::spawn(&self.shared.queue, self.shared.pread_threads) {
            log::error!("no threads for reads: {error}; reads fail from now on");
            self.shared.queue.close();
        }
        for slot in ring.never_submitted() {
            self.retry.extend(self.slots.take(slot));
        }
        loop {
            for piece in std::mem::take(&mut self.retry) {
                pread::read(piece);
                self.shared.queue.ended_one();
            }
            if self.slots.is_empty() {
                return;
            }
            std::thread::sleep(DRAIN);
            ring.collect();
            self.reap(ring);
        }
    }
}
