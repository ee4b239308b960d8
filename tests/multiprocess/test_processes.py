"""Several processes on one store, and processes that die at the worst moment."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("lakecache._core")

from lakecache.store import TieredStore

pytestmark = pytest.mark.multiprocess

MIB = 1 << 20
LIMIT = 24 * MIB


def payload(number: int, size: int = 300_000) -> bytes:
    return (b"%08d" % number) * (size // 8)


@pytest.fixture
def settings(settings):
    return {**settings, "disk_capacity_bytes": LIMIT}


def test_a_second_process_reads_what_the_first_put(start, settings):
    with TieredStore(**settings) as store:
        for number in range(4):
            assert store.put(b"object %d" % number, payload(number))
        said, errors = start("read", settings, 5).communicate(timeout=60)
        assert said, errors
        seen = json.loads(said)
        assert seen["pool"] == store.pool_id
    assert seen["tiers"] == ["memory"] * 4 + [None]
    assert seen["right"] == [True] * 4


def test_after_the_first_process_has_ended(start, settings):
    with TieredStore(**settings) as store:
        for number in range(3):
            assert store.put(b"object %d" % number, payload(number))
        assert store.flush()
    said, errors = start("read", settings, 3).communicate(timeout=60)
    assert said, errors
    assert json.loads(said)["right"] == [True] * 3


def bytes_of(folder: str, pattern: str) -> int:
    total = 0
    for file in Path(folder).rglob(pattern):
        # A file may go between being listed and being looked at.
        try:
            total += file.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def test_killed_while_putting(start, settings, ram):
    numbers = 0
    chance = random.Random(1)
    for _ in range(5):
        child = start("fill", settings, numbers)
        assert child.stdout.readline() == "filling\n", child.stderr.read()
        until = time.monotonic() + chance.uniform(0.1, 0.6)
        while time.monotonic() < until:
            assert bytes_of(settings["cache_dir"], "*.kv") <= LIMIT
            assert bytes_of(str(ram), "pool") <= settings["cpu_bytes"]
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=30)
        numbers += 7  # partly the same objects, partly new ones

        with TieredStore(**settings) as store:
            names = list(range(numbers + 60))
            keys = [b"object %d" % number for number in names]
            found = 0
            for at in range(0, len(keys), 8):
                with store.lease_many(keys[at : at + 8]) as lease:
                    for index, number in enumerate(names[at : at + 8]):
                        if lease.found[index]:
                            found += 1
                            assert lease.read(index) == payload(number)
            assert found
            # The dead process holds nothing back: all of memory can be had again.
            store.flush()
            store.clear_memory()
            assert store.put(b"after %d" % numbers, payload(numbers))
            assert bytes_of(settings["cache_dir"], "*.kv") <= LIMIT
    # One pool, and nothing beside it.
    assert len(list(ram.glob("*/pool"))) == 1
    assert bytes_of(str(ram), "*") <= settings["cpu_bytes"] + MIB
    assert not [file for file in Path(settings["cache_dir"]).rglob("*") if ".tmp" in file.name]


def test_what_a_killed_process_held_for_a_gpu_comes_back_by_itself(start, settings):
    del settings["disk_capacity_bytes"]
    with TieredStore(**settings) as store:
        child = start("hold", settings)
        held = int(child.stdout.readline() or 0)
        assert held > 20, child.stderr.read()
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=30)
        assert not store.put(b"object 0", payload(0, 2 * MIB), timeout=0)
        # Nothing is put and nobody leaves: the store looks again on its own.
        until = time.monotonic() + 60
        while store.stats()["memory_filling"] and time.monotonic() < until:
            time.sleep(0.05)
        assert store.stats()["memory_filling"] == store.stats()["memory_pinned"] == 0
        assert store.put(b"object 0", payload(0, 2 * MIB), timeout=10)


def test_a_fork_of_a_process_with_a_store(start, settings):
    said, errors = start("fork", settings).communicate(timeout=60)
    assert said == "ClosedError\nTrue\n", errors
