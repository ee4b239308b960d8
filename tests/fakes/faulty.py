"""A stand-in cache and block pool that fail now and then, and notice what is freed twice."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from fakes import core as fake

BLOCKS = 64


class Fault(Exception):
    """Something that the half calls went wrong."""


class FaultyCache(fake.Cache):
    """Raises, has room for so many objects, and loses what nobody holds."""

    random: random.Random
    faults = 0.0
    room = 10**9

    def _fault(self, where: str) -> None:
        if self.random.random() < self.faults:
            raise Fault(where)

    def lookup(self, keys: bytes) -> tuple[int, int]:
        self._fault("lookup")
        return super().lookup(keys)

    def lookup_checkpoints(self, *arguments: Any) -> Any:
        self._fault("lookup_checkpoints")
        return super().lookup_checkpoints(*arguments)

    def lease(self, keys: bytes) -> fake.Lease:
        self._fault("lease")
        self.pool.polls_pending = self.random.choice([0, 0, 0, 1, 5])
        return super().lease(keys)

    def reserve(self, number: int, key: bytes, *rest: Any) -> Any:
        assert len(key) == fake.KEY
        self._fault("reserve")
        return super().reserve(number, key, *rest) if len(self.pool.slots) < self.room else None

    def commit(self, entry: int, generation: int) -> None:
        super().commit(entry, generation)
        self._fault("commit")

    def touch(self, keys: bytes) -> None:
        self._fault("touch")

    def lose(self) -> None:
        """Evict from memory, from disk, or both."""
        for entry, slot in list(self.pool.slots.items()):
            file = self.pool.file(slot.key)
            if slot.state == 1 and not slot.pins and self.random.random() < 0.3:
                if self.random.random() < 0.5:
                    self.pool.drop(entry)
                if file is not None and self.random.random() < 0.5:
                    file.unlink(missing_ok=True)


class Block:
    def __init__(self, block_id: int) -> None:
        self.block_id, self.ref_cnt = block_id, 0
        # What each unit of tokens left here; a state is one piece.
        self.content: dict[int, bytes] = {}
        self.hash: bytes | None = None


class BlockPool:
    """vLLM's: a block that nobody uses keeps its content until it is given to somebody."""

    def __init__(self, chance: random.Random) -> None:
        self.random, self.faults = chance, 0.0
        self.blocks = [Block(i) for i in range(BLOCKS)]
        self.free = deque(self.blocks[1:])
        self.by_hash: dict[bytes, Block] = {}

    def touch(self, blocks: list[Block]) -> None:
        if self.random.random() < self.faults:
            raise Fault("touch of blocks")
        for block in blocks:
            if not block.ref_cnt:
                self.free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            assert block.ref_cnt > 0, f"block {block.block_id} is freed twice"
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self.free.append(block)

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def take(self, count: int) -> list[Block] | None:
        if len(self.free) < count:
            return None
        blocks = [self.free.popleft() for _ in range(count)]
        for block in blocks:
            block.ref_cnt, block.content = 1, {}
            if block.hash is not None and self.by_hash.get(block.hash) is block:
                del self.by_hash[block.hash]
            block.hash = None
        return blocks

    def reset(self) -> bool:
        if len(self.free) < BLOCKS - 1:
            return False
        self.by_hash.clear()
        return True
