"""Random work for the scheduler half: contents, faults and resets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fakes import core as fake

pytest.importorskip("vllm")

from fakes.faulty import Block, FaultyCache
from fakes.random_engine import BLOCK, UNIT, Engine, Request
from lakecache._hybrid import HybridSchedulerHalf
from lakecache._objects import KIND_CHUNK, KIND_STATE, KIND_TAIL, Geometry
from lakecache._pages import Groups


class HybridEngine(Engine):
    """With two groups of states, each a block per request and one for each state handed over."""

    half_type = HybridSchedulerHalf
    groups = Groups((1,), (0, 2))
    geometry = Geometry(BLOCK, BLOCK, UNIT)
    part_bytes: ClassVar[dict[int, int]] = {KIND_CHUNK: 64, KIND_STATE: 128, KIND_TAIL: 192}
    state_groups, attention = 2, 1
    whole_pages: ClassVar[set[int]] = {KIND_CHUNK, KIND_TAIL}
    half: HybridSchedulerHalf

    def tables(self, request: Request) -> tuple[list[int], ...]:
        columns = [[b.block_id for b in request.states[group]] for group in range(2)]
        return columns[0], [block.block_id for block in request.blocks], columns[1]

    def local_hit(self, request: Request) -> int:
        return 0

    def admit_states(self, request: Request, done: int) -> bool:
        if request.states:
            return True
        columns = max(-(-done // BLOCK), 1)
        blocks = self.pool.take(2)
        if blocks is None:
            return False
        nothing = [self.pool.blocks[0]] * (columns - 1)
        request.states = {group: [*nothing, blocks[group]] for group in range(2)}
        return True

    def cut(self, request: Request, count: int) -> int:
        return self.cut_from(request, request.num_computed_tokens, count)

    def cut_from(self, request: Request, done: int, budget: int) -> int:
        """A step ends where a state is kept: at the last unit of the prompt, or at a junction."""
        last = (request.num_prompt_tokens - 1) // UNIT * UNIT
        stops = [
            last,
            last // BLOCK * BLOCK,
            request.shared_prefix_boundary,
            done // 128 * 128 + 128,
        ]
        known = request.num_tokens + request.num_output_placeholders
        count = min(known - done, budget)
        return min([count, *(stop - done for stop in stops if stop > done)])

    def offers(self, scheduled: dict[str, Any]) -> dict[str, Any]:
        """The state at the end of a step goes over; the request goes on in blocks of its own."""
        found: dict[str, Any] = {}
        for name, (request, count) in scheduled.items():
            end = request.num_computed_tokens + count
            request.kept = None
            columns = -(-end // BLOCK)
            for group in request.states:
                table = request.states[group]
                # The running state moves to the column of the last token.
                while len(table) < columns:
                    table.append(table[-1])
                    table[-2] = self.pool.blocks[0]
            last = (request.num_prompt_tokens - 1) // UNIT * UNIT
            if end % UNIT or not (end <= last and (end == last or end % BLOCK == 0)):
                continue
            blocks = self.pool.take(2)
            if blocks is None:
                continue
            request.kept = end, blocks
            found[name] = [(2 * group, block.block_id, end) for group, block in enumerate(blocks)]
        return found

    def writes(self, request: Request) -> Any:
        kept, request.kept = request.kept, None
        if kept is not None:
            # Nobody's any more but the connector's, if it has pinned them.
            self.pool.free_blocks(kept[1])
        return {group: table[-1] for group, table in request.states.items()}, kept

    def forward(
        self, request: Request, begin: int, end: int, blocks: list[Block], writes: Any, *,
        current: bool,
    ) -> None:  # fmt: skip
        running, kept = writes
        super().forward(request, begin, end, blocks, None, current=current)
        for group, block in running.items():
            if current and begin and begin % UNIT == 0:
                want = self.state_piece(request, begin, group)
                assert block.content.get(-1) == want, f"{request.request_id} reads a wrong state"
            block.content.pop(-1, None)
            if end % UNIT == 0:
                block.content[-1] = self.state_piece(request, end, group)
        if kept is not None:
            for group, block in enumerate(kept[1]):
                block.content[-1] = self.state_piece(request, kept[0], group)

    def leaks(self) -> list[str]:
        return super().leaks() + (["offers"] if self.half.state_saver else [])


class CutEngine(HybridEngine):
    """Stores of the pages of a tail what it holds."""

    part_bytes: ClassVar[dict[int, int]] = {KIND_CHUNK: 64, KIND_STATE: 128, KIND_TAIL: 160}
    whole_pages: ClassVar[set[int]] = {KIND_CHUNK}


Make = Callable[..., Engine]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    def build(kind: type[Engine], seed: int, **extra: Any) -> Engine:
        fake.pools.clear()
        return kind(monkeypatch, tmp_path, seed, **extra)

    return build


@pytest.mark.parametrize("kind", [Engine, HybridEngine, CutEngine])
@pytest.mark.parametrize("seed", range(18))
def test_nothing_is_mixed_up_or_left_behind(make: Make, kind: type[Engine], seed: int) -> None:
    engine = make(kind, seed, ranks=1 + seed % 2, save_decode=seed % 3 == 0)
    engine.pool.faults = FaultyCache.faults = (0.0, 0.01, 0.1)[seed // 2 % 3]
    for _ in range(400):
        engine.act()
    engine.wind_down(step_seconds=0.01)
    assert engine.leaks() == []
    if not FaultyCache.faults:
        assert engine.half.total("errors") == 0
        assert engine.half.total("stores") > 10


def load_much(engine: Engine, most: int) -> None:
    """Have so many requests at most, on a GPU that forgets; nothing may be left in the end."""
    engine.half._same_step, engine.most = True, most
    for number in range(1500):
        if number % 20 == 0:
            # What the GPU holds is not loaded.
            engine.pool.by_hash.clear()
        engine.act()
    engine.wind_down(step_seconds=0.01)
    assert engine.leaks() == []
    assert engine.half.total("errors") == 0


@pytest.mark.parametrize("seed", range(6))
def test_loads_within_the_step_are_whole_and_end(make: Make, seed: int) -> None:
    engine = make(Engine, seed, ranks=1 + seed % 2)
    load_much(engine, 1 + seed // 3)
    assert engine.same_step > 3
    assert engine.same_step == engine.half.total("loads_same_step")


@pytest.mark.parametrize("kind", [HybridEngine, CutEngine])
@pytest.mark.parametrize("seed", range(4))
def test_checkpoints_reported_early_are_whole_and_end(
    make: Make, kind: type[Engine], seed: int
) -> None:
    engine = make(kind, seed, ranks=1 + seed % 2)
    load_much(engine, 1 + seed // 2)
    assert engine.early > 3
    assert engine.early == engine.half.total("loads_early")
