//! What the core has to say, kept until Python asks for it: the core's threads hold locks and must
//! never wait for the interpreter.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use log::{Level, LevelFilter, Log, Metadata, Record};
use pyo3::prelude::*;

/// Kept messages; when nobody asks, the oldest go.
const MESSAGES_MAX: usize = 256;
/// A place in the code is heard once in this time; a failing disk would say the same without end.
const QUIET: Duration = Duration::from_secs(30);

static MESSAGES: Messages = Messages { waiting: AtomicBool::new(false), state: Mutex::new(None) };

struct Messages {
    /// Whether a look into `state` is worth a lock.
    waiting: AtomicBool,
    state: Mutex<Option<State>>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<(Level, String)>,
    places: HashMap<(&'static str, u32), Place>,
}

struct Place {
    heard: Instant,
    left_out: u64,
}

impl State {
    fn add(&mut self, level: Level, mut text: String, place: (&'static str, u32), now: Instant) {
        if let Some(known) = self.places.get_mut(&place) {
            if now.duration_since(known.heard) < QUIET {
                known.left_out += 1;
                return;
            }
            if known.left_out > 0 {
                text = format!("{text} (and {} more since the last one)", known.left_out);
            }
        }
        self.places.insert(place, Place { heard: now, left_out: 0 });
        if self.queue.len() == MESSAGES_MAX {
            self.queue.pop_front();
        }
        self.queue.push_back((level, text));
    }
}

impl Log for Messages {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= Level::Info && metadata.target().starts_with("lakecache")
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let place = (record.file_static().unwrap_or(""), record.line().unwrap_or(0));
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = state.get_or_insert_default();
        kept.add(record.level(), record.args().to_string(), place, Instant::now());
        self.waiting.store(!kept.queue.is_empty(), Ordering::Release);
    }

    fn flush(&self) {}
}

/// Begins to keep messages. A process has one logger: loading the module again changes nothing.
pub(crate) fn keep() {
    if log::set_logger(&MESSAGES).is_ok() {
        log::set_max_level(LevelFilter::Info);
    }
}

/// What the core has said since the last call, oldest first: Python's level and the text.
///
/// Without news it costs one atomic load.
#[pyfunction]
pub(crate) fn take_messages() -> Vec<(u8, String)> {
    if !MESSAGES.waiting.load(Ordering::Acquire) {
        return Vec::new();
    }
    // In a forked child the lock may be held by a thread that exists no more.
    let Ok(mut state) = MESSAGES.state.try_lock() else { return Vec::new() };
    MESSAGES.waiting.store(false, Ordering::Release);
    let Some(kept) = state.as_mut() else { return Vec::new() };
    kept.queue.drain(..).map(|(level, text)| (number(level), text)).collect()
}

/// The levels of Python's logging.
fn number(level: Level) -> u8 {
    match level {
        Level::Error => 40,
        Level::Warn => 30,
        Level::Info => 20,
        Level::Debug | Level::Trace => 10,
    }
}
