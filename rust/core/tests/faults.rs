//! A disk that fails, an engine that breaks, memory that is not there, a process that is stopped: the
//! cache goes on without, says so, and comes back when they do.
#![cfg(feature = "test_utils")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::{
    LONG, Place, count, gauge, key, keys, meta, object_files, open, put, read_all, settled,
    wait_gauge, watched,
};
use lakecache_core::Namespace;
use lakecache_core::cache::Cache;
use lakecache_core::io::EngineChoice;
use lakecache_core::l2::Durability;
use lakecache_core::pool::{Pool, PoolOptions, Role, Wait};
use lakecache_core::sys::fault::{self, Call};

const BYTES: usize = 100_001;
const MEMORY: u64 = 64 << 20;
const ENGINES: [EngineChoice; 2] = [EngineChoice::Auto, EngineChoice::Pread];
const CALLS: [Call; 7] =
    [Call::Read, Call::Write, Call::Make, Call::Sync, Call::Direct, Call::Ring, Call::Header];

/// Faults are the whole process's: one test at a time, and none is left behind.
struct Faults(#[expect(dead_code, reason = "held")] MutexGuard<'static, ()>);

impl Faults {
    fn alone() -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        Self(TURN.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Faults {
    fn drop(&mut self) {
        CALLS.into_iter().for_each(fault::clear);
        fault::set_memory_available(u64::MAX);
    }
}

fn stored(cache: &Cache, objects: u32) {
    for index in 0..objects {
        put(cache, index, BYTES);
    }
    assert!(cache.flush(LONG));
    cache.clear_memory();
}

fn all_come_back(cache: &Cache, objects: u32) {
    let lease = cache.lease(&keys(objects)).unwrap();
    let expected: Vec<_> = (0..objects as usize).collect();
    let mut found = read_all(cache, &lease, BYTES);
    found.sort_unstable();
    assert_eq!(found, expected);
}

#[test]
fn a_disk_that_fails_is_left_alone_then_tried_again() {
    let faults = [
        (Call::Write, libc::EIO),
        (Call::Make, libc::EROFS),
        (Call::Write, libc::ENOSPC),
        (Call::Sync, libc::EIO),
    ];
    for (call, errno) in faults {
        watched(move || {
            let _alone = Faults::alone();
            let mut place = Place::new(EngineChoice::Auto, MEMORY);
            place.options.durability = Durability::Data;
            let cache = open(&place.options);
            fault::set(call, errno);
            for index in 0..6 {
                put(&cache, index, BYTES);
            }
            assert!(cache.flush(LONG), "what can't be written is given up");
            let (failed, refused) =
                (count(&cache, "write_errors"), count(&cache, "writes_no_room"));
            assert_eq!((failed + refused, count(&cache, "writes")), (6, 0));
            let full = errno == libc::ENOSPC;
            assert!(if full { failed == 0 } else { failed > 0 && refused > 0 }, "{failed}");
            assert_eq!(gauge(&cache, "disk_degraded"), u64::from(!full));
            assert_eq!(object_files(place.disk.path()), Vec::<PathBuf>::new());
            assert_eq!(gauge(&cache, "disk_bytes_used"), 0, "no reservation is left");
            assert_eq!(cache.lookup(&keys(6)), (6, 6), "memory serves on");

            fault::clear(call);
            let deadline = Instant::now() + LONG;
            let mut next = 6;
            while count(&cache, "writes") == 0 {
                assert!(Instant::now() < deadline, "the disk is tried again");
                put(&cache, next, 5000);
                assert!(cache.flush(LONG));
                next += 1;
                std::thread::sleep(Duration::from_millis(100));
            }
            assert_eq!(gauge(&cache, "disk_degraded"), 0);
            assert_eq!(object_files(place.disk.path()).len(), 1);
        });
    }
}

#[test]
fn a_read_that_fails_is_a_miss_and_the_object_stays() {
    for engine in ENGINES {
        watched(move || {
            let _alone = Faults::alone();
            let place = Place::new(engine, MEMORY);
            let cache = open(&place.options);
            stored(&cache, 3);
            fault::set(Call::Read, libc::EIO);
            let lease = cache.lease(&keys(3)).unwrap();
            assert_eq!(settled(&lease), 3);
            lease.start();
            let deadline = Instant::now() + LONG;
            while lease.failed() != Some(0) {
                assert!(Instant::now() < deadline, "{:?}", lease.failed());
                std::thread::sleep(Duration::from_millis(1));
            }
            drop(lease);
            assert!(count(&cache, "read_errors") > 0);
            assert_eq!(count(&cache, "damaged"), 0);
            wait_gauge(&cache, "memory_filling", 0);
            fault::clear(Call::Read);
            all_come_back(&cache, 3);
        });
    }
}

#[test]
fn headers_that_cannot_be_read_count_and_cost_no_others() {
    watched(|| {
        let _alone = Faults::alone();
        let place = Place::new(EngineChoice::Auto, MEMORY);
        let cache = open(&place.options);
        stored(&cache, 3);
        let bytes = gauge(&cache, "disk_bytes_used");
        drop(cache);
        std::fs::remove_dir_all(&place.options.ram_dir).unwrap();
        // Without the list every header is read.
        std::fs::remove_file(place.options.cache_dir.as_ref().unwrap().join("objects.snapshot"))
            .unwrap();
        fault::set(Call::Header, libc::EIO);
        let cache = open(&place.options);
        assert_eq!(object_files(place.disk.path()).len(), 3);
        assert_eq!((gauge(&cache, "disk_objects"), gauge(&cache, "disk_bytes_used")), (3, bytes));
        put(&cache, 3, BYTES);
        assert!(cache.flush(LONG));
        assert_eq!(count(&cache, "writes"), 1);
        fault::clear(Call::Header);
        // Each is found to be another than was assumed, and stored again.
        for index in 0..3 {
            let lease = cache.lease(&[key(index)]).unwrap();
            assert_eq!(settled(&lease), 1);
            lease.start();
            let deadline = Instant::now() + LONG;
            while lease.failed().is_none() {
                assert!(Instant::now() < deadline, "it is not what was assumed");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        stored(&cache, 3);
        all_come_back(&cache, 4);
    });
}

#[test]
fn a_ring_that_breaks_hands_its_reads_to_threads() {
    watched(|| {
        let _alone = Faults::alone();
        let place = Place::new(EngineChoice::Auto, MEMORY);
        let cache = open(&place.options);
        if cache.engine().0 != "io_uring" {
            return;
        }
        stored(&cache, 40);
        fault::set(Call::Ring, libc::EIO);
        all_come_back(&cache, 40);
        cache.clear_memory();
        all_come_back(&cache, 40);
        assert_eq!((count(&cache, "read_errors"), gauge(&cache, "io_queue_depth")), (0, 0));
        cache.close(LONG);
    });
}

#[test]
fn bytes_are_on_the_disk_before_the_name_where_that_is_asked_for() {
    for (durability, syncs) in [(Durability::Data, 5), (Durability::None, 0)] {
        watched(move || {
            let _alone = Faults::alone();
            let mut place = Place::new(EngineChoice::Auto, MEMORY);
            place.options.durability = durability;
            let cache = open(&place.options);
            let before = fault::calls(Call::Sync);
            stored(&cache, 5);
            assert_eq!(fault::calls(Call::Sync) - before, syncs);
            all_come_back(&cache, 5);
        });
    }
}

#[test]
fn without_direct_io_files_go_through_the_page_cache() {
    for (engine, from_the_start) in ENGINES.into_iter().flat_map(|e| [(e, true), (e, false)]) {
        watched(move || {
            let _alone = Faults::alone();
            let place = Place::new(engine, MEMORY);
            if from_the_start {
                fault::set(Call::Direct, libc::EINVAL);
            }
            let cache = open(&place.options);
            let reason = cache.engine().1.unwrap_or_default().to_owned();
            assert!(!from_the_start || reason.contains("O_DIRECT"), "{reason}");
            // A file system that refuses it only now.
            fault::set(Call::Direct, libc::EINVAL);
            stored(&cache, 5);
            all_come_back(&cache, 5);
            assert_eq!((count(&cache, "write_errors"), count(&cache, "read_errors")), (0, 0));
        });
    }
}

#[test]
fn memory_that_is_not_there_is_a_smaller_cache_until_it_is() {
    watched(|| {
        let _alone = Faults::alone();
        let place = Place::new(EngineChoice::Auto, MEMORY);
        fault::set_memory_available(1 << 20);
        let cache = open(&place.options);
        wait_gauge(&cache, "pool_reservation_put_off", 1);
        let meta = meta(&cache, 0, BYTES);
        assert_eq!(cache.reserve(&meta, Wait::Within(LONG)).unwrap(), None);
        assert_eq!((count(&cache, "stores_no_room"), cache.lookup(&keys(1))), (1, (0, 0)));
        fault::set_memory_available(u64::MAX);
        stored(&cache, 3);
        assert_eq!(gauge(&cache, "pool_reservation_put_off"), 0);
        all_come_back(&cache, 3);
    });
}

const STOPPED: &str = "LAKECACHE_STOPPED_CHILD";

/// Joins the pool, takes its writer lock, and stops itself under it; nothing when the tests are run
/// without being told so.
#[test]
fn child() {
    let Some(dirs) = std::env::var_os(STOPPED) else { return };
    let (ram, disk) = dirs.to_str().unwrap().split_once(':').unwrap();
    let pool = Pool::open(PoolOptions {
        ram_dir: ram.into(),
        cache_dir: Some(disk.into()),
        shared: true,
        role: Role::Worker,
        ..PoolOptions::private(64 << 20)
    })
    .unwrap();
    let stopped = pool.write(Wait::Within(LONG), |_| {
        // SAFETY: a signal to ourselves.
        unsafe { libc::raise(libc::SIGSTOP) }
    });
    assert_eq!(stopped.unwrap(), Some(0));
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

#[test]
fn a_stopped_holder_of_the_writer_lock_delays_nobody_for_long() {
    watched(|| {
        let _alone = Faults::alone();
        let place = Place::new(EngineChoice::Auto, MEMORY);
        let cache = open(&place.options);
        put(&cache, 0, BYTES);
        assert!(cache.flush(LONG));
        let cache_dir = place.options.cache_dir.as_ref().unwrap();
        let dirs = format!("{}:{}", place.options.ram_dir.display(), cache_dir.display());
        let spawned = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--test-threads=1"])
            .env(STOPPED, dirs)
            .stdout(Stdio::null())
            .spawn();
        let child = Killed(spawned.unwrap());
        let pid = libc::pid_t::try_from(child.0.id()).unwrap();
        let mut status = 0;
        // SAFETY: a child of ours and a number to fill.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, libc::WUNTRACED) }, pid);
        assert!(libc::WIFSTOPPED(status), "{status}");

        assert_eq!(cache.lookup(&keys(2)), (1, 1));
        let lease = cache.lease(&keys(1)).unwrap();
        assert_eq!(read_all(&cache, &lease, BYTES), [0]);
        cache.touch(&keys(1));
        let number = meta(&cache, 1, BYTES);
        assert_eq!(cache.reserve(&number, Wait::Within(Duration::from_millis(1))).unwrap(), None);
        assert_eq!(count(&cache, "stores_busy"), 1);
        assert_eq!(cache.clear_memory(), 0);
        assert_eq!(cache.namespace(&Namespace([3; 32]), "{}", true, Wait::Try).unwrap(), None);
        assert!(cache.flush(LONG));

        // SAFETY: a child of ours.
        assert_eq!(unsafe { libc::kill(pid, libc::SIGCONT) }, 0);
        put(&cache, 1, BYTES);
        assert!(cache.flush(LONG));
        assert!(cache.clear_memory() > 0);
        assert_eq!(cache.lookup(&[key(0), key(1)]), (2, 0));
        all_come_back(&cache, 2);
        cache.arena().check().unwrap();
    });
}
