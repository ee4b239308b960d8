"""Moves objects between the engine's KV pages and the shared arena.

A transfer takes jobs, one rank's part of one object each, and reports every job exactly once. A
copy that has begun is never abandoned: its memory may be given to another request only when the
copy is over. Only waiting for an object to become readable has a deadline.

`HostTransfer` works on pages in host memory.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lakecache._pages import ObjectShape

__all__ = ["HostTransfer", "Transfer"]

# How long a load may wait for its object to arrive from disk.
ARRIVAL_SECONDS = 20.0
COPY_THREADS = 2
COPIED = 0


class Transfer(Protocol):
    """What the worker half needs. All calls come from one thread and none of them blocks.

    `kind` names one of the shapes given at the start; `ids` are packed 32-bit block ids, one per
    slot of that shape. Source and target blocks stay allocated until the job was reported.
    """

    def store(self, job: int, kind: int, entry: int, generation: int, ids: bytes) -> None:
        """Copy pages, as the work queued on the device so far leaves them, into a FILLING entry.

        Raises ValueError for block ids that cannot be, and then does not report the job.
        """

    def load(self, job: int, kind: int, entry: int, generation: int, ids: bytes) -> None:
        """Copy an entry, as soon as it is READY, into pages. Slots with block 0 are left out.

        Raises like `store`.
        """

    def poll(self) -> list[tuple[int, bool]]:
        """Go on with what is queued; the jobs that ended since the last call, and if well."""

    def close(self, timeout: float) -> bool:
        """Wait for the copies under way; True if none of them touches a page any more."""


class HostTransfer:
    """Copies by threads of the compiled half, without the GIL."""

    def __init__(
        self, cache: Any, shapes: Mapping[int, ObjectShape], *, rank: int, verify: bool = False
    ) -> None:
        """Take an open cache and the shapes of its objects by kind.

        `rank` says which part of an object is ours; with `verify`, what was loaded is compared
        with what is stored.
        """
        self._cache = cache
        self._shapes = shapes
        self._rank = rank
        self._verify = verify
        self._copier = cache.copier(COPY_THREADS)
        self._numbers = itertools.count(1)
        # The job of each copy, and what is known of each job.
        self._owners: dict[int, int] = {}
        self._jobs: dict[int, _HostJob] = {}
        self._over: list[tuple[int, bool]] = []

    def store(self, job: int, kind: int, entry: int, generation: int, ids: bytes) -> None:
        """See `Transfer.store`."""
        blocks = self._shapes[kind].check(ids, whole=True)
        self._begin(job, kind, entry, generation, blocks, store=True)

    def load(self, job: int, kind: int, entry: int, generation: int, ids: bytes) -> None:
        """See `Transfer.load`."""
        blocks = self._shapes[kind].check(ids, whole=False)
        self._begin(job, kind, entry, generation, blocks, store=False)

    def _begin(
        self, job: int, kind: int, entry: int, generation: int, blocks: Any, *, store: bool
    ) -> None:
        if not self._cache.pin(entry, generation):
            self._over.append((job, False))
            return
        state = self._jobs[job] = _HostJob(entry, generation)
        shape = self._shapes[kind]
        part = self._rank * shape.part_bytes
        for run in shape.fragments(blocks):
            number = next(self._numbers)
            self._owners[number] = job
            state.copies += 1
            place = (number, entry, generation, part + run.offset, run.addresses)
            if store:
                self._copier.store(*place, run.fragment_bytes)
            else:
                self._copier.load(*place, run.fragment_bytes, ARRIVAL_SECONDS, self._verify)

    def poll(self) -> list[tuple[int, bool]]:
        """See `Transfer.poll`."""
        if self._owners:
            for number, status in self._copier.poll():
                job = self._owners.pop(number)
                state = self._jobs[job]
                state.copies -= 1
                state.good &= status == COPIED
                if state.copies == 0:
                    del self._jobs[job]
                    self._cache.unpin(state.entry, state.generation)
                    self._over.append((job, state.good))
        over, self._over = self._over, []
        return over

    def close(self, timeout: float) -> bool:
        """See `Transfer.close`."""
        deadline = time.monotonic() + timeout
        over: list[tuple[int, bool]] = []
        while self._jobs and time.monotonic() < deadline:
            over += self.poll()
            time.sleep(0.001)
        self._copier.close()
        over += self.poll()
        self._over = over
        return not self._jobs


class _HostJob:
    __slots__ = ("copies", "entry", "generation", "good")

    def __init__(self, entry: int, generation: int) -> None:
        self.entry = entry
        self.generation = generation
        self.copies = 0
        self.good = True
