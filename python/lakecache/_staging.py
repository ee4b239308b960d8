"""The GPU path's two lanes: batches of jobs through staging buffers, one lane per direction."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lakecache import _kernels
from lakecache._cuda import HostRegistration, copy_async
from lakecache._objects import FILLING, READY
from lakecache.transfer import ARRIVAL_SECONDS, slice_spans

if TYPE_CHECKING:
    from lakecache._pages import ObjectShape

__all__ = ["Lane", "LaneJob", "StagingBuffers"]

log = logging.getLogger("vllm.lakecache")

# A batch: several chunks of a large model, so that launches cost the engine's thread little, and
# short enough for its kernel not to matter (docs/decisions/0003).
BATCH_BYTES = 128 << 20
# Block ids of one batch; the driver embeds copies of up to 64 KiB in its command stream.
BATCH_IDS = 16384
# All four buffers, unless four of the largest objects need more.
STAGING_BYTES = 512 << 20
# Left alone when the buffers are sized: what the engine allocates after its KV cache.
KEPT_FREE_BYTES = 256 << 20


class StagingBuffers:
    """Two buffers for each direction, allocated before vLLM allocates its KV cache."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors

    @classmethod
    def allocate(
        cls, device: torch.device, *, largest: int, kv_bytes: int
    ) -> StagingBuffers | None:
        """Take what `kv_bytes` of KV cache will leave free; None if it is too little.

        Each buffer holds at least one part of `largest` bytes.
        """
        free, _ = torch.cuda.mem_get_info(device)
        room = free - kv_bytes - KEPT_FREE_BYTES
        size = max(largest, min(BATCH_BYTES, STAGING_BYTES // 4))
        if 4 * size > room:
            size = largest
        if 4 * size > room:
            return None
        size = -(-size // 4096) * 4096
        return cls([torch.empty(size, dtype=torch.uint8, device=device) for _ in range(4)])

    def pair(self, number: int) -> list[torch.Tensor]:
        """The buffers of one direction."""
        return self._tensors[2 * number : 2 * number + 2]


class Memory(Protocol):
    """What a lane needs of the cache."""

    def states(self, slots: list[tuple[int, int]]) -> bytes: ...
    def spans(self, entry: int, generation: int) -> list[tuple[int, int]]: ...
    def checksum_ok(self, entry: int, generation: int) -> bool: ...


class LaneJob:
    """One rank's part of one object, and where it lies in host memory."""

    __slots__ = ("after", "blocks", "deadline", "entry", "generation", "job", "kind", "spans")

    def __init__(self, job: int, kind: int, entry: int, generation: int, blocks: Any) -> None:
        self.job = job
        self.kind = kind
        self.entry = entry
        self.generation = generation
        self.blocks = blocks
        self.deadline = time.monotonic() + ARRIVAL_SECONDS
        self.spans: list[tuple[int, int]] = []
        self.after: torch.cuda.Event | None = None


class _Batch:
    __slots__ = ("done", "flag", "jobs")

    def __init__(self, jobs: list[LaneJob]) -> None:
        self.jobs = jobs
        self.done = torch.cuda.Event()
        self.flag: torch.Tensor | None = None


class _Buffer:
    """A staging buffer, the block ids of its batch, and when both are free again."""

    __slots__ = ("free", "ids", "memory")

    def __init__(self, memory: torch.Tensor, ids: int) -> None:
        self.memory = memory
        self.ids = torch.empty(ids, dtype=torch.int32, device=memory.device)
        self.free: torch.cuda.Event | None = None


class Lane:
    """Jobs of one direction. Everything is queued on two streams of its own; nothing waits.

    The kernel of a batch runs while another batch crosses the bus: buffers alternate, and events
    keep the order on the GPU.
    """

    def __init__(
        self,
        memory: Memory,
        registration: HostRegistration,
        shapes: Mapping[int, ObjectShape],
        tables: Mapping[int, _kernels.RowTable],
        buffers: list[torch.Tensor],
        *,
        rank: int,
        storing: bool,
        verify: bool,
    ) -> None:
        self.storing = storing
        self._memory = memory
        self._registration = registration
        self._shapes = shapes
        self._tables = tables
        self._rank = rank
        self._verify = verify and not storing
        self._device = buffers[0].device
        # One object fits in any case.
        ids = max(BATCH_IDS, *(shape.slot_count for shape in shapes.values()))
        self._buffers = [_Buffer(buffer, ids) for buffer in buffers]
        self._turn = 0
        self._copies = torch.cuda.Stream(self._device)
        self._kernels = torch.cuda.Stream(self._device)
        self._mark: torch.cuda.Event | None = None
        self._waiting: deque[LaneJob] = deque()
        self._batches: deque[_Batch] = deque()
        self._over: list[tuple[LaneJob, bool]] = []

    def busy(self) -> bool:
        """Whether a job is queued, under way or not taken."""
        return bool(self._waiting or self._batches or self._over)

    def mark(self) -> None:
        """Have the jobs that follow wait for what the engine's stream has been given so far."""
        # Should recording fail, the next job makes a mark of its own, later than it needs.
        self._mark = None
        mark = torch.cuda.Event()
        mark.record(torch.cuda.current_stream(self._device))
        self._mark = mark

    def add(self, job: LaneJob) -> None:
        """Queue a pinned job behind the last mark; a load always behind all that is queued."""
        if self._mark is None:
            self.mark()
        job.after = self._mark
        self._waiting.append(job)

    def advance(self, *, at_once: bool = False) -> None:
        """Start what can be started, and see what is over.

        With `at_once`, memory that is not registered yet is no reason to wait: the copy is then
        slow, and holds up the caller.
        """
        if not self.storing:
            # What the engine queues from here on may use the pages that later loads write to.
            self._mark = None
        if self._waiting:
            jobs, started = self._startable(at_once=at_once), 0
            try:
                for batch in self._batched(jobs):
                    started += len(batch)
                    self._start(batch)
            finally:
                # After an error: `drop_all` has to find those that were not started.
                self._waiting.extendleft(reversed(jobs[started:]))
        while self._batches and self._batches[0].done.query():
            self._finish(self._batches.popleft())

    def take_over(self) -> list[tuple[LaneJob, bool]]:
        """Give the jobs that ended since the last call, and whether they ended well."""
        over, self._over = self._over, []
        return over

    def follow(self) -> bool:
        """Have the engine's stream wait for the batches under way; False if some job has none."""
        if self._batches:
            torch.cuda.current_stream(self._device).wait_event(self._batches[-1].done)
        return not self._waiting and all(good for _, good in self._over)

    def drop_waiting(self) -> None:
        """End the jobs that were not started."""
        self._over += [(job, False) for job in self._waiting]
        self._waiting.clear()

    def drop_all(self) -> None:
        """End all jobs as failed, when nothing runs any more (the streams are waited for)."""
        try:
            self._copies.synchronize()
            self._kernels.synchronize()
        except RuntimeError:
            log.debug("LakeCache: the GPU's streams are broken", exc_info=True)
        self.drop_waiting()
        self._over += [(job, False) for batch in self._batches for job in batch.jobs]
        self._batches.clear()

    def _startable(self, *, at_once: bool) -> list[LaneJob]:
        """Take the jobs that can begin; jobs that never will are over."""
        states = (
            bytes(len(self._waiting))
            if self.storing
            else self._memory.states([(job.entry, job.generation) for job in self._waiting])
        )
        wanted = FILLING if self.storing else READY
        found, over = [], []
        later: deque[LaneJob] = deque()
        for job, state in zip(self._waiting, states, strict=True):
            if state == wanted and not job.spans:
                job.spans = self._part(job)
            lost = state not in (FILLING, READY) or (state == wanted and not job.spans)
            if lost or time.monotonic() > job.deadline:
                over.append((job, False))
            elif state == wanted and (at_once or self._registration.covers(job.spans)):
                if self._verify and not self._memory.checksum_ok(job.entry, job.generation):
                    over.append((job, False))
                else:
                    found.append(job)
            else:
                later.append(job)
        # An error until here leaves all of them waiting.
        self._waiting = later
        self._over += over
        return found

    def _part(self, job: LaneJob) -> list[tuple[int, int]]:
        """Where this rank's part lies: (address, bytes), in order; empty if it is gone."""
        size = self._shapes[job.kind].part_bytes
        spans = self._memory.spans(job.entry, job.generation)
        return self._registration.cut(slice_spans(spans, self._rank * size, size))

    def _batched(self, jobs: list[LaneJob]) -> Iterator[list[LaneJob]]:
        """Cut the jobs into runs of one kind that fit a buffer."""
        begin = 0
        for end in range(1, len(jobs) + 1):
            shape = self._shapes[jobs[begin].kind]
            most = min(self._buffers[0].memory.nbytes // shape.part_bytes,
                       BATCH_IDS // shape.slot_count)  # fmt: skip
            over = end == len(jobs) or jobs[end].kind != jobs[begin].kind
            if over or end - begin >= most:
                yield jobs[begin:end]
                begin = end

    def _start(self, jobs: list[LaneJob]) -> None:
        batch = _Batch(jobs)
        buffer = self._buffers[self._turn]
        self._turn ^= 1
        # From here on an error leaves copies of these jobs under way.
        self._batches.append(batch)
        if self.storing:
            self._launch(batch, buffer, first=buffer.free)
            ready = torch.cuda.Event()
            ready.record(self._kernels)
            self._copies.wait_event(ready)
            self._copy(batch, buffer)
            batch.done.record(self._copies)
        else:
            if buffer.free is not None:
                self._copies.wait_event(buffer.free)
            self._copy(batch, buffer)
            arrived = torch.cuda.Event()
            arrived.record(self._copies)
            self._launch(batch, buffer, first=arrived)
            batch.done.record(self._kernels)
        buffer.free = batch.done

    def _launch(self, batch: _Batch, buffer: _Buffer, *, first: torch.cuda.Event | None) -> None:
        """Gather or scatter on the kernels' stream, after the engine's work up to these jobs."""
        import numpy as np

        stream, jobs = self._kernels, batch.jobs
        if first is not None:
            stream.wait_event(first)
        # Marks are in the order of the engine's stream: the last one stands for all.
        if jobs[-1].after is not None:
            stream.wait_event(jobs[-1].after)
        ids = np.concatenate([job.blocks for job in jobs])
        handle = stream.cuda_stream
        copy_async(buffer.ids.data_ptr(), ids.ctypes.data, ids.nbytes, handle)
        table = self._tables[jobs[0].kind]
        move = _kernels.gather if self.storing else _kernels.scatter
        move(table, buffer.ids, buffer.memory, len(jobs), handle)
        if self._verify:
            with torch.cuda.stream(stream):
                batch.flag = torch.zeros(1, dtype=torch.int32, device=self._device)
            _kernels.compare(table, buffer.ids, buffer.memory, len(jobs), batch.flag, handle)

    def _copy(self, batch: _Batch, buffer: _Buffer) -> None:
        handle = self._copies.cuda_stream
        staged = buffer.memory.data_ptr()
        for job in batch.jobs:
            for address, size in job.spans:
                if self.storing:
                    copy_async(address, staged, size, handle)
                else:
                    copy_async(staged, address, size, handle)
                staged += size

    def _finish(self, batch: _Batch) -> None:
        good = batch.flag is None or not batch.flag.item()
        if not good:
            log.error("LakeCache: pages differ from what is stored; the requests are computed")
        self._over += [(job, good) for job in batch.jobs]
