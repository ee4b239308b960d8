"""An engine around the scheduler half that behaves as vLLM's does, with random work for it.

Blocks hold what was computed into them, and lose it when they are given to others. A copy reads its
blocks as late as it may. What is stored, and what a request computes upon, must be of its prompt.
"""

from __future__ import annotations

import itertools
import random
from array import array
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from fakes import core as fake
from fakes import scheduler
from fakes.faulty import BLOCKS, Block, BlockPool, FaultyCache
from lakecache import _backlog, _loads, _records, _scheduler, _state_saver
from lakecache._metadata import WorkerReport
from lakecache._objects import KIND_CHUNK, KIND_STATE, KIND_TAIL, Geometry
from lakecache.connector import LakeCacheConnector

BLOCK, UNIT = 32, 16
STEP_TOKENS = 192
# An engine that has nothing to do any more may go on stepping for this long.
IDLE_STEPS = 4000


class Request(scheduler.Request):
    """`parts` says of each unit of its tokens which they are."""

    def __init__(self, name: str, parts: list[int], tokens: int, outputs: int) -> None:
        super().__init__(
            tokens, request_id=name, block_hashes=[], shared_prefix_boundary=0, parts=parts,
            outputs=outputs, blocks=[], states={}, state="new", received=None, kept=None, life=0,
        )  # fmt: skip
        self.extend()

    def extend(self) -> None:
        while (len(self.block_hashes) + 1) * UNIT <= self.num_tokens:
            at = len(self.block_hashes)
            before = self.block_hashes[-1] if at else b""
            self.block_hashes.append(fake.blake3(before + bytes([self.parts[at]])))


class Engine(scheduler.Bench):
    """vLLM's scheduler, workers that take their time, and a connector with a real half."""

    geometry = Geometry(2 * BLOCK, BLOCK, UNIT)
    part_bytes: ClassVar[dict[int, int]] = {KIND_CHUNK: 32 * 4}
    state_groups = 0
    attention = 0
    # The shapes whose copies fill blocks to their end.
    whole_pages: ClassVar[set[int]] = {KIND_CHUNK}
    num_blocks = BLOCKS

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int, **extra: Any
    ) -> None:
        self.random = random.Random(seed)
        self.now = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        for module in (_backlog, _loads, _records, _scheduler, _state_saver):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(fake, "Cache", FaultyCache)
        FaultyCache.random = self.random
        FaultyCache.faults, FaultyCache.room = 0.0, 10**9
        super().__init__(monkeypatch, tmp_path, load_policy="always", **extra)
        self.half.saves.num_blocks = BLOCKS
        self.pool = BlockPool(self.random)
        self.half.saves.bind(self.pool)  # type: ignore[arg-type]
        self.connector: Any = object.__new__(LakeCacheConnector)
        self.connector.scheduler, self.connector.worker = self.half, None
        self.connector.errors = 0
        self.connector._loaded_groups = (*self.groups.attention, *self.groups.states)
        self.connector._state_groups = self.groups.states
        self.names = itertools.count()
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        # Aborted during a load: their blocks are theirs until it is over.
        self.leaving: dict[str, Request] = {}
        self.steps: deque[Any] = deque()
        self.copies_under_way: list[Any] = []
        # What a copy to the store finds for sure: the blocks where the last plan said that later
        # ones copy what it computes.
        self.computed: list[dict[int, bytes]] = [{} for _ in self.pool.blocks]
        self.loads: dict[int, Any] = {}
        self.epoch = 0
        # What has to be stored under a key: a list of pieces.
        self.expected: dict[bytes, list[bytes]] = {}
        self.restored = self.same_step = self.early = 0
        # Requests at a time.
        self.most = 12

    # Content

    def piece(self, request: Request, unit: int) -> bytes:
        if unit >= len(request.block_hashes):
            return b"of a request that is over"
        return fake.blake3(bytes([self.epoch]) + request.block_hashes[unit])[:16]

    def state_piece(self, request: Request, boundary: int, group: int) -> bytes:
        if boundary > len(request.block_hashes) * UNIT:
            return b"of a request that is over"
        text = bytes([self.epoch, group]) + b"state" + request.block_hashes[boundary // UNIT - 1]
        return fake.blake3(text)[:16]

    def read(self, kind: int, ids: bytes, contents: list[dict[int, bytes]]) -> list[bytes]:
        """What a copy finds."""
        pieces = []
        for number, content in enumerate(contents[i] for i in array("i", ids)):
            if kind != KIND_CHUNK and number < self.state_groups:
                pieces.append(content.get(-1, b"?"))
            else:
                pieces += [content.get(unit, b"?") for unit in range(BLOCK // UNIT)]
        return pieces

    def learn(self, request: Request) -> None:
        """Note what may be stored under the keys of this request."""
        space = self.half.spaces.of(None)
        assert space is not None
        chunk = self.geometry.chunk
        units = len(request.block_hashes)
        for end in range(chunk // UNIT, units + 1, chunk // UNIT):
            key = fake.derive_keys(space.digest, KIND_CHUNK, [request.block_hashes[end - 1]])
            first = end - chunk // UNIT
            self.expected[key] = [self.piece(request, unit) for unit in range(first, end)]
        for unit in range(units if self.state_groups else 0):
            boundary = (unit + 1) * UNIT
            kind = KIND_TAIL if boundary % BLOCK else KIND_STATE
            key = fake.derive_keys(space.digest, kind, [request.block_hashes[unit]])
            pieces = [self.state_piece(request, boundary, g) for g in range(self.state_groups)]
            full = boundary // BLOCK * BLOCK // UNIT
            self.expected[key] = pieces + [self.piece(request, u) for u in range(full, unit + 1)]

    # Requests

    def add(self) -> None:
        family = self.random.randrange(3)
        parts = [family] * 64
        for at in range(self.random.choice([2, 5, 9, 13, 64]), 64):
            parts[at] = self.random.choice([10 + family, 20, 21])
        tokens = self.random.choice([*range(20, 700), 64, 65, 128, 256, 640])
        request = Request(f"r{next(self.names)}", parts, tokens, self.random.choice([1, 3, 60]))
        self.learn(request)
        self.waiting.append(request)

    def free(self, request: Request) -> None:
        blocks = [*request.blocks, *(b for group in request.states.values() for b in group)]
        self.pool.free_blocks(reversed([block for block in blocks if block.block_id]))
        request.blocks, request.states = [], {}

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.free(request)
        request.num_computed_tokens = request.num_output_placeholders = 0
        request.life += 1
        request.state = "new"
        self.waiting.insert(0, request)

    def end(self, request: Request) -> None:
        """It is done, or aborted."""
        self.finish_hook(request)
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self.connector.request_finished_all_groups(request, ([],))
        if request.state == "loading" and request.received is None:
            self.leaving[request.request_id] = request
        else:
            self.free(request)
        request.state = "over"

    def finish_hook(self, request: Request) -> None:
        pass

    # A step

    def grow(self, request: Request, tokens: int, *, cleared: bool = True) -> bool:
        """Allocate blocks up to so many tokens; what is not cleared has to be loaded whole."""
        blocks = self.pool.take(max(-(-tokens // BLOCK) - len(request.blocks), 0))
        for block in blocks or ():
            block.content[-2] = b"cleared" if cleared else b"anything"
        if blocks is not None:
            request.blocks += blocks
        return blocks is not None

    def tables(self, request: Request) -> tuple[list[int], ...]:
        return ([block.block_id for block in request.blocks],)

    def cut(self, request: Request, count: int) -> int:
        """How many of the tokens that there is room for to compute in this step."""
        return count

    def schedule(self) -> None:
        budget, scheduled = STEP_TOKENS, {}
        for request in list(self.running):
            if request not in self.running:
                continue
            known = request.num_tokens + request.num_output_placeholders
            left = known - request.num_computed_tokens
            count = self.cut(request, min(left, budget))
            if count <= 0:
                continue
            grown = False
            while not (grown := self.grow(request, request.num_computed_tokens + count)):
                if self.connector.has_pending_block_frees():
                    break
                victim = self.running[-1]
                budget += scheduled.pop(victim.request_id, (None, 0))[1]
                self.preempt(victim)
                if victim is request:
                    break
            if not grown:
                break
            scheduled[request.request_id] = request, count
            budget -= count
        for request in list(self.waiting):
            if budget <= 0 or not self.admit(request, budget, scheduled):
                break
            budget = STEP_TOKENS - sum(count for _, count in scheduled.values())
        offers = self.offers(scheduled)
        state = SimpleNamespace(
            get_block_ids=lambda name: self.tables(scheduled[name][0]) if name in scheduled
            else None,
            boundary_state_offloads=offers,
        )  # fmt: skip
        counts = {name: count for name, (_, count) in scheduled.items()}
        output = SimpleNamespace(
            num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()),
            kv_connector_block_state=state,
        )  # fmt: skip
        plan = self.connector.build_connector_meta(output)
        work = []
        for request, count in scheduled.values():
            begin, life = request.num_computed_tokens, request.life
            blocks = list(request.blocks)
            work.append((request, begin, begin + count, blocks, life, self.writes(request)))
            request.num_computed_tokens += count
            known = request.num_tokens + request.num_output_placeholders
            request.num_output_placeholders += request.num_computed_tokens == known
        self.steps.append((work, plan))

    def writes(self, request: Request) -> Any:
        return None

    def offers(self, scheduled: dict[str, Any]) -> dict[str, Any]:
        return {}

    def admit(self, request: Request, budget: int, scheduled: dict[str, Any]) -> bool:
        """Whether the next one may be looked at."""
        if request.state == "loading":
            if request.received is None:
                return True
            if not request.received:
                self.free(request)
                request.num_computed_tokens = 0
                request.state = "new"
            else:
                request.state = "loaded"
                self.restored += 1
        external, asynchronous = 0, False
        if request.state == "new":
            local = self.local_hit(request)
            answer, asynchronous = self.connector.get_num_new_matched_tokens(request, local)
            if answer is None:
                return True
            external = answer
            assert local + external < request.num_tokens
            request.num_computed_tokens = local
        done = request.num_computed_tokens + external
        count = 0 if asynchronous else self.cut_from(request, done, budget)
        if not asynchronous and count <= 0:
            return False
        before = len(request.blocks)
        held = request.blocks
        if request.state == "new":
            held = [self.pool.by_hash[request.block_hashes[(i + 1) * BLOCK // UNIT - 1]]
                    for i in range(request.num_computed_tokens // BLOCK)]  # fmt: skip
            self.vllm_touch(held)
            request.blocks = list(held)
        loaded = self.connector.get_loaded_kv_cache_group_ids(request) if asynchronous else ()
        if not self.grow(
            request, done + count, cleared=self.attention not in loaded
        ) or not self.admit_states(request, done):
            if request.state == "new":
                self.free(request)
            else:
                del request.blocks[before:]
            return False
        blocks = SimpleNamespace(get_block_ids=lambda: self.tables(request))
        self.connector.update_state_after_alloc(request, blocks, external)
        if asynchronous:
            request.state, request.received = "loading", None
            request.num_computed_tokens = done
            return True
        request.num_computed_tokens = done
        self.waiting.remove(request)
        self.running.append(request)
        request.state = "running"
        scheduled[request.request_id] = request, count
        return True

    def vllm_touch(self, blocks: list[Block]) -> None:
        faults, self.pool.faults = self.pool.faults, 0.0
        self.pool.touch(blocks)
        self.pool.faults = faults

    def cut_from(self, request: Request, done: int, budget: int) -> int:
        return self.cut(request, min(request.num_tokens - done, budget))

    def admit_states(self, request: Request, done: int) -> bool:
        return True

    def local_hit(self, request: Request) -> int:
        found = 0
        while (found + 1) * BLOCK < request.num_tokens:
            if request.block_hashes[(found + 1) * BLOCK // UNIT - 1] not in self.pool.by_hash:
                break
            found += 1
        return found * BLOCK

    def execute(self) -> None:
        """The oldest step in flight: its forward, then its copies begin, then it comes back."""
        work, plan = self.steps.popleft()
        for ident, name, count in plan.loads:
            if name is not None:
                self.loads[ident] = SimpleNamespace(
                    name=name, count=count, begun=0, done=0, failed=False
                )
        for ident, index, kind, entry, _, ids in plan.chunks:
            load = self.loads.get(ident)
            if load is None:
                # The forward waits for these, and nobody for their acknowledgement.
                self.place(kind, entry, ids)
                self.copies_under_way.append((self.acknowledge_copy, (ident, index)))
                self.same_step += index == 0
            elif not load.failed:
                load.begun += 1
                if ident in plan.early:
                    # The engine's next work waits for these copies, whenever they are noticed.
                    self.place(kind, entry, ids)
                    self.copies_under_way.append((self.acknowledge_copy, (ident, index)))
                    load.done += 1
                    self.early += index == 0
                else:
                    self.copies_under_way.append((self.load, (ident, index, kind, entry, ids)))
        for request, begin, end, blocks, life, writes in work:
            self.forward(
                request, begin, end, blocks, writes, current=self.is_current(request, life)
            )
        for ident in plan.failed:
            if ident in self.loads:
                self.loads[ident].failed = True
        for job, kind, entry, _, ids in plan.stores:
            self.check_copy(kind, entry, self.read(kind, ids, self.computed))
            for rank in range(self.ranks):
                self.copies_under_way.append((self.save, (job, kind, entry, ids, rank)))
        if plan.pinned:
            self.computed = [dict(block.content) for block in self.pool.blocks]
        self.finish_copies()
        self.half.stats()
        for request, _, end, _, life, _ in work:
            if self.is_current(request, life):
                if end == request.num_tokens:
                    request.num_tokens += 1
                    request.num_output_placeholders -= 1
                    request.outputs -= 1
                    request.extend()
                    self.learn(request)
                if request.outputs <= 0:
                    self.end(request)

    def forward(
        self, request: Request, begin: int, end: int, blocks: list[Block], writes: Any, *,
        current: bool,
    ) -> None:  # fmt: skip
        for unit in range(begin // UNIT if current else 0):
            found = blocks[unit * UNIT // BLOCK].content.get(unit % (BLOCK // UNIT))
            assert found == self.piece(request, unit), f"{request.request_id} reads wrong pages"
        # Kernels read whole blocks, and what lies behind the last token must not be a NaN.
        rests = {block.content.get(-2) for block in blocks if current}
        assert rests <= {b"cleared", b"loaded"}, f"{request.request_id} reads what nobody wrote"
        for unit in range(begin // UNIT, end // UNIT):
            block = blocks[unit * UNIT // BLOCK]
            block.content[unit % (BLOCK // UNIT)] = self.piece(request, unit)
        if current:
            self.cache_blocks(request, end, blocks)

    def is_current(self, request: Request, life: int) -> bool:
        """Whether the request was neither ended nor preempted since a step was planned."""
        return request.state == "running" and request.life == life

    def cache_blocks(self, request: Request, end: int, blocks: list[Block]) -> None:
        for number in range(min(end // BLOCK, len(request.blocks))):
            block, key = blocks[number], request.block_hashes[(number + 1) * BLOCK // UNIT - 1]
            if block is request.blocks[number] and block.hash is None:
                block.hash = key
                self.pool.by_hash.setdefault(key, block)

    def finish_copies(self) -> None:
        report, received, failed = WorkerReport(), [], []
        slow = self.random.random()
        later = []
        for copy, arguments in self.copies_under_way:
            if self.random.random() < slow:
                later.append((copy, arguments))
            else:
                copy(report, *arguments)
        self.copies_under_way = later
        for ident, load in list(self.loads.items()):
            if load.done == load.begun and (load.failed or load.done == load.count):
                del self.loads[ident]
                received.append(load.name)
                failed += [load.name] if load.failed else []
        some = report if report.stores or report.copied else None
        if some or received:
            self.tell(some, received, failed)
        for name in received:
            if name in self.leaving:
                self.free(self.leaving.pop(name))
            else:
                request = next(one for one in self.waiting if one.request_id == name)
                request.received = name not in failed

    def tell(
        self, report: WorkerReport | None = None, received: Any = (), failed: Any = (),
        invalid: Any = (),
    ) -> None:  # fmt: skip
        self.connector.update_connector_output(
            SimpleNamespace(
                kv_connector_worker_meta=report,
                finished_recving=set(received),
                failed_recving=set(failed),
                invalid_block_ids=set(invalid),
            )
        )

    def save(self, report: WorkerReport, job: int, kind: int, entry: int, ids: bytes,
             rank: int) -> None:  # fmt: skip
        good = self.random.random() >= FaultyCache.faults
        if good:
            assert self.cache.pool.slots[entry].state == 0
            found = self.read(kind, ids, [block.content for block in self.pool.blocks])
            self.check_copy(kind, entry, found)
        have = report.stores.get(job, (0, 0))
        report.stores[job] = (have[0] + good, have[1] + (not good))

    def check_copy(self, kind: int, entry: int, pieces: list[bytes]) -> None:
        """Have a copy find what its key stands for."""
        key = self.cache.pool.slots[entry].key
        want = self.expected[key]
        if kind == KIND_TAIL:
            del pieces[len(want) :]
        assert pieces == want, f"stores what is not kind {kind} of {key!r}"

    def load(self, report: WorkerReport, ident: int, index: int, kind: int, entry: int,
             ids: bytes) -> None:  # fmt: skip
        load = self.loads[ident]
        load.done += 1
        if self.random.random() < FaultyCache.faults / self.ranks:
            load.failed = True
        if load.failed:
            return
        self.place(kind, entry, ids)
        self.acknowledge_copy(report, ident, index)

    def place(self, kind: int, entry: int, ids: bytes) -> None:
        """Copy an object into blocks."""
        slot = self.cache.pool.slots[entry]
        assert slot.state == 1
        assert slot.pins > 0
        pieces = list(self.expected[slot.key])
        for number, block in enumerate(array("i", ids)):
            if kind != KIND_CHUNK and number < self.state_groups:
                self.pool.blocks[block].content[-1] = pieces.pop(0)
                continue
            if block and kind in self.whole_pages:
                self.pool.blocks[block].content[-2] = b"loaded"
            for unit in range(BLOCK // UNIT):
                piece = pieces.pop(0) if pieces else None
                if block and piece is not None:
                    self.pool.blocks[block].content[unit] = piece

    def acknowledge_copy(self, report: WorkerReport, ident: int, index: int) -> None:
        report.copied[ident, index] = self.ranks

    # Random work

    def reset(self) -> None:
        """As vLLM's `reset_prefix_cache`, also of the running requests, and of the connector."""
        while self.steps:
            self.execute()
        for request in list(reversed(self.running)):
            self.preempt(request)
        empty = self.pool.reset()
        assert self.connector.reset_cache() is True
        if empty:
            self.epoch += 1
        for request in (*self.waiting, *self.running):
            self.learn(request)

    def act(self) -> None:
        chance = self.random.random()
        self.now += self.random.choice([0.0, 0.001, 0.01, 0.3])
        if chance < 0.12 and len(self.waiting) + len(self.running) < self.most:
            self.add()
        elif chance < 0.16 and (living := [*self.running, *self.waiting]):
            self.end(self.random.choice(living))
        elif chance < 0.18 and self.running:
            while self.steps:
                self.execute()
            if self.running:
                self.preempt(self.running[-1])
        elif chance < 0.20:
            self.cache.lose()
        elif chance < 0.22:
            FaultyCache.room = self.random.choice([0, 10, 10**9, 10**9])
        elif chance < 0.23:
            self.now += 3.0
        elif chance < 0.235:
            self.reset()
        elif chance < 0.25:
            # Another connector's load failed: what is stored must be right as ever.
            self.tell(invalid={1})
        else:
            self.step_engine()
        self.check()

    def step_engine(self) -> None:
        self.schedule()
        while len(self.steps) > self.random.choice([0, 1]):
            self.execute()

    def check(self) -> None:
        pins = self.pinned()
        assert self.half.saves.pinned_blocks == pins
        assert pins <= BLOCKS
        living = {r.request_id for r in (*self.running, *self.waiting)}
        assert self.half._tracked.keys() <= living
        assert self.half.chunk_saver._requests.keys() <= living
        if not self.half.pending_stores():
            assert pins == 0
        for name, count in self.half.counts.items():
            assert count >= 0, name

    def pinned(self) -> int:
        mine = sum(block.ref_cnt for block in self.pool.blocks)
        holders = [*self.running, *self.waiting, *self.leaving.values()]
        theirs = sum(
            bool(block.block_id)
            for request in holders
            for block in (*request.blocks, *(b for g in request.states.values() for b in g))
        )
        return mine - theirs

    def has_requests(self) -> bool:
        return bool(
            self.running or self.waiting or self.leaving or self.steps
            or self.connector.has_pending_push_work()
        )  # fmt: skip

    def wind_down(self, *, step_seconds: float) -> None:
        for _ in range(IDLE_STEPS):
            if not self.has_requests():
                return
            self.now += step_seconds
            self.step_engine()
            self.check()
        raise AssertionError(f"the engine does not go idle: {self.leaks()}")

    def leaks(self) -> list[str]:
        used = BLOCKS - 1 - len(self.pool.free)
        slots = self.cache.pool.slots.values()
        return [
            *(["pinned slots"] if any(slot.pins for slot in slots) else []),
            *([f"{used} blocks in use"] if used else []),
            *(["tracked"] if self.half._tracked or self.half.chunk_saver._requests else []),
            *(["loads"] if self.half.loads._by_ident or self.half.loads._by_request else []),
            *(["stores"] if self.half.pending_stores() else []),
            *(["space for pins"] if self.half.saves.pinned_blocks else []),
        ]
