//! Pins of this member: a count for each entry here, one bit for the member in the shared entry.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::entry::{Entry, State};

const SHARDS: usize = 16;

/// Generation and count of one pinned entry.
type Counts = HashMap<u32, (u64, u32)>;

/// The counts, by entry.
#[derive(Default)]
pub(super) struct Pins {
    shards: [Mutex<Counts>; SHARDS],
}

impl Pins {
    fn shard(&self, i: u32) -> MutexGuard<'_, Counts> {
        self.shards[i as usize % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pins the object of `generation` in entry `i`; false if it is there no more. An object that
    /// is dying is refused to newcomers, even while others pin it.
    pub(super) fn pin(&self, i: u32, generation: u64, entry: &Entry, member: u8) -> bool {
        let mut counts = self.shard(i);
        if let Some((pinned, count)) = counts.get_mut(&i) {
            // Our bit keeps the entry as it is: another generation is gone.
            let word = entry.load();
            let alive =
                *pinned == generation && (word.is_live() || word.state() == State::Evicting);
            *count += u32::from(alive);
            return alive;
        }
        entry.set_pin(member);
        // The bit is set before the word is read; the evictor does the opposite.
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        let word = entry.load();
        let alive = word.generation() == generation && word.is_live();
        if alive {
            counts.insert(i, (generation, 1));
        } else {
            entry.clear_pin(member);
        }
        alive
    }

    /// Notes the pin that came with a new entry: its bit was set under the writer lock.
    pub(super) fn adopt(&self, i: u32, generation: u64, entry: &Entry, member: u8) {
        let mut counts = self.shard(i);
        // A late pin of the entry's former object may have cleared the bit; nobody but us knows the
        // new object, which FILLING protects from eviction.
        entry.set_pin(member);
        counts.insert(i, (generation, 1));
    }

    /// Takes one pin off. True: it was the last one and the object is dying.
    pub(super) fn unpin(&self, i: u32, generation: u64, entry: &Entry, member: u8) -> bool {
        let mut counts = self.shard(i);
        let Some((pinned, count)) = counts.get_mut(&i) else { return false };
        if *pinned != generation {
            return false;
        }
        *count -= 1;
        if *count > 0 {
            return false;
        }
        counts.remove(&i);
        let dying = entry.load().state();
        entry.clear_pin(member);
        dying == State::Dying || entry.load().state() == State::Dying
    }
}
