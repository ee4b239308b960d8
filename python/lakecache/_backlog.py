"""Chunks that are computed and wait for slots, their blocks pinned.

A slot takes some ten microseconds to get, and a copy as long to start. Done for all chunks of a
prompt in the step that computes them, that would delay the request's first token; so it is done in
later steps, for some chunks in each.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lakecache._objects import KEY_BYTES, KIND_CHUNK

if TYPE_CHECKING:
    from lakecache._metadata import StepPlan, Tally
    from lakecache._records import Tracked
    from lakecache._saves import Saves

__all__ = ["PUT_OFF_SECONDS", "STORES_PER_STEP", "Backlog", "Run", "is_late"]

# Chunks that get a slot in a step, besides as many as a step computes: some ten microseconds each,
# of steps that may take only a millisecond or two; and at most so many bytes of each rank.
STORES_PER_STEP = 4
STEP_BYTES = 128 << 20

# What finds no room for this long, in steps that may take a millisecond, is not stored; nor is what
# has waited for this long when vLLM lacks the blocks.
PUT_OFF_SECONDS = 2.0
SHORT_SECONDS = 0.05
# Attempts in a step that find no room: some hundred microseconds each, where all that is in memory
# is in use.
FAILURES_PER_STEP = 4


class Run:
    """Consecutive chunks of a request that are computed and wait for slots.

    `ids` are the chunks' block ids, `per_chunk` for each, `blocks` what pins them, and `step` the
    number of the step that computed the last one.
    """

    __slots__ = ("blocks", "first", "ids", "per_chunk", "step", "tracked")

    def __init__(
        self, tracked: Tracked, first: int, ids: array[int], blocks: list[Any], per_chunk: int,
        step: int,
    ) -> None:  # fmt: skip
        self.tracked = tracked
        self.first = first
        self.ids = ids
        self.blocks = blocks
        self.per_chunk = per_chunk
        self.step = step

    def __len__(self) -> int:
        """How many chunks are left."""
        return len(self.blocks) // self.per_chunk

    def take(self, chunks: int = 1) -> tuple[bytes, list[Any]]:
        """Take the first chunks out: their packed block ids, and what pins them."""
        count = chunks * self.per_chunk
        ids, blocks = self.ids[:count], self.blocks[:count]
        del self.ids[:count], self.blocks[:count]
        self.first += chunks
        return ids.tobytes(), blocks


def is_late(since: float | None, seconds: float | None = None) -> bool:
    """Whether something has waited for too long."""
    limit = PUT_OFF_SECONDS if seconds is None else seconds
    return since is not None and time.monotonic() - since > limit


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
        self.runs: list[Run] = []

    def __bool__(self) -> bool:
        """Whether blocks are pinned here."""
        return bool(self.runs)

    def __contains__(self, tracked: Tracked) -> bool:
        """Whether chunks of this request are left."""
        return any(run.tracked is tracked for run in self.runs)

    def moves(self) -> bool:
        """Whether chunks will get slots in the next steps, as far as can be seen."""
        return any(run.tracked.no_room is None for run in self.runs)

    def pin(
        self, tracked: Tracked, ready: int, tables: Sequence[Sequence[int]], blocks: int
    ) -> bool:
        """Pin the blocks of a request's chunks up to `ready`, as far as that is allowed; whether
        there were any. A chunk has so many blocks of each of the block tables.
        """
        first, per_chunk = tracked.pinned, blocks * len(tables)
        count = self._saves.room_for(per_chunk, ready - first)
        end = min(first + count, *(len(table) // blocks for table in tables))
        if len(tables) == 1:
            ids = array("i", tables[0][first * blocks : end * blocks])
        else:
            ids = array("i")
            for at in range(first * blocks, end * blocks, blocks):
                for table in tables:
                    ids.extend(table[at : at + blocks])
        # A block that is gone ends the run.
        count = (ids.index(0) if 0 in ids else len(ids)) // per_chunk
        if count:
            del ids[count * per_chunk :]
            pinned, step = self._saves.pin(ids), self._saves.planned
            self.runs.append(Run(tracked, first, ids, pinned, per_chunk, step))
            tracked.pinned += count
            tracked.put_off = None
        if tracked.pinned < ready and tracked.put_off is None:
            tracked.put_off = time.monotonic()
            self._counts["stores_put_off"] += 1
        return count > 0

    def clear(self, after: int = 0) -> None:
        """Give up what was computed after this step."""
        runs, self.runs = self.runs, [run for run in self.runs if run.step <= after]
        for run in runs:
            if run.step > after:
                self._saves.unpin(run.blocks)

    def drop(self, tracked: Tracked) -> None:
        """Give up a request's chunks."""
        for run in self.runs:
            if run.tracked is tracked:
                self._saves.unpin(run.take(len(run))[1])
        self.runs = [run for run in self.runs if run]

    def allowed(self, tokens: int, tokens_before: int) -> int:
        """How many chunks may get slots in a step of so many tokens, after one of so many.

        What a GPU sends to the host waits for all copies that were queued before, on whichever
        stream (measured on an H200), and so do the tokens. A step that computes chunks takes longer
        than copying as many; before others, only what is copied within a few milliseconds may
        be queued.
        """
        part = self._chunk_bytes() // self._saves.ranks
        few = max(1, min(STORES_PER_STEP, STEP_BYTES // max(part, 1)))
        computed = min(tokens, tokens_before) // self._chunk
        return few + computed if computed else max(0, min(few, 2 * few - len(self._saves)))

    def plan(self, plan: StepPlan, most: int, *, short: bool = False) -> list[Tracked]:
        """Begin to store up to `most` chunks; those without room wait, others may pass them.

        Gives the requests of which nothing more can be stored: they have waited for too long, or
        wait while vLLM is `short` of blocks.
        """
        failed: set[Tracked] = set()
        for run in self.runs:
            while run and most > 0 and len(failed) < FAILURES_PER_STEP:
                if self._store(plan, run, patient=not failed):
                    most -= 1
                    continue
                if run.first == run.tracked.next_save:
                    failed.add(run.tracked)
                break
        runs = [run for run in self.runs if run]
        if len(failed) == FAILURES_PER_STEP:
            # Others have their turn in the next step.
            runs.sort(key=lambda run: run.tracked in failed)
        self.runs = runs
        limit = SHORT_SECONDS if short else None
        late = dict.fromkeys(
            run.tracked for run in self.runs if is_late(run.tracked.no_room, limit)
        )
        for tracked in late:
            self._counts["stores_dropped"] += 1
            self.drop(tracked)
        return list(late)

    def _store(self, plan: StepPlan, run: Run, *, patient: bool) -> bool:
        """Begin to store the first chunk of a run; False where it has to wait in the backlog.

        Only who is `patient` waits for the pool's lock, which a stopped process may hold.
        """
        tracked, index = run.tracked, run.first
        keys, space = tracked.keys, tracked.space
        done = len(run) if space is None else min(tracked.next_save - index, len(run))
        if done > 0 or space is None:
            self._saves.unpin(run.take(done)[1])
            return True
        if index > tracked.next_save:
            # What comes before it is not stored, and without that it would not be found.
            self._wait(tracked)
            return False
        key = keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]
        slot = self._cache.reserve(
            space.number, key, KIND_CHUNK,
            keys[(index - 1) * KEY_BYTES : index * KEY_BYTES] if index else None,
            index * self._chunk, (index + 1) * self._chunk - 1,
            self._saves.ranks, self._chunk_bytes(), *(() if patient else (0.0,)),
        )  # fmt: skip
        if slot is not None:
            self._saves.start(plan, KIND_CHUNK, slot, *run.take(), run.step)
            stored = 1
        else:
            rest = keys[index * KEY_BYTES : (index + len(run)) * KEY_BYTES]
            stored, in_memory = self._cache.lookup(rest)
            if not stored:
                # No room, a busy lock, or somebody is writing it: perhaps in the next step.
                self._wait(tracked)
                return False
            if in_memory < stored:
                # There may be room for the others in memory.
                stored = 1
            # Left over behind lost ones: as recent now as what is stored around them.
            self._cache.touch(keys[: (index + stored) * KEY_BYTES])
            self._saves.unpin(run.take(stored)[1])
        tracked.no_room = None
        tracked.next_save = index + stored
        return True

    def _wait(self, tracked: Tracked) -> None:
        if tracked.no_room is None:
            tracked.no_room = time.monotonic()
            self._counts["stores_put_off"] += 1
