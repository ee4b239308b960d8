"""The GPU's transfer on a GPU that does what it is told as late and as disorderly as it may.

The engine goes on meanwhile as vLLM does: it reads and writes its pages on its own stream, gives
blocks to others when a job was reported, and so does the cache with its memory.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import lakecache
from fakes.gpu import Event, Gpu, Mark, RowTable, Stream
from lakecache import _cuda, transfer
from lakecache._pages import ObjectShape, Row
from lakecache.transfer import PackedTransfer

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

FILLING, READY, GONE = range(3)
BLOCKS, PAGE, RANKS, SLOTS = 24, 16, 2, 10


class Slot:
    """An entry of the pool: extents in its memory, of which we are one of the members that pin."""

    def __init__(self, kind: int, spans: list[tuple[int, int]]) -> None:
        self.kind, self.spans = kind, spans
        self.state, self.pins, self.generation = FILLING, 0, 1


class World:
    """Pages, a pool, an engine and a transfer. A job is checked when it is reported."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.gpu = gpu = Gpu(seed)
        self.random = gpu.random
        self.pages = torch.zeros((BLOCKS, 3 * PAGE), dtype=torch.uint8)
        base = self.pages.data_ptr()
        # Two layers, with pages of one and of two units, as the two halves of a block's row.
        self.shapes = {
            kind: ObjectShape(
                [
                    Row(base + layer * PAGE, 3 * PAGE, (1 + layer) * PAGE,
                        (slot + layer * (slots + slot)) * PAGE, slot)
                    for layer in range(2) for slot in range(slots)
                ],
                slot_count=slots, num_blocks=BLOCKS,
            )
            for kind, slots in ((0, 1), (1, 3))
        }  # fmt: skip
        self.pool = torch.zeros(1 << 16, dtype=torch.uint8)
        self.slots = [self.make_slot(number) for number in range(SLOTS)]
        self.registered = 0
        # Whether the pool's own calls fail.
        self.broken: Callable[[], bool] = lambda: False
        gpu.watch = self.watch
        gpu.pinned = self.in_pool
        self.patch(monkeypatch)
        buffers = [torch.zeros(20 * PAGE, dtype=torch.uint8) for _ in range(4)]
        self.transfer = PackedTransfer(
            self, self.shapes, SimpleNamespace(pair=lambda n: buffers[2 * n : 2 * n + 2]),
            rank=1, device=torch.device("cpu"),
        )  # fmt: skip
        # What the engine's stream, run to its end, leaves in each block; None: anything.
        self.content: list[bytes | None] = [bytes(3 * PAGE)] * BLOCKS
        # Blocks written to since the transfer was last told how far the work is.
        self.written: set[int] = set()
        self.free_blocks = set(range(1, BLOCKS))
        self.free_slots = set(range(SLOTS))
        self.jobs: dict[int, SimpleNamespace] = {}
        self.reported = 0
        self.good = 0
        self.wrong: list[str] = []

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = self.gpu
        kernels = ModuleType("lakecache._kernels")
        kernels.__dict__.update(gather=gpu.gather, scatter=gpu.scatter, RowTable=RowTable)
        monkeypatch.setitem(sys.modules, "lakecache._kernels", kernels)
        monkeypatch.setattr(lakecache, "_kernels", kernels, raising=False)
        monkeypatch.setattr(_cuda, "copy_async", gpu.copy_async)
        monkeypatch.setattr(_cuda, "HostRegistration", lambda _: self)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream(gpu))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: gpu.engine)
        monkeypatch.setattr(torch.cuda, "stream", gpu.stream)
        # Its own copy of the module, which knows only this world.
        spec = importlib.util.spec_from_file_location(
            "lakecache._staging", Path(transfer.__file__).with_name("_staging.py")
        )
        assert spec is not None
        assert spec.loader is not None
        staging = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(staging)
        # Several objects of one kind, and less than one of the other.
        monkeypatch.setattr(staging, "BATCH_IDS", 2)
        monkeypatch.setitem(sys.modules, "lakecache._staging", staging)

    # The pool

    def make_slot(self, number: int) -> Slot:
        kind = number % 2
        left, at, spans = RANKS * self.shapes[kind].part_bytes, number * 4096, []
        while left:
            size = min(left, self.random.choice([PAGE, 5 * PAGE, left]))
            spans.append((self.pool.data_ptr() + at, size))
            at, left = at + size + PAGE, left - size
        return Slot(kind, spans)

    def in_pool(self, address: int) -> bool:
        return 0 <= address - self.pool.data_ptr() < self.pool.nbytes

    def read(self, slot: Slot) -> bytes:
        at = self.pool.data_ptr()
        return b"".join(
            bytes(self.pool[start - at : start - at + size].tolist()) for start, size in slot.spans
        )

    def write(self, slot: Slot, data: bytes) -> None:
        at = self.pool.data_ptr()
        for start, size in slot.spans:
            piece = np.frombuffer(data[:size], dtype=np.uint8).copy()
            self.pool[start - at : start - at + size] = torch.from_numpy(piece)
            data = data[size:]

    def states(self, slots: list[tuple[int, int]]) -> bytes:
        return bytes(
            self.slots[entry].state if self.slots[entry].generation == generation else GONE
            for entry, generation in slots
        )

    def entry(self, entry: int, generation: int) -> Slot | None:
        slot = self.slots[entry]
        return slot if slot.generation == generation and slot.state != GONE else None

    def pin(self, entry: int, generation: int) -> bool:
        slot = self.entry(entry, generation)
        if slot is not None:
            slot.pins += 1
        return slot is not None

    def unpin(self, entry: int, generation: int) -> None:
        slot = self.slots[entry]
        assert slot.generation == generation
        assert slot.pins > 0
        slot.pins -= 1

    def spans(self, entry: int, generation: int) -> list[tuple[int, int]]:
        if self.broken():
            raise RuntimeError("the pool says nothing")
        slot = self.slots[entry]
        return slot.spans if slot.generation == generation else []

    def watch(self, target: int, source: int, size: int) -> None:
        """Memory of the pool is touched only while it is pinned."""
        for address in (target, source):
            if self.in_pool(address):
                inside = [
                    slot
                    for slot in self.slots
                    for start, length in slot.spans
                    if start <= address and address + size <= start + length
                ]
                if len(inside) != 1 or not inside[0].pins:
                    self.wrong.append("a copy touches memory that is not pinned")

    # Registration with CUDA, which comes slowly

    def covers(self, spans: list[tuple[int, int]]) -> bool:
        return all(start - self.pool.data_ptr() < self.registered for start, _ in spans)

    def cut(self, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
        found = []
        for start, size in spans:
            half = size // 2 // PAGE * PAGE
            found += [(start, half), (start + half, size - half)] if half else [(start, size)]
        return found

    def close(self) -> None:
        pass

    # The engine

    def engine_reads(self, block: int) -> None:
        want = self.content[block]

        def piece() -> None:
            if want is not None and bytes(self.pages[block].tolist()) != want:
                self.wrong.append("the engine read another content than it was given")

        self.gpu.engine.queue.append(piece)

    def engine_writes(self, block: int) -> None:
        data = bytes(self.random.randrange(256) for _ in range(3 * PAGE))
        self.content[block] = data
        self.written.add(block)
        new = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
        self.gpu.engine.queue.append(lambda: self.pages[block].copy_(new))

    def computed(self) -> None:
        """What is stored from here on waits for what the engine has queued so far."""
        self.written.clear()
        self.transfer.mark_computed()

    def part(self, kind: int, blocks: list[int]) -> bytes | None:
        """Give what these blocks make, in the order of the part."""
        rows = [self.content[block] for block in blocks]
        if None in rows:
            return None
        return b"".join(row[:PAGE] for row in rows) + b"".join(row[PAGE:] for row in rows)  # type: ignore[index]

    def begin(self, *, storing: bool, state: int) -> SimpleNamespace | None:
        if not self.free_slots:
            return None
        number = self.random.choice(sorted(self.free_slots))
        slot = self.slots[number]
        count = self.shapes[slot.kind].slot_count
        able = self.free_blocks - self.written if storing else self.free_blocks
        if len(able) < count:
            return None
        blocks = self.random.sample(sorted(able), count)
        slot.generation, slot.state = slot.generation + 1, state
        data = bytes(self.random.randrange(256) for _ in range(sum(s for _, s in slot.spans)))
        if state != FILLING or storing:
            self.write(slot, data)
        job = SimpleNamespace(
            number=len(self.jobs) + self.reported, slot=slot, storing=storing, data=data,
            blocks=blocks, ids=list(blocks), want=self.part(slot.kind, blocks), used=False,
            entry=number,
        )  # fmt: skip
        if not storing and count > 1 and self.random.random() < 0.3:
            job.ids[0] = 0
        self.free_slots.remove(number)
        self.free_blocks -= set(blocks)
        self.jobs[job.number] = job
        begin = self.transfer.store if storing else self.transfer.load
        begin(job.number, slot.kind, number, slot.generation, array("i", job.ids).tobytes())
        return job

    def loaded(self, job: SimpleNamespace) -> None:
        """From here on the engine counts on what was loaded."""
        job.used = True
        size = self.shapes[job.slot.kind].part_bytes
        mine, count = job.data[size : 2 * size], len(job.blocks)
        first, second = mine[: count * PAGE], mine[count * PAGE :]
        for index, (block, ident) in enumerate(zip(job.blocks, job.ids, strict=True)):
            if ident:
                one, two = index * PAGE, 2 * index * PAGE
                self.content[block] = first[one : one + PAGE] + second[two : two + 2 * PAGE]
            self.engine_reads(block)
            if self.random.random() < 0.3:
                self.engine_writes(block)

    def poll(self) -> None:
        for number, good in self.transfer.poll():
            self.end(self.jobs.pop(number), good)

    def end(self, job: SimpleNamespace, good: bool) -> None:
        self.reported += 1
        self.good += good
        if job.storing and good:
            size = self.shapes[job.slot.kind].part_bytes
            want = job.data[:size] + job.want + job.data[2 * size :]
            if self.read(job.slot) != want:
                self.wrong.append("what was stored differs from the pages")
        elif not job.storing and not job.used:
            if good:
                self.loaded(job)
            else:
                for block in job.blocks:
                    self.content[block] = None
        # Both go to others at once.
        self.write(job.slot, bytes(self.random.randrange(256) for _ in job.data))
        for block in job.blocks:
            if not good or self.random.random() < 0.5:
                self.engine_writes(block)
        self.free_blocks |= set(job.blocks)
        self.free_slots.add(job.entry)

    def arrive(self) -> None:
        """An object that is being read has come, or will not."""
        waiting = [j for j in self.jobs.values() if not j.storing and j.slot.state == FILLING]
        if waiting:
            job = self.random.choice(waiting)
            if self.random.random() < 0.2:
                job.slot.state = GONE
            else:
                self.write(job.slot, job.data)
                job.slot.state = READY

    def works(self) -> None:
        """The engine uses blocks that no job has."""
        for block in sorted(self.free_blocks):
            self.engine_reads(block)
            if self.random.random() < 0.2:
                self.engine_writes(block)

    def several(self, *, storing: bool, states: list[int]) -> list[SimpleNamespace]:
        begun = [
            self.begin(storing=storing, state=self.random.choice(states))
            for _ in range(self.random.randrange(4))
        ]
        return [job for job in begun if job is not None]

    def step(self) -> None:
        """What a worker does in a step of the engine, in vLLM's order."""
        if self.random.random() < 0.3 and all(job.storing for job in self.jobs.values()):
            jobs = self.several(storing=False, states=[READY])
            self.transfer.follow_loads()
            for job in jobs:
                self.loaded(job)
        else:
            self.several(storing=False, states=[FILLING, READY])
        self.works()
        self.several(storing=True, states=[FILLING])
        if self.random.random() < 0.5:
            self.computed()
        self.poll()
        self.registered += 1000
        for _ in range(self.random.randrange(2)):
            self.arrive()
        for _ in range(self.random.choice([0, 20, 200])):
            self.gpu.run()

    def drain(self) -> None:
        self.registered = self.pool.nbytes
        for _ in range(10_000):
            if not self.jobs:
                break
            self.arrive()
            self.poll()
            self.gpu.run()
        while self.gpu.run():
            pass
        for block in range(1, BLOCKS):
            self.engine_reads(block)
        while self.gpu.run():
            pass


@pytest.mark.parametrize("seed", range(25))
def test_whatever_the_order_nothing_wrong_is_read(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    world = World(monkeypatch, seed)
    for _ in range(60):
        world.step()
    world.drain()
    assert world.wrong == []
    assert world.jobs == {}
    assert world.good > 20
    assert all(slot.pins == 0 for slot in world.slots)
    assert world.transfer.close(5)


@pytest.mark.parametrize("where", ["gpu", "pool"])
@pytest.mark.parametrize("seed", range(40))
def test_an_error_ends_all_jobs_and_touches_nothing_later(
    monkeypatch: pytest.MonkeyPatch, seed: int, where: str
) -> None:
    world = World(monkeypatch, seed)
    for _ in range(10):
        world.step()
    left = world.random.randrange(4)

    def fails() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    if where == "gpu":
        world.gpu.fails = fails
    else:
        world.broken = fails
    while world.transfer.same_step:
        if not world.jobs:
            world.computed()
            world.begin(storing=True, state=FILLING)
        world.registered += 1000
        world.arrive()
        world.poll()
        world.gpu.run()
    assert world.jobs == {}
    assert all(slot.pins == 0 for slot in world.slots)
    world.drain()
    assert world.wrong == []
    world.computed()
    with pytest.raises(RuntimeError, match="have ended"):
        world.begin(storing=True, state=FILLING)


@pytest.mark.parametrize("seed", range(5))
def test_stores_wait_for_what_computed_them_and_not_for_later_work(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    world = World(monkeypatch, seed)
    world.registered = world.pool.nbytes
    for number in range(3):
        for block in world.free_blocks:
            world.engine_writes(block)
        world.computed()
        # The engine's next step runs for as long as it likes.
        step = Mark()
        world.gpu.engine.queue.append(step)
        world.engine_writes(0)
        jobs = [world.begin(storing=True, state=FILLING) for _ in range(3)]
        while world.jobs:
            world.poll()
            assert world.gpu.run() or not world.jobs, "they wait for the next step"
        assert not step.passed
        assert world.good == sum(job is not None for job in jobs) + 3 * number
        step.passed = True
    assert world.wrong == []


def test_a_load_within_the_step_that_cannot_begin_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, 1)
    world.begin(storing=False, state=GONE)
    with pytest.raises(RuntimeError, match="held in memory"):
        world.transfer.follow_loads()


@pytest.mark.parametrize("seed", range(5))
def test_a_load_that_cannot_be_launched_is_not_followed_and_fails(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    world = World(monkeypatch, seed)
    jobs = [world.begin(storing=False, state=READY) for _ in range(3)]
    copies = itertools.count()
    world.gpu.fails = lambda: next(copies) == seed
    with pytest.raises(RuntimeError, match="a copy failed"):
        world.transfer.follow_loads()
    world.poll()
    assert world.jobs == {}
    assert world.good == 0
    assert world.reported == sum(job is not None for job in jobs)
    assert not world.transfer.same_step
    world.drain()
    assert world.wrong == []


def test_a_job_that_cannot_be_queued_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1)

    def broken(event: Event, stream: Stream) -> None:
        raise RuntimeError("no event")

    monkeypatch.setattr(Event, "record", broken)
    for storing in (True, False):
        with pytest.raises(RuntimeError, match="no event"):
            world.begin(storing=storing, state=FILLING if storing else READY)
    assert all(slot.pins == 0 for slot in world.slots)
