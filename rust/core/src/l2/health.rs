//! Rest after an unexpected failure: a disk that fails is asked again later, less and less often.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::locked;

const REST_MIN: Duration = Duration::from_secs(1);
const REST_MAX: Duration = Duration::from_mins(1);

/// Whether writes are worth a try.
#[derive(Debug, Default)]
pub(super) struct Health(Mutex<Option<(Instant, Duration)>>);

impl Health {
    /// Whether it is still too early for another try.
    pub(super) fn rests(&self) -> bool {
        locked(&self.0).is_some_and(|(since, rest)| since.elapsed() < rest)
    }

    /// A failure: rest, twice as long as the last time.
    pub(super) fn failed(&self) {
        let mut state = locked(&self.0);
        let rest = state.map_or(REST_MIN, |(_, rest)| (rest * 2).min(REST_MAX));
        *state = Some((Instant::now(), rest));
    }

    /// A success ends it. True: there was something to end.
    pub(super) fn worked(&self) -> bool {
        locked(&self.0).take().is_some()
    }
}
