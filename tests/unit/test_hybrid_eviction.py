"""Chunks and states of chats in a memory too small for them: which go first."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

core = pytest.importorskip("lakecache._core")

CHUNK, STATE = 256 << 10, 768 << 10
KIND_CHUNK, KIND_STATE = 0, 1


@pytest.fixture
def cache(ram_folder: Path) -> Iterator[Any]:
    made = core.Cache(
        cache_dir=None, ram_dir=str(ram_folder), cpu_bytes=24 << 20, disk_capacity_bytes=None
    )
    yield made
    made.close()


class Chat:
    """A prompt that grows by one block each turn, as the connector stores it."""

    def __init__(self, cache: Any, number: int) -> None:
        self.cache = cache
        self.number = number
        self.space = cache.namespace(b"n" * 32, "{}", False, wait=20.0)
        self.turns = 0

    def keys(self, kind: int) -> list[bytes]:
        hashes = [bytes([self.number, turn]) * 16 for turn in range(self.turns)]
        joined = bytes(core.derive_keys(b"n" * 32, kind, hashes))
        return [joined[at : at + 32] for at in range(0, len(joined), 32)]

    def put(self, key: bytes, kind: int, parent: bytes | None, end: int) -> None:
        if self.cache.lookup(key)[0]:
            return
        size = CHUNK if kind == KIND_CHUNK else STATE
        slot, deadline = None, time.monotonic() + 20
        while slot is None:
            # At first the memory is still being reserved.
            assert time.monotonic() < deadline, "no room"
            slot = self.cache.reserve(self.space, key, kind, parent, 0, end, 1, size, 0.1)
        self.cache.commit(*slot)
        assert self.cache.flush(10)

    def present(self) -> tuple[int, list[bool]]:
        """How many leading chunks are there, and which states."""
        chunks = self.cache.lookup(b"".join(self.keys(KIND_CHUNK)))[0] if self.turns else 0
        return chunks, [bool(self.cache.lookup(key)[0]) for key in self.keys(KIND_STATE)]

    def turn(self) -> None:
        """Use the chunks that are there, continue the last state, whose age stays, and store
        what is new.
        """
        found, _ = self.present()
        self.cache.touch(b"".join(self.keys(KIND_CHUNK)[:found]))
        self.turns += 1
        chunks = self.keys(KIND_CHUNK)
        for index, key in enumerate(chunks):
            self.put(key, KIND_CHUNK, chunks[index - 1] if index else None, index * 10 + 9)
        self.put(self.keys(KIND_STATE)[-1], KIND_STATE, chunks[-1], self.turns * 10)


def test_states_go_before_their_chunks_and_old_ones_before_new(cache: Any) -> None:
    chats = [Chat(cache, number) for number in range(12)]
    dice = random.Random(5)
    for step in range(60):
        chats[step % 12 if step < 24 else dice.randrange(12)].turn()
        for chat in chats:
            chunks, states = chat.present()
            # No state without its chunks: it would be dead weight.
            deepest = max((turn for turn, there in enumerate(states, 1) if there), default=0)
            assert deepest <= chunks, (chat.number, chunks, states)
            # What a chat continues next outlives what it has continued already.
            assert states == sorted(states), (chat.number, states)
    assert cache.stats()["memory_evictions"] > 20
