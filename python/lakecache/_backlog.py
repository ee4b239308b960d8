"""Chunks that are computed and wait for slots, their blocks pinned.

A slot takes some ten microseconds to get, and a copy as long to start. Done for all chunks of a
prompt in the step that computes them, that would delay the request's first token; so it is done in
later steps, for some chunks in each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lakecache._support import KEY_BYTES, KIND_CHUNK

if TYPE_CHECKING:
    from array import array

    from lakecache._metadata import StepPlan, Tally
    from lakecache._records import Tracked
    from lakecache._saves import Saves

__all__ = ["PUT_OFF_SECONDS", "Backlog", "Run", "is_late", "put_off"]

# What finds no room for this long, in steps that may take a millisecond, is not stored.
PUT_OFF_SECONDS = 2.0


class Run:
    """Consecutive chunks of a request that are computed and wait for slots.

    `ids` are the chunks' block ids, `per_chunk` for each, and `blocks` what pins them.
    """

    __slots__ = ("blocks", "first", "ids", "per_chunk", "put_off", "tracked")

    def __init__(
        self, tracked: Tracked, first: int, ids: array[int], blocks: list[Any], per_chunk: int
    ) -> None:
        self.tracked = tracked
        self.first = first
        self.ids = ids
        self.blocks = blocks
        self.per_chunk = per_chunk
        # Since when the first of them has found no room.
        self.put_off: float | None = None

    def __bool__(self) -> bool:
        """Whether a chunk is left."""
        return bool(self.blocks)

    def take(self) -> tuple[bytes, list[Any]]:
        """Take the first chunk out: its packed block ids, and what pins them."""
        ids, blocks = self.ids[: self.per_chunk], self.blocks[: self.per_chunk]
        del self.ids[: self.per_chunk], self.blocks[: self.per_chunk]
        self.first += 1
        self.put_off = None
        return ids.tobytes(), blocks


def put_off(waiting: Tracked | Run) -> bool:
    """Note that something has to wait for the next step; whether that is news."""
    if waiting.put_off is not None:
        return False
    waiting.put_off = time.monotonic()
    return True


def is_late(waiting: Tracked | Run) -> bool:
    """Whether something has waited for too long."""
    return waiting.put_off is not None and time.monotonic() - waiting.put_off > PUT_OFF_SECONDS


class Backlog:
    """Runs of chunks, in the order in which they were computed."""

    def __init__(
        self, cache: Any, saves: Saves, *, chunk: int, counts: Tally,
        chunk_bytes: Callable[[], int],
    ) -> None:  # fmt: skip
        self._cache = cache
        self._saves = saves
        self._chunk = chunk
        self._counts = counts
        # Of all ranks, known once they have answered.
        self._chunk_bytes = chunk_bytes
        self._runs: list[Run] = []

    def __bool__(self) -> bool:
        """Whether blocks are pinned here."""
        return bool(self._runs)

    def __contains__(self, tracked: Tracked) -> bool:
        """Whether chunks of this request are left."""
        return any(run.tracked is tracked for run in self._runs)

    def moves(self) -> bool:
        """Whether chunks will get slots in the next steps, as far as can be seen."""
        return any(run.put_off is None for run in self._runs)

    def append(self, run: Run) -> None:
        """Take over pinned chunks."""
        self._runs.append(run)

    def clear(self) -> None:
        """Give all of them up."""
        runs, self._runs = self._runs, []
        for run in runs:
            self._saves.unpin(run.blocks)

    def plan(self, plan: StepPlan, most: int) -> None:
        """Begin to store up to `most` chunks; those without room wait, others may pass them."""
        for run in list(self._runs):
            while run and most > 0 and self._store(plan, run):
                most -= 1
            if run and is_late(run):
                self._counts["stores_dropped"] += 1
                self._saves.unpin(run.blocks)
                run.blocks.clear()
        self._runs = [run for run in self._runs if run]

    def _store(self, plan: StepPlan, run: Run) -> bool:
        """Begin to store the first chunk of a run; False where it has to wait."""
        tracked, index = run.tracked, run.first
        keys, space = tracked.keys, tracked.space
        if index < tracked.next_save or space is None:
            self._saves.unpin(run.take()[1])
            return True
        if index > tracked.next_save:
            # What comes before it is not stored, and without that it would not be found.
            self._wait(run)
            return False
        key = keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]
        slot = self._cache.reserve(
            space.number, key, KIND_CHUNK,
            keys[(index - 1) * KEY_BYTES : index * KEY_BYTES] if index else None,
            index * self._chunk, (index + 1) * self._chunk - 1,
            self._saves.ranks, self._chunk_bytes(),
        )  # fmt: skip
        if slot is not None:
            self._saves.start(plan, KIND_CHUNK, slot, *run.take())
        elif not self._cache.lookup(key)[0]:
            # No room, a busy lock, or somebody is writing it: perhaps in the next step.
            self._wait(run)
            return False
        else:
            # Left over behind a lost one: as recent now as what is stored around it.
            self._cache.touch(keys[: (index + 1) * KEY_BYTES])
            self._saves.unpin(run.take()[1])
        tracked.next_save = index + 1
        return True

    def _wait(self, run: Run) -> None:
        self._counts["stores_put_off"] += put_off(run)
