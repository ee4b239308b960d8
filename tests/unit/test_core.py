"""The bindings that the worker half copies with: addresses, states and checksums of objects."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct
import sys
import threading
import time

import pytest

_core = pytest.importorskip("lakecache._core")

MIB = 1 << 20
# The writer lock of a pool: a byte of its lock file, held by an open file description.
WRITER_BYTE, F_OFD_SETLK = 1, 37


def key(number: int) -> bytes:
    return _core.blake3(b"key %d" % number)


@pytest.fixture
def cache(ram_folder):
    made = _core.Cache(
        cache_dir=None, ram_dir=str(ram_folder), cpu_bytes=64 * MIB, disk_capacity_bytes=None
    )
    yield made
    made.close()


def reserve(cache, number: int, size: int) -> tuple[int, int]:
    space = cache.namespace(b"n" * 32, "{}", wait=20.0)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        slot = cache.reserve(space, key(number), 0, None, 0, 16, 1, size, 0.1)
        if slot is not None:
            return slot
    raise AssertionError("no room")


def test_what_is_written_to_the_spans_is_the_object(cache):
    data = bytes(at * 7 % 251 for at in range(100_001))
    slot = reserve(cache, 1, len(data))
    spans = cache.spans(*slot)
    assert sum(size for _, size in spans) == len(data)
    pieces = cache.pieces()
    for address, size in spans:
        holding = [at for at, n, _ in pieces if at <= address and address + size <= at + n]
        assert len(holding) == 1
    done = 0
    for address, size in spans:
        ctypes.memmove(address, data[done : done + size], size)
        done += size
    assert not cache.checksum_ok(*slot)
    assert cache.states([slot]) == b"\0"
    cache.commit(*slot)
    assert cache.flush(20)
    assert cache.pin(*slot)
    assert b"".join(ctypes.string_at(*span) for span in cache.spans(*slot)) == data
    assert b"".join(cache.view(*slot)) == data
    assert cache.checksum_ok(*slot)
    cache.unpin(*slot)


def test_a_changed_byte_in_memory_is_seen(cache):
    slot = reserve(cache, 1, 5000)
    cache.commit(*slot)
    assert cache.flush(20)
    assert cache.checksum_ok(*slot)
    (address, size) = cache.spans(*slot)[-1]
    ctypes.memset(address + size - 1, 0x41, 1)
    assert not cache.checksum_ok(*slot)


def test_calls_of_the_engines_thread_keep_the_gil(cache):
    """Whoever got it in between would give it back only when its time is up."""
    space = cache.namespace(b"n" * 32, "{}", wait=20.0)
    cache.abandon(*reserve(cache, 0, 5000))
    names = [key(number) for number in range(1, 200)]
    turns, stop = [0], threading.Event()

    def wait_for_it():
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0)

    before = sys.getswitchinterval()
    other = threading.Thread(target=wait_for_it, daemon=True)
    sys.setswitchinterval(60.0)
    try:
        other.start()
        while not turns[0]:
            time.sleep(0.001)
        begun = turns[0]
        for name in names:
            slot = cache.reserve(space, name, 0, None, 0, 16, 1, 5000)
            cache.commit(*slot)
            lease = cache.lease(name)
            lease.poll()
            lease.start()
            lease.slots()
            lease.close()
            cache.touch(name)
        ended = turns[0]
    finally:
        sys.setswitchinterval(before)
        stop.set()
        other.join(20)
    assert ended == begun


def test_states_of_many_slots_in_one_call(cache):
    slots = [reserve(cache, number, 5000) for number in range(3)]
    cache.commit(*slots[1])
    assert cache.flush(20)
    cache.abandon(*slots[2])
    assert cache.states(slots) == bytes(cache.state(*slot) for slot in slots) == b"\0\1\2"
    assert cache.states([]) == b""
    assert cache.spans(*slots[2]) == []
    assert not cache.checksum_ok(*slots[2])


def test_pieces_are_the_reserved_memory(cache):
    deadline = time.monotonic() + 20
    while not all(reserved for _, _, reserved in cache.pieces()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    stats = cache.stats()
    assert sum(size for _, size, _ in cache.pieces()) == stats["memory_capacity_bytes"]
    assert stats["memory_bytes_reserved"] == stats["memory_capacity_bytes"]


def test_an_engine_does_not_wait_for_the_lock_to_name_a_namespace(tmp_path, ram_folder):
    folder = tmp_path / "kv"
    cache = _core.Cache(
        cache_dir=str(folder), ram_dir=str(ram_folder), cpu_bytes=64 * MIB, disk_capacity_bytes=None
    )
    known = cache.namespace(b"n" * 32, "{}", wait=20.0)
    with (folder / "lock").open("r+b") as file:
        # As a writer does that is stopped; only for so long that who waits would see its end.
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, WRITER_BYTE, 1, 0)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                fcntl.fcntl(file, F_OFD_SETLK, lock)
                break
        release = threading.Timer(1.5, file.close)
        release.start()
        assert cache.namespace(b"m" * 32, "{}") is None
        assert cache.namespace(b"n" * 32, "{}") == known
        release.join()
    assert cache.namespace(b"m" * 32, "{}", wait=20.0) not in {None, known}
    cache.close()
