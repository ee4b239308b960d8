"""Moves objects between the engine's KV pages and the shared arena.

A transfer takes jobs, one rank's part of one object each, and reports every job exactly once. A
copy that has begun is never abandoned: its memory may be given to another request only when the
copy is over. Only waiting for an object to become readable has a deadline.

- `HostTransfer`: pages in host memory, copied by threads.
- `PackedTransfer`: pages on a GPU, gathered and scattered by kernels, across the bus in one piece.
- `SerialTransfer`: page by page, one after the other, anywhere: the slow reference for the others.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import time
from typing import TYPE_CHECKING, Any, Protocol

from lakecache._objects import FILLING, READY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from lakecache._pages import ObjectShape
    from lakecache._staging import Lane, StagingBuffers

__all__ = ["HostTransfer", "PackedTransfer", "SerialTransfer", "Transfer", "slice_spans"]

log = logging.getLogger("vllm.lakecache")

# How long a load may wait for its object to arrive from disk.
ARRIVAL_SECONDS = 20.0
COPY_THREADS = 2
COPIED = 0


class Transfer(Protocol):
    """What the worker half needs. All calls come from one thread and none of them blocks.

    `kind` names one of the shapes given at the start; `ids` are packed 32-bit block ids, one per
    slot of that shape. Source and target blocks stay allocated until the job was reported; those of
    a load that was followed may be freed at once, as later work waits for it.
    """

    # Whether the engine's own work can be made to wait for loads, within one step.
    same_step: bool

    def mark_computed(self) -> None:
        """Have the stores that follow, until the next call, wait for the work that is queued on
        the device so far, and for no more.
        """

    def store(self, job: int, kind: int, entry: int, generation: int, ids: bytes) -> None:
        """Copy pages into a FILLING entry, once what `mark_computed` stands for has run.

        Nothing may write to the pages from then on. Raises ValueError for block ids that cannot be,
        and then does not report the job.
        """

    def load(self, job: int, kind: int, entry: int, generation: int, ids: bytes) -> None:
        """Copy an entry, as soon as it is READY, into pages, behind all work that is queued on the
        device so far. Slots with block 0 are left out. Raises like `store`.
        """

    def follow_loads(self) -> None:
        """Have the engine's next work wait for the loads begun so far.

        Only where `same_step` is true, and for objects that are in memory and stay there.
        """

    def poll(self) -> list[tuple[int, bool]]:
        """Go on with what is queued; the jobs that ended since the last call, and if well."""

    def close(self, timeout: float) -> bool:
        """Wait for the copies under way; True if none of them touches a page any more."""


class HostTransfer:
    """Copies by threads of the compiled half, without the GIL."""

    same_step = False

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

    def mark_computed(self) -> None:
        """Nothing to note: what the engine has queued, it has also done."""

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

    def follow_loads(self) -> None:
        """Not offered."""
        raise RuntimeError("copies by threads cannot be waited for within a step")

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


class PackedTransfer:
    """Copies between GPU pages and registered host memory, all layers of many objects at once.

    Stores: a kernel gathers the pages of a batch of jobs into a staging buffer, from which each
    part goes to its object in one piece; loads go the other way. Each direction has two buffers,
    so that the kernel of one batch runs while another crosses the bus. All of it is queued at once
    and ordered on the GPU: nothing here waits, and the engine's stream only for `follow_loads`.
    """

    same_step = True

    def __init__(
        self,
        cache: Any,
        shapes: Mapping[int, ObjectShape],
        buffers: StagingBuffers,
        *,
        rank: int,
        device: torch.device,
        verify: bool = False,
    ) -> None:
        """Like `HostTransfer`, with the worker's staging memory on `device`."""
        import torch

        from lakecache import _kernels
        from lakecache._cuda import HostRegistration
        from lakecache._staging import Lane

        self._cache = cache
        self._shapes = shapes
        tables = {
            kind: _kernels.RowTable(
                shape.bases.tolist(), shape.strides.tolist(), shape.sizes.tolist(),
                shape.offsets.tolist(), shape.slots.tolist(),
                part_bytes=shape.part_bytes, slot_count=shape.slot_count, device=device,
            )
            for kind, shape in shapes.items()
        }  # fmt: skip
        for table in tables.values():
            table.warm_up()
        torch.cuda.current_stream(device).synchronize()
        self._registration = HostRegistration(cache)
        self._loads, self._stores = (
            Lane(
                cache, self._registration, shapes, tables, buffers.pair(number),
                rank=rank, storing=bool(number), verify=verify,
            )
            for number in range(2)
        )  # fmt: skip
        self._over: list[tuple[int, bool]] = []
        # Whether an object to load was gone, since the last poll.
        self._refused = False
        self._broken: Exception | None = None

    def mark_computed(self) -> None:
        """See `Transfer.mark_computed`."""
        self._stores.mark()

    def store(self, job: int, kind: int, entry: int, generation: int, ids: bytes) -> None:
        """See `Transfer.store`."""
        self._begin(self._stores, job, kind, entry, generation, ids)

    def load(self, job: int, kind: int, entry: int, generation: int, ids: bytes) -> None:
        """See `Transfer.load`."""
        self._begin(self._loads, job, kind, entry, generation, ids)

    def _begin(
        self, lane: Lane, job: int, kind: int, entry: int, generation: int, ids: bytes
    ) -> None:
        from lakecache._staging import LaneJob

        if self._broken is not None:
            raise RuntimeError("GPU transfers have ended after an error") from self._broken
        blocks = self._shapes[kind].check(ids, whole=lane.storing)
        if self._cache.pin(entry, generation):
            try:
                lane.add(LaneJob(job, kind, entry, generation, blocks))
            except Exception:
                self._cache.unpin(entry, generation)
                raise
        else:
            self._over.append((job, False))
            self._refused |= not lane.storing

    def poll(self) -> list[tuple[int, bool]]:
        """See `Transfer.poll`."""
        self._refused = False
        try:
            for lane in (self._loads, self._stores):
                if lane.busy():
                    lane.advance()
        except Exception as error:
            self._fail(error)
        for lane in (self._loads, self._stores):
            for job, good in lane.take_over():
                self._cache.unpin(job.entry, job.generation)
                self._over.append((job.job, good))
        over, self._over = self._over, []
        return over

    def follow_loads(self) -> None:
        """Have the engine's stream wait for the loads begun so far, all of them in memory.

        RuntimeError: one of them cannot be made. The engine's next work must not run then.
        """
        try:
            self._loads.advance(at_once=True)
            followed = self._loads.follow()
        except Exception as error:
            self._fail(error)
            raise
        if not followed or self._refused:
            raise RuntimeError("an object that was held in memory is not there")

    def _fail(self, error: Exception) -> None:
        """End all jobs as failed, when nothing touches their memory any more."""
        log.warning("LakeCache: a GPU transfer failed; no more are made", exc_info=error)
        self._broken, self.same_step = error, False
        self._loads.drop_all()
        self._stores.drop_all()

    def close(self, timeout: float) -> bool:
        """See `Transfer.close`."""
        deadline = time.monotonic() + timeout
        lanes = (self._loads, self._stores)
        over: list[tuple[int, bool]] = []
        while any(lane.busy() for lane in lanes) and time.monotonic() < deadline:
            over += self.poll()
            time.sleep(0.0005)
        for lane in lanes:
            lane.drop_waiting()
        self._over = over + self.poll()
        idle = not any(lane.busy() for lane in lanes)
        if idle:
            self._registration.close()
        return idle


class SerialTransfer:
    """One page after the other, and back only when it is done: obvious, and slow.

    A load waits, within a bound, for its object; no device stream runs ahead.
    """

    same_step = False

    def __init__(
        self,
        cache: Any,
        shapes: Mapping[int, ObjectShape],
        storage: torch.UntypedStorage,
        *,
        rank: int,
        verify: bool = False,
    ) -> None:
        """Like `HostTransfer`; `storage` is the allocation that all pages lie in."""
        import torch

        self._cache = cache
        self._shapes = shapes
        self._rank = rank
        self._verify = verify
        self._memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self._over: list[tuple[int, bool]] = []

    def mark_computed(self) -> None:
        """Nothing to note: each copy waits for all work that is queued."""

    def store(self, job: int, kind: int, entry: int, generation: int, ids: bytes) -> None:
        """See `Transfer.store`."""
        blocks = self._shapes[kind].check(ids, whole=True)
        self._over.append((job, self._copy(kind, entry, generation, blocks, storing=True)))

    def load(self, job: int, kind: int, entry: int, generation: int, ids: bytes) -> None:
        """See `Transfer.load`."""
        blocks = self._shapes[kind].check(ids, whole=False)
        deadline = time.monotonic() + ARRIVAL_SECONDS
        while self._cache.state(entry, generation) == FILLING and time.monotonic() < deadline:
            time.sleep(0.0005)
        self._over.append((job, self._copy(kind, entry, generation, blocks, storing=False)))

    def _copy(self, kind: int, entry: int, generation: int, blocks: Any, *, storing: bool) -> bool:
        wanted = FILLING if storing else READY
        if not self._cache.pin(entry, generation):
            return False
        try:
            if self._cache.state(entry, generation) != wanted:
                return False
            if self._verify and not storing and not self._cache.checksum_ok(entry, generation):
                return False
            return self._copy_rows(kind, self._cache.spans(entry, generation), blocks, storing)
        finally:
            self._cache.unpin(entry, generation)

    def _copy_rows(
        self, kind: int, spans: list[tuple[int, int]], blocks: Any, storing: bool
    ) -> bool:
        import torch

        shape = self._shapes[kind]
        begin = self._rank * shape.part_bytes
        bounce = torch.empty(int(shape.sizes.max()), dtype=torch.uint8)
        for row in range(len(shape.sizes)):
            block, size = int(blocks[shape.slots[row]]), int(shape.sizes[row])
            if block == 0:
                continue
            address = int(shape.bases[row]) + block * int(shape.strides[row])
            at = address - self._memory.data_ptr()
            page, stored = self._memory[at : at + size], bounce[:size]
            if storing:
                stored.copy_(page)
            part = slice_spans(spans, begin + int(shape.offsets[row]), size)
            if not part:
                return False
            staged = stored.data_ptr()
            for place, length in part:
                if storing:
                    ctypes.memmove(place, staged, length)
                else:
                    ctypes.memmove(staged, place, length)
                staged += length
            if not storing:
                page.copy_(stored)
                if self._verify and not torch.equal(page.cpu(), stored):
                    return False
        return True

    def follow_loads(self) -> None:
        """Nothing is ever under way."""

    def poll(self) -> list[tuple[int, bool]]:
        """See `Transfer.poll`."""
        over, self._over = self._over, []
        return over

    def close(self, timeout: float) -> bool:
        """Nothing is ever under way."""
        return True


def slice_spans(spans: Sequence[tuple[int, int]], offset: int, size: int) -> list[tuple[int, int]]:
    """Give where `size` bytes from `offset` on of an object lie, whose (address, bytes) these are;
    nothing if it ends before.
    """
    found = []
    for address, length in spans:
        taken = min(length - offset, size)
        if taken > 0:
            found.append((address + offset, taken))
            size -= taken
        offset = max(0, offset - length)
    return found if size == 0 else []
