//! Counters and the event log: what the tiers did, visible at zero from the start.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::ObjectKey;

/// Events kept until somebody drains them; older ones are dropped and counted.
const EVENTS_MAX: usize = 16_384;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Monotonic counters of one open cache, all zero at its start.
        #[derive(Debug, Default)]
        pub struct Counters {
            $($(#[$doc])* pub $name: AtomicU64,)*
        }

        impl Counters {
            /// Every counter with its name.
            pub fn snapshot(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.load(Ordering::Relaxed)),)*]
            }
        }
    };
}

counters! {
    /// Objects made readable in memory by a store.
    stores,
    /// Payload bytes of those.
    store_bytes,
    /// Stores not made: no room in memory.
    stores_no_room,
    /// Stores not made: the writer lock was not to be had in time.
    stores_busy,
    /// Stores given up by their caller.
    stores_abandoned,
    /// Objects leased from memory.
    memory_hits,
    /// Objects leased from disk.
    disk_hits,
    /// Keys asked for a lease and found in neither tier.
    misses,
    /// Payload reads from disk that were begun.
    disk_payload_reads,
    /// Payload bytes read from disk.
    disk_read_bytes,
    /// Objects brought from disk into memory.
    promotions,
    /// Disk objects refused: damaged, short, or not what their name says.
    damaged,
    /// Disk reads that failed with an error of the system.
    read_errors,
    /// Loads given up because no room or no answer came in time.
    load_deadlines,
    /// Objects that could not be opened at their lease though the index had them.
    lease_races,
    /// Objects written to disk.
    writes,
    /// Payload bytes of those.
    write_bytes,
    /// Objects found on disk already at their write.
    writes_exist,
    /// Writes not made: the disk limit or the free-space reserve.
    writes_no_room,
    /// Writes that failed with an error of the system.
    write_errors,
    /// Events dropped because nobody drained the log.
    events_dropped,
}

/// One entry of the event log.
#[derive(Debug, Clone)]
pub struct Event {
    /// What happened: `store`, `hit`, `read`, `promote`, `write`, `damaged`.
    pub op: &'static str,
    /// Where: `memory` or `disk`.
    pub tier: &'static str,
    /// To which object.
    pub key: ObjectKey,
    /// Its payload.
    pub bytes: u64,
}

/// Counters and events together.
#[derive(Debug, Default)]
pub struct Stats {
    /// The counters.
    pub counters: Counters,
    events: Mutex<VecDeque<Event>>,
}

impl Stats {
    pub(crate) fn add(counter: &AtomicU64, amount: u64) {
        counter.fetch_add(amount, Ordering::Relaxed);
    }

    pub(crate) fn event(&self, op: &'static str, tier: &'static str, key: ObjectKey, bytes: u64) {
        let Ok(mut events) = self.events.lock() else { return };
        if events.len() == EVENTS_MAX {
            events.pop_front();
            Self::add(&self.counters.events_dropped, 1);
        }
        events.push_back(Event { op, tier, key, bytes });
    }

    /// Takes the logged events, oldest first.
    pub fn drain_events(&self) -> Vec<Event> {
        self.events.lock().map(|mut events| events.drain(..).collect()).unwrap_or_default()
    }
}
