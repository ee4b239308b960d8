"""A GPU that runs what was queued on it as late, and in as strange an order, as events allow.

Device memory is host memory. Every stream is a queue of small pieces of work; `Gpu.run` takes the
next piece of any stream that need not wait. Kernels and copies are cut into pieces, so that those
of several streams run at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any


class Mark:
    """A place in a stream."""

    def __init__(self) -> None:
        self.passed = False


class Stream:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.queue: deque[Mark | Callable[[], None]] = deque()
        self.cuda_stream = len(gpu.streams)
        gpu.streams.append(self)

    def wait_event(self, event: Event) -> None:
        if event.mark is not None:
            self.queue.append(event.mark)

    def synchronize(self) -> None:
        while self.queue:
            assert self.gpu.run() or not self.queue, "the streams wait for each other"


class Event:
    def __init__(self) -> None:
        self.mark: Mark | None = None

    def record(self, stream: Stream) -> None:
        mark = self.mark = Mark()
        stream.queue.append(lambda: setattr(mark, "passed", True))

    def query(self) -> bool:
        return self.mark is None or self.mark.passed


class Gpu:
    """Streams, the driver's copies, and kernels with the names of `lakecache._kernels`."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.streams: list[Stream] = []
        self.engine = Stream(self)
        # Told of a copy when it runs: (target, source, bytes).
        self.watch: Callable[[int, int, int], None] = lambda *_: None
        # Host memory that may be accessed later; from elsewhere the driver copies at once.
        self.pinned: Callable[[int], bool] = lambda _: False
        self.fails: Callable[[], bool] = lambda: False

    def run(self) -> bool:
        """Do the next piece of some stream; False where there is none."""
        able = []
        for stream in self.streams:
            while stream.queue and isinstance(stream.queue[0], Mark) and stream.queue[0].passed:
                stream.queue.popleft()
            if stream.queue and not isinstance(stream.queue[0], Mark):
                able.append(stream)
        if able:
            piece = self.random.choice(able).queue.popleft()
            assert not isinstance(piece, Mark)
            piece()
        return bool(able)

    # torch.cuda

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        yield

    # The driver

    def copy_async(self, target: int, source: int, size: int, handle: int) -> None:
        if self.fails():
            raise RuntimeError("a copy failed")
        data = (
            None if self.pinned(source) or self.pinned(target) else ctypes.string_at(source, size)
        )

        def piece() -> None:
            self.watch(target, source, size)
            ctypes.memmove(target, source if data is None else data, size)

        self.streams[handle].queue.append(piece)

    # Kernels

    def gather(self, table: RowTable, ids: Any, memory: Any, count: int, handle: int) -> None:
        self._rows(table, ids, memory, count, handle, lambda page, staged: (staged, page))

    def scatter(self, table: RowTable, ids: Any, memory: Any, count: int, handle: int) -> None:
        self._rows(table, ids, memory, count, handle, lambda page, staged: (page, staged))

    def _rows(
        self, table: RowTable, ids: Any, memory: Any, count: int, handle: int,
        ends: Callable[[int, int], tuple[int, int]],
    ) -> None:  # fmt: skip
        pieces = []
        for item, row in itertools.product(range(count), range(len(table.sizes))):

            def piece(item: int = item, row: int = row) -> None:
                block = int(ids[item * table.slot_count + table.slots[row]])
                page = table.bases[row] + block * table.strides[row]
                staged = memory.data_ptr() + item * table.part_bytes + table.offsets[row]
                if block:
                    ctypes.memmove(*ends(page, staged), table.sizes[row])

            pieces.append(piece)
        self.random.shuffle(pieces)
        self.streams[handle].queue += pieces


class RowTable:
    def __init__(
        self, bases: Sequence[int], strides: Sequence[int], sizes: Sequence[int],
        offsets: Sequence[int], slots: Sequence[int], *, part_bytes: int, slot_count: int,
        device: Any,
    ) -> None:  # fmt: skip
        self.bases, self.strides, self.sizes = bases, strides, sizes
        self.offsets, self.slots = offsets, slots
        self.part_bytes, self.slot_count = part_bytes, slot_count

    def warm_up(self) -> None:
        pass
