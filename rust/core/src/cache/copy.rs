//! Copies between scattered pages of the engine and objects of the arena, by threads of our own.
//!
//! Ownership: a job belongs to the queue until a thread takes it; its addresses stay valid until its
//! result is polled (the engine keeps the blocks); the object is pinned for the time of the copy.

use std::collections::VecDeque;
use std::ptr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::cache::is_sound;
use crate::l1::{Arena, Slot, SlotState};

/// How long a thread rests when every load still waits for its bytes to arrive.
const POLL: Duration = Duration::from_micros(100);

/// How a job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All bytes were copied.
    Done,
    /// The object went away or was not what the job needs.
    Gone,
    /// The object's bytes did not arrive in time; nothing was copied.
    Deadline,
    /// What was copied is not what is stored.
    Mismatch,
}

/// One object's part and the fragments it is scattered over.
#[derive(Debug)]
pub struct Fragments {
    /// Where in the payload the first fragment's bytes lie; the others follow.
    pub object_offset: u64,
    /// The address of each fragment.
    pub addresses: Vec<u64>,
    /// Bytes of each fragment.
    pub fragment_bytes: u64,
}

#[derive(Debug)]
enum Direction {
    Load { deadline: Instant, verify: bool },
    Store,
}

#[derive(Debug)]
struct Job {
    id: u64,
    slot: Slot,
    fragments: Fragments,
    direction: Direction,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    results: Vec<(u64, Outcome)>,
    closed: bool,
}

struct Shared {
    arena: Arc<Arena>,
    queue: Mutex<Queue>,
    wake: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A pool of copying threads.
pub struct Copier {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Copier {
    /// Starts `threads` threads that copy to and from `arena`.
    pub fn new(arena: Arc<Arena>, threads: usize) -> Self {
        let shared = Arc::new(Shared { arena, queue: Mutex::default(), wake: Condvar::new() });
        let threads = (0..threads.max(1))
            .filter_map(|index| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("lakecache-copy-{index}"))
                    .spawn(move || run(&shared))
                    .ok()
            })
            .collect();
        Self { shared, threads: Mutex::new(threads) }
    }

    /// Queues the copy of an object's part into fragments, made as soon as the object is readable.
    ///
    /// # Safety
    /// Each address is writable for `fragment_bytes` until the job's result was polled, and nothing
    /// else reads or writes there meanwhile.
    pub unsafe fn load(
        &self,
        id: u64,
        slot: Slot,
        fragments: Fragments,
        deadline: Duration,
        verify: bool,
    ) {
        let deadline = Instant::now() + deadline;
        self.push(Job { id, slot, fragments, direction: Direction::Load { deadline, verify } });
    }

    /// Queues the copy of fragments into an object's part that is being filled.
    ///
    /// # Safety
    /// Each address is readable for `fragment_bytes` until the job's result was polled.
    pub unsafe fn store(&self, id: u64, slot: Slot, fragments: Fragments) {
        self.push(Job { id, slot, fragments, direction: Direction::Store });
    }

    fn push(&self, job: Job) {
        let mut queue = self.shared.lock();
        if queue.closed {
            queue.results.push((job.id, Outcome::Gone));
            return;
        }
        queue.jobs.push_back(job);
        drop(queue);
        self.shared.wake.notify_one();
    }

    /// Takes the results that have come since the last call.
    pub fn poll(&self) -> Vec<(u64, Outcome)> {
        std::mem::take(&mut self.shared.lock().results)
    }

    /// Ends the threads after the copies being made; queued jobs end as [`Outcome::Gone`].
    pub fn close(&self) {
        {
            let mut queue = self.shared.lock();
            queue.closed = true;
            let dropped: Vec<_> = queue.jobs.drain(..).map(|job| (job.id, Outcome::Gone)).collect();
            queue.results.extend(dropped);
        }
        self.shared.wake.notify_all();
        let threads =
            std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            if thread.join().is_err() {
                log::error!("a copying thread of LakeCache panicked");
            }
        }
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        self.close();
    }
}

fn run(shared: &Shared) {
    // Loads that were looked at in a row and still wait for their bytes.
    let mut waiting = 0;
    loop {
        let mut queue = shared.lock();
        let job = loop {
            if queue.closed {
                return;
            }
            if waiting > 0 && waiting >= queue.jobs.len() {
                let (guard, _) =
                    shared.wake.wait_timeout(queue, POLL).unwrap_or_else(PoisonError::into_inner);
                queue = guard;
                waiting = 0;
                continue;
            }
            match queue.jobs.pop_front() {
                Some(job) => break job,
                None => {
                    queue = shared.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
                }
            }
        };
        drop(queue);
        let outcome = attempt(&shared.arena, &job);
        let mut queue = shared.lock();
        match outcome {
            Some(outcome) => {
                queue.results.push((job.id, outcome));
                waiting = 0;
            }
            None if queue.closed => queue.results.push((job.id, Outcome::Gone)),
            None => {
                queue.jobs.push_back(job);
                waiting += 1;
            }
        }
    }
}

/// Makes the copy, or says `None` where the object's bytes are still to come.
fn attempt(arena: &Arena, job: &Job) -> Option<Outcome> {
    let wanted = match job.direction {
        Direction::Load { .. } => SlotState::Ready,
        Direction::Store => SlotState::Filling,
    };
    if let Direction::Load { deadline, .. } = job.direction
        && matches!(arena.state(job.slot), SlotState::Filling)
    {
        return (Instant::now() >= deadline).then_some(Outcome::Deadline);
    }
    if !arena.pin(job.slot) {
        return Some(Outcome::Gone);
    }
    let outcome = if arena.state(job.slot) == wanted { copy(arena, job) } else { Outcome::Gone };
    arena.unpin(job.slot);
    Some(outcome)
}

fn copy(arena: &Arena, job: &Job) -> Outcome {
    let Some(extents) = arena.extents(job.slot) else { return Outcome::Gone };
    let fragments = &job.fragments;
    let bytes = fragments.fragment_bytes * fragments.addresses.len() as u64;
    let Some(meta) = arena.meta(job.slot) else { return Outcome::Gone };
    if fragments.object_offset + bytes > meta.payload_bytes {
        return Outcome::Gone;
    }
    match job.direction {
        Direction::Store => {
            for_each_run(arena, &extents, fragments, |arena_bytes, page, count| {
                // SAFETY: the arena's run lies in an extent of a slot that we fill and have pinned;
                // the caller of `store` keeps the page readable; the two never overlap.
                unsafe { ptr::copy_nonoverlapping(page.cast_const(), arena_bytes, count) };
                true
            });
            Outcome::Done
        }
        Direction::Load { verify, .. } => {
            if verify && !is_sound(arena, job.slot) {
                return Outcome::Mismatch;
            }
            for_each_run(arena, &extents, fragments, |arena_bytes, page, count| {
                // SAFETY: the run is part of a pinned READY object, whose bytes don't change; the
                // caller of `load` owns the page; the two never overlap.
                unsafe { ptr::copy_nonoverlapping(arena_bytes.cast_const(), page, count) };
                true
            });
            let equal = !verify
                || for_each_run(arena, &extents, fragments, |arena_bytes, page, count| {
                    // SAFETY: as above, for reading.
                    let stored = unsafe { std::slice::from_raw_parts(arena_bytes, count) };
                    // SAFETY: as above, for reading.
                    let restored = unsafe { std::slice::from_raw_parts(page, count) };
                    stored == restored
                });
            if equal { Outcome::Done } else { Outcome::Mismatch }
        }
    }
}

/// Calls `each(arena address, page address, bytes)` for the longest runs that lie in one extent and
/// one fragment; stops and says `false` when `each` does.
fn for_each_run(
    arena: &Arena,
    extents: &[(u64, u64)],
    fragments: &Fragments,
    mut each: impl FnMut(*mut u8, *mut u8, usize) -> bool,
) -> bool {
    let mut skip = fragments.object_offset;
    let mut extents = extents.iter().copied();
    let mut extent = (0, 0);
    for &address in &fragments.addresses {
        let mut done = 0;
        while done < fragments.fragment_bytes {
            while extent.1 <= skip {
                skip -= extent.1;
                match extents.next() {
                    Some(next) => extent = next,
                    None => return false,
                }
            }
            let count = (extent.1 - skip).min(fragments.fragment_bytes - done);
            let stored = arena.address(extent.0 + skip, count);
            let page = ptr::with_exposed_provenance_mut::<u8>(
                usize::try_from(address + done).unwrap_or_default(),
            );
            if !each(stored, page, usize::try_from(count).unwrap_or_default()) {
                return false;
            }
            done += count;
            skip += count;
        }
    }
    true
}
