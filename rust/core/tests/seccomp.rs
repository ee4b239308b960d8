//! A container that forbids `io_uring`: `auto` reads with threads and says why, and `io_uring` by name
//! is an error that names the remedy.
//!
//! The filter can't be taken off again, so it is put on in a child: this binary, run anew.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

use std::os::fd::AsFd;
use std::process::Command;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use lakecache_core::ErrorKind;
use lakecache_core::io::{
    EngineChoice, EngineKind, EngineOptions, ReadOutcome, ReadRequest, Segment, open_engine,
};
use lakecache_core::sys::file;
use lakecache_core::sys::lock::LockFile;
use lakecache_core::sys::map::Mapping;

const CHILD: &str = "LAKECACHE_SECCOMP_CHILD";
const PATIENCE: Duration = Duration::from_mins(1);

/// Makes `io_uring_setup`, `io_uring_enter` and `io_uring_register` fail with `EPERM` for good.
fn forbid_io_uring() {
    fn op(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
        libc::sock_filter { code: u16::try_from(code).unwrap(), jt, jf, k }
    }
    let (first, last) = (425, 427);
    let eperm = u32::try_from(libc::EPERM).unwrap();
    let mut filter = [
        // The number of the system call is the first field of what the filter sees.
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        op(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, 0, 2, first),
        op(libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K, 1, 0, last),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | eperm),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: 5, filter: filter.as_mut_ptr() };
    // SAFETY: plain numbers.
    let status = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(status, 0);
    // SAFETY: the program lives until the call returns, and the kernel copies it.
    let status =
        unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    assert_eq!(status, 0, "{}", std::io::Error::last_os_error());
}

/// What the child checks; nothing when the tests are run without being told so.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    forbid_io_uring();
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let life = LockFile::open(&dir.path().join("lock")).unwrap();
    let options = EngineOptions::default();
    let open = |choice| open_engine(choice, dir.path(), life.as_fd(), &options);

    let error = open(EngineChoice::IoUring).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    for part in ["io_engine", "EPERM", "seccomp"] {
        assert!(error.to_string().contains(part), "{error}");
    }

    let opened = open(EngineChoice::Auto).unwrap();
    assert_eq!(opened.engine.kind(), EngineKind::Pread);
    let reason = opened.reason.unwrap();
    for part in ["EPERM", "seccomp", "io_uring_setup", "16 threads"] {
        assert!(reason.contains(part), "{reason}");
    }

    // And it reads.
    let path = dir.path().join("object");
    std::fs::write(&path, [7; 8192]).unwrap();
    let memory = file::memfd("arena").unwrap();
    file::set_len(memory.as_fd(), 8192).unwrap();
    let arena = Arc::new(Mapping::of(memory.as_fd(), 8192).unwrap());
    let (sender, receiver) = mpsc::channel();
    let kept = Arc::clone(&arena);
    let request = ReadRequest {
        file: Arc::new(file::open_read(&path, opened.direct).unwrap().unwrap()),
        direct: opened.direct,
        offset: 0,
        segments: vec![Segment { address: arena.at(0, 8192), bytes: 8192 }],
        done: Box::new(move |result| {
            drop(kept);
            sender.send(result).unwrap();
        }),
    };
    opened.engine.submit(request).unwrap();
    let outcome = receiver.recv_timeout(PATIENCE).unwrap().unwrap();
    assert_eq!(outcome, ReadOutcome::Complete);
    // SAFETY: within the mapping; the read is done.
    assert_eq!(unsafe { arena.at(8191, 1).read() }, 7);
    println!("checked");
}

#[test]
fn auto_falls_back_with_a_reason_and_a_name_is_an_error() {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let end = Instant::now() + PATIENCE;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("the child hangs");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains("checked"));
}
