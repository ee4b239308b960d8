"""Loads that are reported when their copies are queued: which, and how they end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fakes import core as fake

pytest.importorskip("vllm")

from fakes.engines import Clock, Engine, fast_gpu, step
from fakes.hybrid_scheduler import BLOCK, Bench, Request
from lakecache._metadata import StepPlan, WorkerReport
from lakecache._objects import Geometry
from lakecache._pages import Groups
from lakecache._worker import WorkerHalf
from lakecache.config import CacheConfig


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    fake.pools.clear()
    bench = Bench(monkeypatch, tmp_path, load_policy="always")
    bench.half._same_step = True
    return bench


def plan_of(bench: Bench, request: Request) -> Any:
    external = bench.half.matched(request, 0)
    assert external == (80, True)
    bench.allocate(request, 80)
    return bench.step()


def test_the_only_request_hears_of_its_checkpoint_early(bench: Bench) -> None:
    bench.store(90, 80)
    request = Request(90)
    plan = plan_of(bench, request)
    assert plan.early == [ident for ident, *_ in plan.loads]
    assert len(plan.early) == 1
    assert len(plan.chunks) == 80 // BLOCK + 1
    bench.half.report(None, [request.request_id], ())
    # The acknowledgements come when the copies are over.
    copied = {(plan.early[0], index): 1 for index in range(len(plan.chunks))}
    bench.half.report(WorkerReport(copied=copied), (), ())
    bench.finish(request)
    assert bench.leaks() == []
    assert bench.half.total("loads_early") == 1


def test_others_are_not_held_up(bench: Bench) -> None:
    bench.store(90, 80)
    busy = Request(100, seed=1)
    bench.half.matched(busy, 0)
    assert plan_of(bench, Request(90)).early == []


def test_what_comes_from_disk_is_waited_for(bench: Bench) -> None:
    bench.store(90, 80)
    bench.cache.clear_memory()
    assert plan_of(bench, Request(90)).early == []


def test_so_is_what_the_workers_cannot_follow(bench: Bench) -> None:
    bench.store(90, 80)
    bench.half._same_step = False
    assert plan_of(bench, Request(90)).early == []


# The worker


class Transfer:
    """A GPU transfer of which a test says what happens."""

    same_step = True

    def __init__(self, *, follows: bool = True, starts: bool = True) -> None:
        self.follows, self.starts = follows, starts
        self.jobs: list[int] = []
        self.ended: list[tuple[int, bool]] = []

    def load(self, job: int, *_: object) -> None:
        if not self.starts:
            raise RuntimeError("no copy")
        self.jobs.append(job)

    def follow_loads(self) -> None:
        if not self.follows:
            raise RuntimeError("gone")

    def poll(self) -> list[tuple[int, bool]]:
        ended, self.ended = self.ended, []
        return ended


def worker(transfer: Transfer) -> WorkerHalf:
    nothing: Any = SimpleNamespace(prefix_cacheable_group_ids=())
    half = WorkerHalf(
        nothing, nothing, CacheConfig(transfer="sync"), nothing,
        groups=Groups((0,)), geometry=Geometry(64, 32, 32), rank=0,
    )  # fmt: skip
    half._transfer, half._same_step = transfer, True  # type: ignore[assignment]
    return half


def early(chunks: int = 2, *, given: int = 2) -> StepPlan:
    plan = StepPlan()
    plan.loads, plan.early = [(7, "r", chunks)], [7]
    plan.chunks = [(7, index, 0, index, 1, b"") for index in range(given)]
    return plan


def test_a_worker_reports_when_the_copies_are_queued() -> None:
    transfer = Transfer()
    half = worker(transfer)
    half.start_loads(early())
    half.poll()
    assert half.take_results() == ({"r"}, set())
    assert half.take_report() is None
    assert half.busy()
    # Should one of them fail, the request no longer hears of it.
    transfer.ended = [(transfer.jobs[0], True), (transfer.jobs[1], False)]
    half.poll()
    assert half.take_results() == (set(), set())
    assert not half.busy()


@pytest.mark.parametrize(
    ("transfer", "plan"),
    [(Transfer(follows=False), early()), (Transfer(), early(given=1))],
)
def test_a_load_that_cannot_be_followed_is_waited_for(transfer: Transfer, plan: StepPlan) -> None:
    half = worker(transfer)
    half.start_loads(plan)
    half.poll()
    assert half.take_results() == (set(), set())
    if len(plan.chunks) == 1:
        more = StepPlan()
        more.chunks = [(7, 1, 0, 1, 1, b"")]
        half.start_loads(more)
    transfer.ended = [(job, True) for job in transfer.jobs]
    half.poll()
    assert half.take_results() == ({"r"}, set())
    assert half.errors == 0


def test_a_load_that_does_not_start_fails() -> None:
    half = worker(Transfer(starts=False))
    half.start_loads(early())
    assert half.take_results() == ({"r"}, {"r"})


def test_a_load_given_up_before_it_began_fails() -> None:
    half, plan = worker(Transfer()), early(given=0)
    plan.failed = [7]
    half.start_loads(plan)
    assert half.take_results() == ({"r"}, {"r"})


# Measurements


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def load_early(engine: Engine, size: int, ident: int, *, later: float = 0.001) -> None:
    """Load so many bytes at 50 GB/s, behind which a step computes 32 tokens."""
    policy, clock = engine.policy, engine.clock
    policy.load_started(ident, size, 0, early=True)
    begin = clock.now
    clock.now += 0.002
    policy.load_ended(ident, good=True)
    policy.clock.planned(step([]))
    policy.step_ended()
    clock.now += later
    policy.clock.planned(step([("r", 8000, 32)]))
    clock.now = max(clock.now, begin + size / 50e9) + fast_gpu(32, 32 * 8016)
    policy.step_ended()


def learnt(engine: Engine, size: int) -> float:
    return engine.policy.load_seconds(size, 0, same_step=True)


def test_an_early_load_takes_until_the_step_behind_it_begins_to_compute(clock: Clock) -> None:
    engine = Engine(clock)
    engine.learn()
    count = engine.policy.prefill.fit.count
    for ident in range(9):
        load_early(engine, (50, 500, 2000)[ident % 3] * 1_000_000, ident)
    assert engine.policy.prefill.fit.count == count
    assert engine.policy.memory.under_way == 0
    assert learnt(engine, 2_000_000_000) == pytest.approx(0.040, rel=0.15)
    assert learnt(engine, 500_000_000) == pytest.approx(0.010, rel=0.3)


def test_a_step_long_after_an_early_load_says_nothing_of_it(clock: Clock) -> None:
    engine = Engine(clock)
    engine.learn()
    for ident in range(6):
        load_early(engine, 500_000_000, ident)
    before = learnt(engine, 500_000_000)
    for ident in range(6, 12):
        # It was aborted, and another request comes after a while.
        load_early(engine, 500_000_000, ident, later=30.0)
    assert learnt(engine, 500_000_000) == pytest.approx(before)
