"""Objects on their way from the GPU's blocks into slots, and the blocks that are kept for them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lakecache._records import Store

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

    from lakecache._metadata import StepPlan, Tally

__all__ = ["Saves"]

# Saves under way, of some ten milliseconds each, may pin at most one part in this many of the
# GPU's blocks, and this many objects.
PINNED_SHARE = 2
IN_FLIGHT = 1024
SYNC_WRITE_SECONDS = 10.0


class Saves:
    """A save ends when every rank has copied its part, or failed to: committed, or abandoned."""

    def __init__(
        self,
        cache: Any,
        *,
        ranks: int,
        num_blocks: int,
        counts: Tally,
        write_first: bool,
    ) -> None:
        """With `write_first`, a save ends only when the object is on disk (`transfer: sync`)."""
        self._cache = cache
        self.ranks = ranks
        self.num_blocks = num_blocks
        self._counts = counts
        self._idents = itertools.count(1)
        self._write_first = write_first
        self._jobs: dict[int, Store] = {}
        self._pool: BlockPool | None = None
        self.pinned_blocks = 0
        # Steps that were planned, and those of them that have come back.
        self.planned = self.ended = 0

    def bind(self, pool: BlockPool) -> None:
        """Take vLLM's block pool."""
        self._pool = pool

    def __len__(self) -> int:
        """How many are under way: an acknowledgement of each is awaited."""
        return len(self._jobs)

    def __contains__(self, job: int) -> bool:
        """Whether this save is under way."""
        return job in self._jobs

    def room_for(self, blocks: int, wanted: int = 1) -> int:
        """How many of the `wanted` objects, of so many blocks each, may have theirs pinned."""
        if self._pool is None or len(self._jobs) >= IN_FLIGHT:
            return 0
        most = max(self.num_blocks // PINNED_SHARE, blocks)
        return max(0, min(wanted, (most - self.pinned_blocks) // blocks))

    def pin(self, ids: Sequence[int]) -> list[Any]:
        """Keep blocks from being given to others until `unpin`."""
        if self._pool is None:
            raise RuntimeError("vLLM has not bound its block pool")
        blocks = [self._pool.blocks[block] for block in ids]
        self._pool.touch(blocks)
        self.pinned_blocks += len(blocks)
        return blocks

    def unpin(self, blocks: list[Any]) -> None:
        """Give blocks back that `pin` gave."""
        self.pinned_blocks -= len(blocks)
        if self._pool is not None:
            self._pool.free_blocks(reversed(blocks))

    def start(
        self, plan: StepPlan, shape: int, slot: tuple[int, int], ids: bytes, blocks: list[Any],
        step: int,
    ) -> int:  # fmt: skip
        """Have the workers copy pinned blocks, computed in a step of this number, into a slot; the
        blocks are ours from here on.
        """
        job = next(self._idents)
        self._jobs[job] = Store(*slot, blocks, step)
        plan.stores.append((job, shape, *slot, ids))
        self._counts["stores"] += 1
        return job

    def copied(self, job: int, good: int, bad: int) -> None:
        """Take how many ranks have copied their part, and how many could not."""
        store = self._jobs.get(job)
        if store is None:
            return
        store.ranks_good += good
        store.ranks_bad += bad
        if store.ranks_good + store.ranks_bad < self.ranks:
            return
        del self._jobs[job]
        try:
            if store.ranks_bad or store.distrusted:
                self._counts["stores_failed"] += 1
                self._cache.abandon(store.entry, store.generation)
            else:
                self._cache.commit(store.entry, store.generation)
                if self._write_first:
                    self._cache.flush(SYNC_WRITE_SECONDS)
        finally:
            # Whatever the store says, the engine gets its blocks back.
            self.unpin(store.blocks)

    def distrust(self) -> None:
        """Have all that is under way end as failed: it may not be what it should be."""
        for store in self._jobs.values():
            store.distrusted = True

    def abandon(self, after: int = 0) -> None:
        """Give up, at the engine's end, what is under way and was computed after this step."""
        for job, store in list(self._jobs.items()):
            if store.step > after:
                del self._jobs[job]
                self._cache.abandon(store.entry, store.generation)
