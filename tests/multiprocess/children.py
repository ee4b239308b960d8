"""What the child processes of these tests run: python children.py WHAT SETTINGS-AS-JSON ..."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
import time

from lakecache import _core
from lakecache.errors import LakeCacheError
from lakecache.store import TieredStore

# A miss, a clear error and success have an exit status each; anything else is a bug.
REFUSED = 3


def payload(number: int, size: int = 300_000) -> bytes:
    """Bytes that say which object they are of, all the way."""
    return (b"%08d" % number) * (size // 8)


def fill(settings: dict, first: int) -> None:
    """Put the same 60 objects over and over until killed; what was evicted is put anew."""
    with TieredStore(**settings) as store:
        print("filling", flush=True)
        while True:
            for number in range(first, first + 60):
                store.put(b"object %d" % number, payload(number))


def read(settings: dict, count: int) -> None:
    """Read objects 0 to `count`; say from where, and whether they are right."""
    with TieredStore(**settings) as store:
        with store.lease_many([b"object %d" % number for number in range(count)]) as lease:
            tiers = [lease.tier(index) for index in range(count)]
            right = [lease.read(at) == payload(at) for at in range(count) if lease.found[at]]
        print(json.dumps({"pool": store.pool_id, "tiers": tiers, "right": right}))


def lose(settings: dict, count: int) -> None:
    """Try to read objects 0 to `count`; say how many were lost."""
    lost = 0
    with TieredStore(**settings) as store:
        with store.lease_many([b"object %d" % number for number in range(count)]) as lease:
            for at in range(count):
                try:
                    lease.read(at)
                except LakeCacheError:
                    lost += 1
        print(json.dumps(lost))


def use(settings: dict, blocked: str = "") -> None:
    """Put and read one object where something is wrong with the machine."""
    if blocked == "io_uring":
        block_io_uring()
    if blocked == "override":
        drop_override()
    try:
        with TieredStore(**settings) as store:
            stored = store.put(b"object 0", payload(0), timeout=3)
            store.flush(10)
            store.clear_memory()
            with store.lease_many([b"object 0"]) as lease:
                right = [lease.read(0) == payload(0)] if lease.found[0] else []
            print(
                json.dumps(
                    {
                        "stored": stored,
                        "right": right,
                        "engine": store.io_engine,
                        "reason": store.io_engine_reason,
                        "stats": store.stats(),
                    }
                )
            )
    except LakeCacheError as error:
        print(json.dumps({"error": type(error).__name__, "text": str(error)}))
        raise SystemExit(REFUSED) from None


def fork(settings: dict) -> None:
    """Put in a forked child, which must not, and then here; say how each went."""
    with TieredStore(**settings) as store:
        child = os.fork()
        if child == 0:
            try:
                store.put(b"object 0", payload(0))
            except LakeCacheError as error:
                print(type(error).__name__, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(store.put(b"object 0", payload(0)))


def hold(settings: dict) -> None:
    """Have all of memory in the making, as if a GPU were copying into it, until killed."""
    cache = _core.Cache(disk_capacity_bytes=None, **settings)
    number = cache.namespace(bytes(32), "{}", wait=20.0)
    cache.declare_gpu_copies()
    until = time.monotonic() + 30
    held = 0
    while time.monotonic() < until:
        key = b"%032d" % held
        if cache.reserve(number, key, 0, None, 0, 1, 1, 1 << 20, wait=1.0) is not None:
            held += 1
        elif cache.stats()["memory_bytes_reserved"] == cache.stats()["memory_capacity_bytes"]:
            break
    print(held, flush=True)
    time.sleep(120)


def block_io_uring() -> None:
    """Answer EPERM to io_uring_setup, enter and register, as Docker's default profile does."""
    libc = ctypes.CDLL(None, use_errno=True)
    load, equal, give = 0x20, 0x15, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | 1
    program = b"".join(
        struct.pack("<HBBI", *line)
        for line in [
            (load, 0, 0, 0),  # the system call's number
            (equal, 2, 0, 425),
            (equal, 1, 0, 426),
            (equal, 0, 1, 427),
            (give, 0, 0, refuse),
            (give, 0, 0, allow),
        ]
    )
    lines = ctypes.create_string_buffer(program, len(program))
    filter_program = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(lines))
    holder = ctypes.create_string_buffer(filter_program, len(filter_program))
    zero = ctypes.c_ulong(0)
    # PR_SET_NO_NEW_PRIVS, then PR_SET_SECCOMP with SECCOMP_MODE_FILTER.
    if libc.prctl(38, ctypes.c_ulong(1), zero, zero, zero):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    if libc.prctl(22, ctypes.c_ulong(2), holder, zero, zero):
        raise OSError(ctypes.get_errno(), "seccomp")


def drop_override() -> None:
    """Become a user that directory permissions hold for: give up CAP_DAC_OVERRIDE and its like."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("<II", 0x20080522, 0)
    # CAP_DAC_OVERRIDE is 1, CAP_DAC_READ_SEARCH 2, CAP_FOWNER 3.
    keep = ~0b1110 & 0xFFFFFFFF
    data = ctypes.create_string_buffer(24)
    if libc.capget(header, data):
        raise OSError(ctypes.get_errno(), "capget")
    words = [word & (keep if at < 3 else ~0) for at, word in enumerate(struct.unpack("<6I", data))]
    if libc.capset(header, struct.pack("<6I", *words)):
        raise OSError(ctypes.get_errno(), "capset")


if __name__ == "__main__":
    what, settings, *rest = sys.argv[1:]
    actions = {
        "fill": fill, "read": read, "use": use, "lose": lose, "fork": fork, "hold": hold,
    }  # fmt: skip
    actions[what](json.loads(settings), *(int(r) if r.isdigit() else r for r in rest))
