//! Pools shared by real processes: joining, dying at the worst moment, adopting, sweeping.
#![allow(clippy::unwrap_used, clippy::print_stderr, clippy::print_stdout, reason = "tests")]

mod pool_common;

use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lakecache_core::pool::{Pool, PoolOptions, Role, Table, Wait};
use lakecache_core::{ErrorKind, Namespace};

use self::pool_common::{
    Dirs, MIB, Process, Recorder, Watchdog, child_options, eventually, options, within,
};

const LONG: Duration = Duration::from_mins(1);

fn spare(pool: &Pool) -> &AtomicU64 {
    &pool.root(Table::L1).spare[0]
}

/// Not a test by itself: the body of the children.
#[test]
fn child() {
    let Some((action, options)) = child_options() else { return };
    let pool = Pool::open(options).unwrap();
    let _hooks = Recorder::on(&pool);
    println!("\n@member {}", pool.member());
    match action.as_str() {
        "hold" => {}
        "add" => {
            pool.write(Wait::Within(Duration::from_secs(10)), |_| {
                spare(&pool).fetch_add(1, Ordering::Relaxed);
            })
            .unwrap()
            .unwrap();
            println!("\n@add");
        }
        "write" => {
            pool.write(Wait::Within(Duration::from_secs(10)), |_| {
                println!("\n@write");
                drop(std::io::stdin().read(&mut [0]));
            })
            .unwrap();
        }
        other => panic!("unknown action {other}"),
    }
    drop(std::io::stdin().read(&mut [0]));
}

#[test]
fn two_processes_share_one_pool() {
    let _watchdog = Watchdog::start("two_processes_share_one_pool");
    let dirs = Dirs::new();
    let pool = Pool::open(dirs.options()).unwrap();
    let hooks = Recorder::on(&pool);
    let other = Process::start(&dirs, "add");
    assert_ne!(other.member, pool.member());
    assert_eq!(spare(&pool).load(Ordering::Relaxed), 1);
    assert!(pool.is_alive(other.member).unwrap() && pool.is_alive(pool.member()).unwrap());
    let member = other.member;
    other.end();
    assert!(!pool.is_alive(member).unwrap());
    assert_eq!(pool.gauges().members, 1);
    assert_eq!(hooks.reaped(), [] as [u8; 0], "one that left needs no reaping");
}

#[test]
fn a_writer_killed_at_work_is_succeeded_after_a_rebuild() {
    let _watchdog = Watchdog::start("a_writer_killed_at_work_is_succeeded_after_a_rebuild");
    let dirs = Dirs::new();
    let pool = Pool::open(dirs.options()).unwrap();
    let hooks = Recorder::on(&pool);
    let writer = Process::start(&dirs, "write");
    assert!(pool.epoch() % 2 == 1);
    assert_eq!(pool.write(Wait::Try, |_| ()).unwrap(), None);
    assert_eq!(pool.write(Wait::Within(Duration::from_millis(20)), |_| ()).unwrap(), None);
    assert_eq!(hooks.rebuilt.load(Ordering::Relaxed), 0);
    let dead = writer.kill();
    pool.write(Wait::Within(Duration::from_secs(20)), |_| ()).unwrap().unwrap();
    assert_eq!(hooks.rebuilt.load(Ordering::Relaxed), 1);
    assert_eq!((pool.epoch() % 2, pool.gauges().recoveries), (0, 1));
    pool.reap_dead();
    assert_eq!(hooks.reaped(), [dead]);
}

#[test]
fn a_dead_member_is_reaped_and_a_live_one_is_not() {
    let _watchdog = Watchdog::start("a_dead_member_is_reaped_and_a_live_one_is_not");
    let dirs = Dirs::new();
    let pool = Pool::open(dirs.options()).unwrap();
    let hooks = Recorder::on(&pool);
    let (one, two) = (Process::start(&dirs, "hold"), Process::start(&dirs, "hold"));
    pool.reap_dead();
    assert_eq!(hooks.reaped(), [] as [u8; 0]);
    let dead = one.kill();
    pool.reap_dead();
    pool.reap_dead();
    assert_eq!(hooks.reaped(), [dead]);
    assert!(pool.is_alive(two.member).unwrap());
    assert_eq!((pool.gauges().members, pool.gauges().reaped), (2, 1));
    let again = Process::start(&dirs, "hold");
    assert_eq!(again.member, dead, "a reaped number is free again");
}

#[test]
fn a_pool_outlives_its_members_and_is_adopted() {
    let _watchdog = Watchdog::start("a_pool_outlives_its_members_and_is_adopted");
    let dirs = Dirs::new();
    let left = Process::start(&dirs, "add");
    let killed = Process::start(&dirs, "add");
    left.end();
    let dead = killed.kill();
    let pool = Pool::open(dirs.options()).unwrap();
    let hooks = Recorder::on(&pool);
    assert_eq!(spare(&pool).load(Ordering::Relaxed), 2);
    assert_ne!(pool.member(), dead, "the dead member's number still has its pins");
    pool.write(Wait::Try, |_| assert_eq!(hooks.reaped(), [dead])).unwrap().unwrap();
    assert!(within(LONG, || pool.reserved_bytes() >= MIB));
}

#[test]
fn another_size_joins_the_creators_and_an_only_member_makes_it_anew() {
    let _watchdog = Watchdog::start("another_size");
    let dirs = Dirs::new();
    let first = Process::start(&dirs, "add");
    let larger = || PoolOptions { cpu_bytes: 32 * MIB, ..dirs.options() };
    let joined = Pool::open(larger()).unwrap();
    assert_eq!(joined.gauges().file_bytes, 16 * MIB);
    drop(joined);
    first.end();
    let mut seen = Vec::new();
    let anew = Pool::open_with(larger(), &mut |old| {
        seen.push((old.gauges().file_bytes, spare(old).load(Ordering::Relaxed)));
        Ok(())
    });
    let anew = anew.unwrap();
    assert_eq!(seen, [(16 * MIB, 1)]);
    assert_eq!(anew.gauges().file_bytes, 32 * MIB);
    assert_eq!(spare(&anew).load(Ordering::Relaxed), 0);
    drop(anew);
    let same = Pool::open_with(larger(), &mut |_| panic!("the same size is kept")).unwrap();
    assert_eq!(same.gauges().file_bytes, 32 * MIB);
}

#[test]
fn another_format_is_an_error_only_while_others_use_it() {
    let _watchdog = Watchdog::start("another_format");
    let dirs = Dirs::new();
    let pool = Pool::open(dirs.options()).unwrap();
    let path = pool.path().unwrap().to_path_buf();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&99u32.to_ne_bytes(), 8).unwrap();
    let error = Pool::open(dirs.options()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PoolIncompatible);
    assert!(error.to_string().contains("format 99"), "{error}");
    drop(pool);
    let anew = Pool::open(dirs.options()).unwrap();
    assert!(anew.write(Wait::Try, |_| ()).unwrap().is_some());
}

#[test]
fn a_file_that_no_creator_completed_is_made_anew() {
    let dirs = Dirs::new();
    let path = Pool::open(dirs.options()).unwrap().path().unwrap().to_path_buf();
    for length in [0, 100, 1 << 20] {
        std::fs::write(&path, vec![0; length]).unwrap();
        let pool = Pool::open(dirs.options()).unwrap();
        assert_eq!(pool.gauges().file_bytes, 16 * MIB);
    }
}

#[test]
fn a_process_that_cannot_reach_the_live_pool_is_told_both_remedies() {
    let _watchdog = Watchdog::start("cannot_reach");
    let dirs = Dirs::new();
    let other_ram = dirs.root.path().join("other");
    // A pool of the same id, left over in the other place, is not the live one either.
    let stale = Pool::open(options(&other_ram, &dirs.cache_dir)).unwrap();
    drop(stale);
    let live = Process::start(&dirs, "hold");
    for cleared in [false, true] {
        if cleared {
            std::fs::remove_dir_all(&other_ram).unwrap();
        }
        let error = Pool::open(options(&other_ram, &dirs.cache_dir)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        let text = error.to_string();
        assert!(text.contains("same ram_dir") && text.contains("another cache_dir"), "{text}");
    }
    live.end();
    Pool::open(options(&other_ram, &dirs.cache_dir)).unwrap();
}

#[test]
fn a_copy_of_a_cache_directory_in_use_gets_a_pool_of_its_own() {
    let _watchdog = Watchdog::start("a_copy");
    let dirs = Dirs::new();
    let copy = options(&dirs.ram_dir, &dirs.root.path().join("copy"));
    let copied = copy.cache_dir.as_deref().unwrap();
    drop(Pool::open(dirs.options()).unwrap());
    std::fs::create_dir(copied).unwrap();
    for name in ["lock", "pool-id", "pool-incarnation"] {
        std::fs::copy(dirs.cache_dir.join(name), copied.join(name)).unwrap();
    }
    let live = Process::start(&dirs, "hold");
    // Its lock file, another one now, says of no member that it lives.
    let pool = Pool::open(copy.clone()).unwrap();
    let hooks = Recorder::on(&pool);
    pool.reap_dead();
    assert_eq!((pool.gauges().members, hooks.reaped()), (1, vec![]));
    let id = pool.id();
    drop(pool);
    let again = Pool::open(copy).unwrap();
    let original = Pool::open(dirs.options()).unwrap();
    assert_eq!((again.id(), original.id() == id), (id, false), "both keep theirs");
    assert_eq!(original.gauges().members, 2);
    assert!(original.is_alive(live.member).unwrap());
}

#[test]
fn a_sweep_takes_only_orphans_that_nobody_holds() {
    let _watchdog = Watchdog::start("a_sweep");
    let dirs = Dirs::new();
    let cache = |name: &str| dirs.root.path().join(name);
    let open = |name: &str| Pool::open(options(&dirs.ram_dir, &cache(name))).unwrap();
    let path = |pool: &Pool| pool.path().unwrap().to_path_buf();
    let (held, kept, orphan) = (open("held"), open("kept"), open("orphan"));
    let (held_path, kept_path, orphan_path) = (path(&held), path(&kept), path(&orphan));
    drop((kept, orphan));
    for name in ["held", "orphan"] {
        std::fs::remove_dir_all(cache(name)).unwrap();
    }
    let swept = |path: &Path| {
        eventually(|| {
            drop(open("trigger"));
            !path.exists()
        })
    };
    assert!(swept(&orphan_path));
    assert!(held_path.exists() && kept_path.exists());
    assert!(!orphan_path.parent().unwrap().exists());
    drop(held);
    assert!(swept(&held_path));
}

#[test]
fn clear_removes_an_idle_pool_and_refuses_a_used_one() {
    let dirs = Dirs::new();
    let pool = Pool::open(dirs.options()).unwrap();
    let path = pool.path().unwrap().to_path_buf();
    let cache_dir = Some(&*dirs.cache_dir);
    let remove = || {
        Pool::while_unused(&dirs.ram_dir, cache_dir, |unused| {
            Ok(unused.remove_pool()?.unwrap_or(0))
        })
    };
    let refused = remove().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    assert!(refused.to_string().contains(&std::process::id().to_string()), "{refused}");
    drop(pool);
    assert!(path.exists());
    assert!(remove().unwrap().is_some_and(|bytes| bytes > 0));
    assert!(!path.exists() && remove().unwrap() == Some(0));
}

#[test]
fn a_look_from_outside_sees_members_and_changes_nothing() {
    let dirs = Dirs::new();
    let look = || Pool::look(&dirs.ram_dir, Some(&dirs.cache_dir)).unwrap();
    std::fs::create_dir(&dirs.cache_dir).unwrap();
    assert_eq!(look(), (false, None));
    let options = PoolOptions { disk_capacity_bytes: Some(64 * MIB), ..dirs.options() };
    let pool = Pool::open(options).unwrap();
    let (used, seen) = look();
    let seen = seen.unwrap();
    assert!(used && Some(&*seen.path) == pool.path());
    assert_eq!(seen.file_bytes, pool.gauges().file_bytes);
    assert_eq!((seen.objects, seen.used_bytes), (0, 0));
    let [member] = seen.members[..] else { panic!("{seen:?}") };
    assert!(member.alive && member.pid == std::process::id());
    assert_eq!(seen.disk_capacity_bytes, Some(64 * MIB));
    assert_eq!(pool.gauges().members, 1);
    drop(pool);
    let (used, seen) = look();
    assert!(!used && seen.is_some_and(|pool| pool.members.iter().all(|member| !member.alive)));
}

#[test]
fn a_private_pool_has_its_cache_directory_to_itself() {
    let dirs = Dirs::new();
    let private = || Pool::open(PoolOptions { shared: false, ..dirs.options() });
    let first = private().unwrap();
    assert_eq!(private().unwrap_err().kind(), ErrorKind::Unavailable);
    assert_eq!(Pool::open(dirs.options()).unwrap_err().kind(), ErrorKind::Unavailable);
    drop(first);
    let shared = Pool::open(dirs.options()).unwrap();
    assert_eq!(private().unwrap_err().kind(), ErrorKind::Unavailable);
    drop(shared);
    private().unwrap();
}

#[test]
fn two_openings_in_one_process_are_two_members() {
    let dirs = Dirs::new();
    let memory_only = || Pool::open(PoolOptions { cache_dir: None, ..dirs.options() }).unwrap();
    for (one, two) in [(memory_only(), memory_only()), {
        let open = |role| Pool::open(PoolOptions { role, ..dirs.options() }).unwrap();
        (open(Role::Engine), open(Role::Worker))
    }] {
        assert_eq!(one.id(), two.id());
        assert_ne!(one.member(), two.member());
        let inner = one.write(Wait::Try, |_| two.write(Wait::Try, |_| ()).unwrap()).unwrap();
        assert_eq!(inner, Some(None));
        let namespace = Namespace([7; 32]);
        let id = one.intern_namespace(&namespace, Wait::Try).unwrap().unwrap();
        assert_eq!(two.intern_namespace(&namespace, Wait::Try).unwrap(), Some(id));
        assert_eq!(two.namespace(id), Some(namespace));
        assert_eq!(two.namespace(id + 1), None);
    }
}

#[test]
fn one_member_too_many_is_told_so_and_a_place_that_is_left_is_taken() {
    let _watchdog = Watchdog::start("one_member_too_many");
    let dirs = Dirs::new();
    let mut members: Vec<_> = (0..128).map(|_| Pool::open(dirs.options()).unwrap()).collect();
    let error = Pool::open(dirs.options()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    assert!(error.to_string().contains("has 128 members already"), "{error}");
    drop(members.pop());
    Pool::open(dirs.options()).unwrap();
}

#[test]
fn a_pool_that_nobody_uses_is_kept_and_joined_again() {
    let dirs = Dirs::new();
    let transit = PoolOptions { cpu_bytes: 0, transit_bytes: 8 * MIB, ..dirs.options() };
    let memory_only = PoolOptions { cache_dir: None, ..dirs.options() };
    for options in [dirs.options(), transit, memory_only] {
        let as_worker = PoolOptions { role: Role::Worker, ..options.clone() };
        let pool = Pool::open(options).unwrap();
        let worker = Pool::open(as_worker.clone()).unwrap();
        assert_eq!(worker.id(), pool.id());
        drop(pool);
        spare(&worker).store(7, Ordering::Relaxed);
        drop(worker);
        let adopted = Pool::open(as_worker).unwrap();
        assert_eq!(spare(&adopted).load(Ordering::Relaxed), 7);
    }
}

#[test]
fn the_smallest_disk_limit_of_the_live_members_holds() {
    let dirs = Dirs::new();
    let open =
        |limit| Pool::open(PoolOptions { disk_capacity_bytes: limit, ..dirs.options() }).unwrap();
    let (none, ten, five) = (open(None), open(Some(10)), open(Some(5)));
    assert_eq!(none.disk_capacity(), Some(5));
    drop(five);
    assert_eq!(none.disk_capacity(), Some(10));
    drop(ten);
    assert_eq!(none.disk_capacity(), None);
}

#[test]
fn a_closed_pool_and_a_forked_childs_copy_refuse_to_write() {
    let _watchdog = Watchdog::start("forked");
    let dirs = Dirs::new();
    let pool = Pool::open(dirs.options()).unwrap();
    // SAFETY: the child makes a few calls that take no lock of another thread, and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused =
            matches!(pool.write(Wait::Try, |_| ()), Err(e) if e.kind() == ErrorKind::Forked);
        drop(pool);
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child just made.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    assert!(pool.write(Wait::Try, |_| ()).unwrap().is_some(), "the child's end changed nothing");
    assert_eq!(pool.gauges().members, 1);
    pool.leave();
    assert_eq!(pool.write(Wait::Try, |_| ()).unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn pieces_are_reserved_by_one_member_and_seen_by_all() {
    let _watchdog = Watchdog::start("pieces");
    let dirs = Dirs::new();
    let open =
        |role| Pool::open(PoolOptions { cpu_bytes: 100 * MIB, role, ..dirs.options() }).unwrap();
    let worker = open(Role::Worker);
    assert!(worker.pieces() > 2);
    assert!(!worker.piece_reserved(0) && worker.reserved_bytes() == 0);
    let (_one, two) = (open(Role::Engine), open(Role::Engine));
    assert!(within(LONG, || worker.reserved_bytes() == worker.gauges().data_bytes));
    assert!((0..two.pieces()).all(|piece| two.piece_reserved(piece)));
    assert_eq!(two.reserved_bytes(), two.gauges().data_bytes);
    // SAFETY: within the mapping; nobody else uses these bytes.
    unsafe { worker.mapping().at(worker.data_offset(), 1).write(1) };
}

/// A tmpfs of a test's own, and a cache directory elsewhere.
struct Tmpfs(tempfile::TempDir, tempfile::TempDir);

impl Tmpfs {
    fn mount(bytes: u64) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"])
            .arg(dir.path())
            .stderr(Stdio::null())
            .status();
        if matches!(mount, Ok(status) if status.success()) {
            return Some(Self(dir, tempfile::tempdir().unwrap()));
        }
        eprintln!("skipped: mounting a tmpfs needs root");
        None
    }

    fn options(&self, cpu_bytes: u64) -> PoolOptions {
        let (ram_dir, cache_dir) = (self.0.path().join("ram"), self.1.path().join("cache"));
        PoolOptions { cpu_bytes, ..options(&ram_dir, &cache_dir) }
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        drop(Command::new("umount").arg("-l").arg(self.0.path()).status());
    }
}

#[test]
fn a_pool_larger_than_its_tmpfs_is_refused_with_the_remedy() {
    let Some(tmpfs) = Tmpfs::mount(8 * MIB) else { return };
    let error = Pool::open(tmpfs.options(16 * MIB)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    let text = error.to_string();
    for part in ["cpu_bytes = 16777216", "8388608", "--shm-size"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_full_tmpfs_is_an_error_at_open_and_idle_pools_make_room_first() {
    let Some(tmpfs) = Tmpfs::mount(20 * MIB) else { return };
    let other =
        PoolOptions { cache_dir: Some(tmpfs.1.path().join("other")), ..tmpfs.options(16 * MIB) };
    let idle = Pool::open(other).unwrap().path().unwrap().to_path_buf();
    let ballast = std::fs::File::create(tmpfs.0.path().join("ballast")).unwrap();
    let mut filled = 0;
    while ballast.write_all_at(&[1; 4096], filled).is_ok() {
        filled += 4096;
    }
    // The metadata (2 or 4 MiB here) of the idle pool is just what the new one needs.
    assert!(eventually(|| Pool::open(tmpfs.options(16 * MIB)).is_ok()));
    assert!(!idle.exists());
    std::fs::remove_dir_all(tmpfs.0.path().join("ram")).unwrap();
    while ballast.write_all_at(&[1; 4096], filled).is_ok() {
        filled += 4096;
    }
    let error = Pool::open(tmpfs.options(16 * MIB)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
}

#[test]
fn a_piece_that_would_fill_the_tmpfs_is_put_off_and_reserved_later() {
    let _watchdog = Watchdog::start("a_piece_put_off");
    let Some(tmpfs) = Tmpfs::mount(128 * MIB) else { return };
    let filler = tmpfs.0.path().join("filler");
    // 16 of the 128 MiB are left to others.
    std::fs::write(&filler, vec![1; 100 << 20]).unwrap();
    let pool = Pool::open(tmpfs.options(16 * MIB)).unwrap();
    assert!(!within(Duration::from_millis(300), || pool.reserved_bytes() > 0));
    let gauges = pool.gauges();
    assert!(gauges.reservation_put_off && gauges.put_offs > 0 && gauges.reserved_bytes == 0);
    std::fs::remove_file(&filler).unwrap();
    assert!(within(LONG, || pool.reserved_bytes() == pool.gauges().data_bytes));
    assert!(!pool.gauges().reservation_put_off);
}
