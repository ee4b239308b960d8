"""Bytes between pages and objects, by every transfer that runs here, on a real pool."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lakecache import _core
from lakecache._pages import ObjectShape, Row
from lakecache.transfer import HostTransfer, SerialTransfer, Transfer

torch = pytest.importorskip("torch")

BLOCKS, PAGE, RANKS = 8, 96, 2
SECONDS = 20.0


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Any]:
    opened = _core.Cache(
        cache_dir=None, ram_dir=str(tmp_path / "ram"), cpu_bytes=32 << 20,
        disk_capacity_bytes=None, shared=False,
    )  # fmt: skip
    yield opened
    opened.close()


class Rig:
    """Two layers with pages of different sizes, and a transfer for each rank."""

    def __init__(self, cache: Any, kind: str, *, verify: bool = False) -> None:
        self.cache = cache
        self.space = cache.namespace(bytes(32), "{}", wait=20.0)
        self.pages = torch.randint(0, 256, (BLOCKS * 3 * PAGE,), dtype=torch.uint8)
        base = self.pages.data_ptr()
        rows = [
            Row(base, PAGE, PAGE, 0, 0),
            Row(base, PAGE, PAGE, PAGE, 1),
            Row(base + BLOCKS * PAGE, 2 * PAGE, 2 * PAGE, 2 * PAGE, 0),
            Row(base + BLOCKS * PAGE, 2 * PAGE, 2 * PAGE, 4 * PAGE, 1),
        ]
        self.shapes = {0: ObjectShape(rows, slot_count=2, num_blocks=BLOCKS)}
        self.transfers: list[Transfer] = [self.make(kind, rank, verify) for rank in range(RANKS)]

    def make(self, kind: str, rank: int, verify: bool) -> Transfer:
        if kind == "host":
            return HostTransfer(self.cache, self.shapes, rank=rank, verify=verify)
        storage = self.pages.untyped_storage()
        return SerialTransfer(self.cache, self.shapes, storage, rank=rank, verify=verify)

    def object(self, *blocks: int) -> Any:
        """The part that these blocks make."""
        first, second = self.pages[: BLOCKS * PAGE], self.pages[BLOCKS * PAGE :]
        return torch.cat(
            [first[b * PAGE : (b + 1) * PAGE] for b in blocks]
            + [second[b * 2 * PAGE : (b + 1) * 2 * PAGE] for b in blocks]
        ).clone()

    def reserve(self, key: bytes) -> tuple[int, int]:
        size = RANKS * self.shapes[0].part_bytes
        deadline = time.monotonic() + SECONDS
        # The pool's memory comes in the background.
        while (slot := self.cache.reserve(self.space, key, 0, None, 0, 0, RANKS, size)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return slot

    def run(self, rank: int) -> list[tuple[int, bool]]:
        deadline = time.monotonic() + SECONDS
        over: list[tuple[int, bool]] = []
        while not over and time.monotonic() < deadline:
            over = self.transfers[rank].poll()
            time.sleep(0.001)
        return over

    def stored(self, key: bytes) -> tuple[int, int]:
        slot = self.reserve(key)
        for rank, blocks in enumerate([(1, 2), (3, 4)]):
            self.transfers[rank].store(7, 0, *slot, ids(*blocks))
            assert self.run(rank) == [(7, True)]
        self.cache.commit(*slot)
        deadline = time.monotonic() + SECONDS
        while self.cache.state(*slot) != 1 and time.monotonic() < deadline:
            time.sleep(0.001)
        return slot


def ids(*blocks: int) -> bytes:
    return array("i", blocks).tobytes()


@pytest.fixture(params=["host", "serial"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_each_rank_restores_its_own_part(cache: Any, kind: str) -> None:
    rig = Rig(cache, kind, verify=True)
    parts = [rig.object(1, 2), rig.object(3, 4)]
    slot = rig.stored(b"a" * 32)
    rest = rig.object(1, 2, 3, 4, 7)
    for rank, blocks in enumerate([(5, 6), (6, 5)]):
        rig.transfers[rank].load(8, 0, *slot, ids(*blocks))
        assert rig.run(rank) == [(8, True)]
        assert torch.equal(rig.object(*blocks), parts[rank])
    assert torch.equal(rig.object(1, 2, 3, 4, 7), rest)


def test_a_block_that_is_left_out_stays_as_it_is(cache: Any, kind: str) -> None:
    rig = Rig(cache, kind)
    part, before = rig.object(1, 2), rig.object(0, 5)
    slot = rig.stored(b"b" * 32)
    rig.transfers[0].load(8, 0, *slot, ids(0, 6))
    assert rig.run(0) == [(8, True)]
    assert torch.equal(rig.object(0, 5), before)
    pages = rig.object(6)
    assert torch.equal(pages[:PAGE], part[PAGE : 2 * PAGE])
    assert torch.equal(pages[PAGE:], part[4 * PAGE :])


def test_a_flipped_byte_is_refused_when_loads_are_verified(cache: Any, kind: str) -> None:
    rig = Rig(cache, kind, verify=True)
    slot = rig.stored(b"c" * 32)
    (address, _), *_ = cache.spans(*slot)
    import ctypes

    damaged = ctypes.c_uint8.from_address(address + 5)
    damaged.value ^= 0x40
    rig.transfers[0].load(8, 0, *slot, ids(5, 6))
    assert rig.run(0) == [(8, False)]


def test_an_object_that_is_gone_fails_the_job(cache: Any, kind: str) -> None:
    rig = Rig(cache, kind)
    slot = rig.stored(b"d" * 32)
    assert cache.clear_memory() == 4096
    rig.transfers[0].load(8, 0, *slot, ids(5, 6))
    assert rig.run(0) == [(8, False)]
    rig.transfers[0].store(9, 0, *slot, ids(1, 2))
    assert rig.run(0) == [(9, False)]


def test_pins_are_given_back(cache: Any, kind: str) -> None:
    rig = Rig(cache, kind)
    slot = rig.stored(b"e" * 32)
    rig.transfers[0].load(8, 0, *slot, ids(5, 6))
    assert rig.run(0) == [(8, True)]
    assert cache.clear_memory() == 4096


def test_impossible_blocks_are_refused_before_anything_is_copied(cache: Any, kind: str) -> None:
    rig = Rig(cache, kind)
    slot = rig.reserve(b"f" * 32)
    for blocks in [(1,), (0, 1), (1, BLOCKS)]:
        with pytest.raises(ValueError, match="block"):
            rig.transfers[0].store(9, 0, *slot, ids(*blocks))
    assert rig.transfers[0].poll() == []


def test_closing_ends_what_waits_for_bytes(cache: Any) -> None:
    rig = Rig(cache, "host")
    slot = rig.reserve(b"g" * 32)
    rig.transfers[0].load(8, 0, *slot, ids(5, 6))
    rig.transfers[0].close(0.05)
    assert rig.transfers[0].poll() == [(8, False)]
