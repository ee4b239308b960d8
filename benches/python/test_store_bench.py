"""What one call of the store costs, from Python."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("lakecache._core")

from lakecache.store import TieredStore

pytestmark = pytest.mark.bench

MIB = 1 << 20
SIZES = {"4 KiB": 4096, "1 MiB": MIB, "28 MiB": 28 * MIB}


@pytest.fixture
def store() -> Iterator[TieredStore]:
    """A store in memory alone, in shared memory of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="lakecache-bench-", dir="/dev/shm") as folder,
        TieredStore(ram_dir=folder, cpu_bytes=512 * MIB) as made,
    ):
        # Space is reserved in the background; until then a put may have to wait.
        deadline = time.monotonic() + 60
        while (stats := made.stats())["memory_bytes_reserved"] < stats["memory_capacity_bytes"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield made


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.mark.parametrize("size", SIZES)
def test_put(benchmark, store, size):
    """A new object each time, in a store that is full (of large ones)."""
    data = bytes(SIZES[size])
    numbers = itertools.count()
    # Enough of them to fill the store first, so that each put measured evicts another object.
    for _ in range(min(2000, 600 * MIB // len(data))):
        store.put(name(next(numbers)), data)
    assert benchmark.pedantic(lambda: store.put(name(next(numbers)), data), rounds=200)


@pytest.mark.parametrize("keys", [1, 64, 512])
def test_lease(benchmark, store, keys):
    names = [name(number) for number in range(keys)]
    for one in names:
        assert store.put(one, b"x" * 4096)

    def lease() -> int:
        with store.reserve_prefix(names) as held:
            return len(held)

    assert benchmark(lease) == keys


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", ["view", "copy"])
def test_read(benchmark, store, size, how):
    """A lease, the bytes where they lie or a copy of them, and the end of the lease."""
    data = bytes(SIZES[size])
    target = bytearray(len(data))
    assert store.put(b"key", data)

    def view() -> int:
        with store.lease_many([b"key"]) as lease:
            return sum(part.nbytes for part in lease.view(0))

    def copy() -> int:
        with store.lease_many([b"key"]) as lease:
            lease.copy_into(0, target)
        return len(target)

    assert benchmark(view if how == "view" else copy) == len(data)


@pytest.mark.parametrize("keys", [1, 64, 512])
def test_lookup(benchmark, store, keys):
    names = [name(number) for number in range(keys)]
    for one in names:
        assert store.put(one, b"x" * 4096)
    assert benchmark(store.lookup, names) == (keys, keys)
