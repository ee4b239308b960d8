//! Members whose GPUs copy into the pool, and that are killed: what they held is given away later.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

mod pool_common;

use std::io::Read;
use std::time::Duration;

use lakecache_core::pool::{Pool, Wait};

use self::pool_common::{Dirs, Process, Recorder, Watchdog, child_options, eventually};

/// Not a test by itself: the body of the children.
#[test]
fn child() {
    let Some((action, options)) = child_options() else { return };
    let pool = Pool::open(options).unwrap();
    let _hooks = Recorder::on(&pool);
    println!("\n@member {}", pool.member());
    match action.as_str() {
        "hold" => {}
        "gpu" => {
            pool.declare_gpu_copies();
            println!("\n@gpu");
        }
        "gpu-unlocked" => {
            pool.declare_gpu_copies();
            close_lock_files();
            println!("\n@gpu-unlocked");
        }
        "gpu-dropped" => {
            pool.declare_gpu_copies();
            drop(pool);
            println!("\n@gpu-dropped");
        }
        "gpu-left" => {
            pool.declare_gpu_copies();
            pool.leave();
            println!("\n@gpu-left");
        }
        other => panic!("unknown action {other}"),
    }
    drop(std::io::stdin().read(&mut [0]));
}

/// Closes this process's lock files, as the kernel does where they have the lowest numbers.
fn close_lock_files() {
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let path = entry.unwrap().path();
        if std::fs::read_link(&path).is_ok_and(|target| target.ends_with("lock")) {
            let number: i32 = path.file_name().unwrap().to_str().unwrap().parse().unwrap();
            // SAFETY: the process is killed before anything uses the descriptor again.
            assert_eq!(unsafe { libc::close(number) }, 0);
        }
    }
}

#[test]
fn a_dead_member_with_gpu_copies_is_reaped_later_and_keeps_its_number_until_then() {
    let _watchdog = Watchdog::start("a_dead_member_with_gpu_copies");
    let dirs = Dirs::new();
    let pool = Pool::open(dirs.options()).unwrap();
    let hooks = Recorder::on(&pool);
    pool.write(Wait::Try, |_| ()).unwrap().unwrap();
    let (gpu, other) = (Process::start(&dirs, "gpu"), Process::start(&dirs, "hold"));
    let (gpu, other) = (gpu.kill(), other.kill());
    // The first look at a death is never the last, however late it comes.
    pool.reap_dead();
    assert_eq!(hooks.reaped(), [other]);
    assert!(!pool.is_alive(gpu).unwrap());
    let newcomer = Process::start(&dirs, "hold");
    assert_ne!(newcomer.member, gpu, "its pins still stand");
    assert!(eventually(|| {
        pool.reap_dead();
        hooks.reaped() == [other, gpu]
    }));
    assert!(pool.is_alive(newcomer.member).unwrap());
    let again = Process::start(&dirs, "hold");
    assert_eq!(again.member, gpu, "its number is free, and no flag is left on it");
    let (again, newcomer) = (again.kill(), newcomer.kill());
    pool.reap_dead();
    let reaped = hooks.reaped();
    assert!(reaped[2..].contains(&again) && reaped[2..].contains(&newcomer), "{reaped:?}");
}

#[test]
fn who_adopts_a_pool_does_not_reap_gpu_copies_at_once() {
    let _watchdog = Watchdog::start("who_adopts_a_pool");
    let dirs = Dirs::new();
    let killed = Process::start(&dirs, "gpu");
    let dead = killed.kill();
    let pool = Pool::open(dirs.options()).unwrap();
    assert_ne!(pool.member(), dead);
    let hooks = Recorder::on(&pool);
    pool.write(Wait::Try, |_| assert_eq!(hooks.reaped(), [] as [u8; 0])).unwrap().unwrap();
    assert!(eventually(|| {
        pool.reap_dead();
        hooks.reaped() == [dead]
    }));
}

/// What a process looks like that is being killed: its lock is free, its other files are not.
#[test]
fn a_member_whose_process_still_has_files_is_not_reaped() {
    let _watchdog = Watchdog::start("a_member_whose_process_still_has_files");
    let dirs = Dirs::new();
    let pool = Pool::open(dirs.options()).unwrap();
    let hooks = Recorder::on(&pool);
    for action in ["gpu-unlocked", "gpu-dropped"] {
        let mut ending = Process::start(&dirs, action);
        assert!(!pool.is_alive(ending.member).unwrap());
        pool.reap_dead();
        std::thread::sleep(Duration::from_millis(1500));
        pool.reap_dead();
        assert_eq!(hooks.reaped(), [] as [u8; 0], "{action}");
        ending.child.kill().unwrap();
        // Nobody has waited for it yet: it has closed its files, and is there as a zombie.
        assert!(eventually(|| {
            pool.reap_dead();
            hooks.reaped() == [ending.member]
        }));
        hooks.reaped.lock().unwrap().clear();
    }
    let left = Process::start(&dirs, "gpu-left");
    assert_eq!((pool.gauges().members, pool.gauges().reaped), (1, 2), "it left while it lived");
    left.end();
}
