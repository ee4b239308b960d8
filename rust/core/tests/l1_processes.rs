//! Goal: threads and processes that store, look up, pin and evict at once never see bytes that are
//! not the key's, and a process that is killed at any moment leaves nothing behind.
//! Method: this binary starts itself as children; every object's bytes follow from its key.

#![allow(clippy::print_stderr, reason = "a watchdog has no other way to say why it ends the run")]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use lakecache_core::ObjectKey;
use lakecache_core::l1::{Arena, ObjectMeta, Purpose, Reserve, Slot, SlotState};
use lakecache_core::pool::{Pool, PoolOptions, Role, Wait};

const KEYS: u64 = 400;
const MODE: &str = "LAKECACHE_TEST_L1_CHILD";
const DIR: &str = "LAKECACHE_TEST_L1_DIR";
const READY: &str = "@ready";
const PATIENCE: Duration = Duration::from_secs(20);

/// Ends the whole test binary if it is not dropped in time: a hang must not wait for the CI.
struct Watchdog {
    _alive: mpsc::Sender<()>,
}

fn watchdog() -> Watchdog {
    let (alive, watched) = mpsc::channel::<()>();
    std::thread::spawn(move || {
        if watched.recv_timeout(Duration::from_mins(2)) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("watchdog: the test hangs");
            std::process::abort();
        }
    });
    Watchdog { _alive: alive }
}

fn open(dir: &Path, role: Role) -> (Arc<Pool>, Arena) {
    let pool = Pool::open(PoolOptions {
        ram_dir: dir.join("ram"),
        cache_dir: Some(dir.join("cache")),
        cpu_bytes: 12 << 20,
        shared: true,
        l1_entries: Some(128),
        l2_records: Some(64),
        role,
        ..PoolOptions::private(12 << 20)
    })
    .expect("the pool opens");
    (Arc::clone(&pool), Arena::new(pool))
}

fn temp_dir() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("lakecache-l1-").tempdir_in("/dev/shm").expect("a tmpfs")
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < end, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn key(n: u64) -> ObjectKey {
    lakecache_core::ObjectKey::derive(&lakecache_core::Namespace([1; 32]), 0, &n.to_le_bytes())
}

fn meta(n: u64) -> ObjectMeta {
    ObjectMeta {
        key: key(n),
        namespace: 0,
        kind: 0,
        parent: (!n.is_multiple_of(8)).then(|| key(n - 1)),
        first_token: 0,
        last_token: 1,
        ranks: 1,
        payload_bytes: 4096 * (1 + n % 61) - n % 3 * 8,
    }
}

/// Calls `each(word, expected)` for the first and the last whole word of each page of the payload.
fn for_words(arena: &Arena, slot: Slot, n: u64, mut each: impl FnMut(&AtomicU64, u64)) {
    let mut page = 0;
    for (offset, bytes) in arena.extents(slot).expect("a pinned slot has extents") {
        for at in (0..bytes).step_by(4096) {
            for word in [0, 4096 - 24] {
                #[allow(clippy::cast_ptr_alignment, reason = "offsets are multiples of eight")]
                let address = arena.address(offset + at + word, 8).cast::<AtomicU64>();
                // SAFETY: in the arena, aligned; accesses of racing processes are atomic.
                each(unsafe { &*address }, n << 32 | page << 12 | word);
            }
            page += 1;
        }
    }
}

fn fill(arena: &Arena, slot: Slot, n: u64) {
    for_words(arena, slot, n, |word, expected| word.store(expected, Ordering::Relaxed));
}

/// The slot is pinned, and was READY when it was.
fn verify(arena: &Arena, slot: Slot, n: u64) {
    assert_eq!(arena.state(slot), SlotState::Ready, "a pinned READY object stays READY");
    let found = arena.meta(slot).expect("a pinned slot has a meta");
    assert_eq!((found.key, found.payload_bytes), (key(n), meta(n).payload_bytes));
    assert_eq!(arena.checksum(slot), Some(n));
    for_words(arena, slot, n, |word, expected| {
        assert_eq!(word.load(Ordering::Relaxed), expected, "object {n}");
    });
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
}

/// One random operation.
fn step(arena: &Arena, random: &mut Random) {
    let n = random.below(KEYS);
    let mut found = Vec::new();
    arena.lookup(&[key(n)], &mut found);
    match found[0] {
        Some((slot, SlotState::Ready)) => {
            if arena.pin(slot) {
                verify(arena, slot, n);
                arena.unpin(slot);
            }
        }
        Some((slot, _)) => {
            if arena.pin(slot) {
                if arena.state(slot) == SlotState::Ready {
                    verify(arena, slot, n);
                }
                arena.unpin(slot);
            }
        }
        None => {
            let purpose = if random.below(2) == 0 { Purpose::Load } else { Purpose::Store };
            let wait = Wait::Within(Duration::from_millis(20));
            if let Ok(Reserve::Slot(slot)) = arena.reserve(&meta(n), purpose, wait) {
                fill(arena, slot, n);
                if random.below(16) == 0 {
                    arena.abandon(slot);
                } else {
                    arena.publish(slot, n, random.below(8) == 0);
                }
                arena.unpin(slot);
            }
        }
    }
    match random.below(64) {
        0 => drop(arena.clear()),
        1..8 => arena.dirty(4).into_iter().for_each(|slot| arena.set_clean(slot)),
        8..24 => {
            let first = n / 8 * 8;
            arena.touch(&(first..first + 8).map(key).collect::<Vec<_>>());
        }
        _ => {}
    }
}

/// Everybody else is gone: nothing may be left that can't be freed.
fn assert_nothing_leaked(pool: &Pool, arena: &Arena) {
    wait_until("dead members are reaped and all is freed", || {
        pool.reap_dead();
        arena.dirty(1000).into_iter().for_each(|slot| arena.set_clean(slot));
        arena.clear();
        arena.gauges().entries == 0
    });
    arena.check().expect("the tables are sound");
    let gauges = arena.gauges();
    assert_eq!((gauges.bytes_used, gauges.pinned, gauges.filling, gauges.dirty), (0, 0, 0, 0));
}

struct Running {
    child: Child,
    _output: BufReader<ChildStdout>,
}

impl Running {
    /// Starts this binary's `child` test in `mode`, and waits until it says that it is ready.
    fn start(mode: &str, dir: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this binary"))
            .args(["child", "--exact", "--nocapture"])
            .env(MODE, mode)
            .env(DIR, dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a child starts");
        let mut output = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut line = String::new();
        while !line.contains(READY) {
            line.clear();
            assert_ne!(output.read_line(&mut line).expect("a pipe"), 0, "child {mode} failed");
        }
        Self { child, _output: output }
    }

    fn kill(mut self) {
        self.child.kill().expect("the child runs");
        self.child.wait().expect("the child ends");
    }

    fn finish(mut self) {
        assert!(self.child.wait().expect("the child ends").success(), "the child failed");
    }
}

/// What a child does; as a test of its own it does nothing.
#[test]
fn child() {
    let (Ok(mode), Some(dir)) = (std::env::var(MODE), std::env::var_os(DIR)) else { return };
    let _watchdog = watchdog();
    let (pool, arena) = open(Path::new(&dir), Role::Worker);
    let ready_for_ever = || {
        println!("{READY}");
        std::thread::sleep(Duration::from_mins(2));
    };
    let wait = Wait::Within(PATIENCE);
    match mode.as_str() {
        "fill" => {
            for n in 0..5 {
                let made = arena.reserve(&meta(n), Purpose::Load, wait);
                assert!(matches!(made, Ok(Reserve::Slot(_))), "{made:?}");
            }
            ready_for_ever();
        }
        "gpu" => {
            pool.declare_gpu_copies();
            // All there is, a page at a time: whoever wants room needs ours.
            for n in 0.. {
                match arena.reserve(&meta(61 * n), Purpose::Store, wait) {
                    Ok(Reserve::Slot(_)) => {}
                    Ok(Reserve::NoRoom) => break,
                    other => panic!("{other:?}"),
                }
            }
            ready_for_ever();
        }
        "pin" => {
            let mut found = Vec::new();
            arena.lookup(&[key(100), key(101)], &mut found);
            assert!(found.into_iter().flatten().filter(|(slot, _)| arena.pin(*slot)).count() == 2);
            ready_for_ever();
        }
        "claim" => {
            assert_eq!(arena.dirty(10).len(), 1);
            ready_for_ever();
        }
        "write" => drop(pool.write(wait, |_| ready_for_ever())),
        seed => {
            let mut random = Random(seed.parse().expect("a seed"));
            println!("{READY}");
            for _ in 0..4000 {
                step(&arena, &mut random);
            }
            pool.leave();
        }
    }
}

fn store(arena: &Arena, n: u64, dirty: bool) -> Slot {
    let made = arena.reserve(&meta(n), Purpose::Store, Wait::Within(PATIENCE));
    let Ok(Reserve::Slot(slot)) = made else { panic!("{made:?}") };
    fill(arena, slot, n);
    assert!(arena.publish(slot, n, dirty));
    arena.unpin(slot);
    slot
}

fn opened(dir: &Path) -> (Arc<Pool>, Arena) {
    let (pool, arena) = open(dir, Role::Engine);
    wait_until("memory is reserved", || {
        let gauges = arena.gauges();
        gauges.bytes_reserved == gauges.capacity
    });
    (pool, arena)
}

#[test]
fn threads_that_pin_race_threads_that_evict() {
    let _watchdog = watchdog();
    let dir = temp_dir();
    let (pool, arena) = opened(dir.path());
    std::thread::scope(|scope| {
        for seed in 1..=4 {
            let arena = &arena;
            scope.spawn(move || {
                let mut random = Random(seed);
                (0..6000).for_each(|_| step(arena, &mut random));
            });
        }
    });
    arena.check().expect("the tables are sound");
    assert_eq!(arena.gauges().pinned, 0);
    assert!(arena.gauges().evictions > 0, "the test evicts");
    assert_nothing_leaked(&pool, &arena);
}

#[test]
fn what_a_killed_process_was_filling_is_freed() {
    let _watchdog = watchdog();
    let dir = temp_dir();
    let (pool, arena) = opened(dir.path());
    let child = Running::start("fill", dir.path());
    assert_eq!(arena.gauges().filling, 5);
    let joined = arena.reserve(&meta(0), Purpose::Load, Wait::Within(PATIENCE));
    let Ok(Reserve::Exists(joined)) = joined else { panic!("{joined:?}") };
    assert!(arena.pin(joined));
    pool.reap_dead();
    assert_eq!(arena.gauges().filling, 5, "its owner lives");
    child.kill();
    wait_until("the slots are reaped", || {
        pool.reap_dead();
        arena.gauges().filling == 0
    });
    assert_eq!(arena.state(joined), SlotState::Gone);
    assert_eq!(arena.gauges().entries, 1, "our pin keeps one's memory");
    arena.check().expect("the tables are sound");
    arena.unpin(joined);
    assert_nothing_leaked(&pool, &arena);
}

#[test]
fn what_a_killed_process_was_filling_from_a_gpu_is_not_given_away_at_once() {
    let _watchdog = watchdog();
    let dir = temp_dir();
    let (pool, arena) = opened(dir.path());
    let child = Running::start("gpu", dir.path());
    let filling = arena.gauges().filling;
    assert!(filling > 0);
    child.kill();
    let wait = Wait::Within(PATIENCE);
    let no_room =
        || arena.reserve(&meta(61 << 20), Purpose::Store, wait).unwrap() == Reserve::NoRoom;
    assert!(no_room());
    pool.reap_dead();
    assert_eq!(arena.clear(), 0);
    assert!(no_room());
    assert_eq!((arena.gauges().filling, arena.gauges().pinned), (filling, filling));
    wait_until("what it held is reaped", || {
        pool.reap_dead();
        arena.gauges().filling == 0
    });
    assert_nothing_leaked(&pool, &arena);
}

#[test]
fn pins_and_claims_of_a_killed_process_go_with_it() {
    let _watchdog = watchdog();
    let dir = temp_dir();
    let (pool, arena) = opened(dir.path());
    let dirty = store(&arena, 99, true);
    let slots = [store(&arena, 100, false), store(&arena, 101, false)];
    let child = Running::start("pin", dir.path());
    let claimer = Running::start("claim", dir.path());
    pool.reap_dead();
    assert_eq!(arena.clear(), 0, "a living process pins it, or it is dirty");
    assert_eq!(arena.dirty(10), [], "a living process writes it back");
    child.kill();
    claimer.kill();
    wait_until("the pins are reaped", || {
        pool.reap_dead();
        arena.gauges().pinned == 0
    });
    wait_until("the claim passes to us", || arena.dirty(10) == [dirty]);
    arena.set_clean(dirty);
    assert!(slots.iter().all(|&slot| arena.state(slot) == SlotState::Ready));
    assert_nothing_leaked(&pool, &arena);
}

#[test]
fn a_process_killed_with_the_writer_lock_does_not_stop_the_others() {
    let _watchdog = watchdog();
    let dir = temp_dir();
    let (pool, arena) = opened(dir.path());
    store(&arena, 1, false);
    let child = Running::start("write", dir.path());
    assert!(matches!(arena.reserve(&meta(2), Purpose::Store, Wait::Try), Ok(Reserve::Busy)));
    let mut found = Vec::new();
    arena.lookup(&[key(1)], &mut found);
    assert!(found[0].is_some(), "lookups need no lock");
    child.kill();
    store(&arena, 2, false);
    arena.check().expect("the tables are sound");
    arena.lookup(&[key(1), key(2)], &mut found);
    assert!(found.iter().all(Option::is_some), "nothing is lost by the rebuild");
    assert_nothing_leaked(&pool, &arena);
}

#[test]
fn processes_killed_at_random_moments_leave_sound_tables() {
    let _watchdog = watchdog();
    let dir = temp_dir();
    let (pool, arena) = opened(dir.path());
    let mut random = Random(4711);
    for round in 0..8 {
        let victim = Running::start(&format!("{}", 1000 + round), dir.path());
        let other = Running::start(&format!("{}", 2000 + round), dir.path());
        for _ in 0..random.below(400) {
            step(&arena, &mut random);
        }
        victim.kill();
        for _ in 0..200 {
            step(&arena, &mut random);
        }
        other.finish();
        arena.check().expect("the tables are sound");
        assert_nothing_leaked(&pool, &arena);
    }
}
