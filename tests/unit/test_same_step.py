"""Loads within the step that admits a request: when they are used, and how they end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fakes import core as fake

pytest.importorskip("vllm")

from fakes.scheduler import Bench, Request
from lakecache._metadata import IDLE, Handshake, StepPlan, WorkerReport
from lakecache._objects import Geometry
from lakecache._pages import Groups
from lakecache._worker import WorkerHalf
from lakecache.config import CacheConfig


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Bench:
    fake.pools.clear()
    bench = Bench(monkeypatch, tmp_path)
    bench.half._same_step = True
    return bench


def test_a_hit_in_memory_of_the_only_request_is_part_of_its_step(bench: Bench) -> None:
    bench.store(256)
    request = Request(256)
    assert bench.half.matched(request, 0) == (255, False)
    bench.allocate(request, 255)
    assert sum(bench.half.sources(request, 255)) == 255
    plan = bench.step(request, 1)
    assert plan.same_step
    assert [chunk[1] for chunk in plan.chunks] == [0, 1, 2, 3]
    # The pins stay, and the engine goes on stepping, until the copies are acknowledged.
    assert all(slot.pins == 1 for slot in bench.cache.pool.slots.values())
    assert bench.half.pending()
    assert not bench.half.pending_stores()
    ident = plan.loads[0][0]
    bench.half.report(WorkerReport(copied={(ident, index): 1 for index in range(3)}), (), ())
    assert bench.half.pending()
    bench.half.report(WorkerReport(copied={(ident, 3): 1}), (), ())
    assert not bench.half.pending()
    assert bench.step(request, 1) is IDLE
    bench.half.finished(request.request_id)
    assert bench.leaks() == []


def test_it_ends_well_when_the_request_is_gone_before(bench: Bench) -> None:
    bench.store(128)
    request = Request(128)
    assert bench.half.matched(request, 0) == (127, False)
    bench.allocate(request, 127)
    ident = bench.step(request, 1).loads[0][0]
    bench.half.finished(request.request_id)
    assert all(slot.pins == 1 for slot in bench.cache.pool.slots.values())
    bench.half.report(WorkerReport(copied={(ident, 0): 1, (ident, 1): 1}), (), ())
    assert bench.leaks() == []


@pytest.mark.parametrize("verify", [False, True])
def test_what_is_verified_may_be_refused_so_it_is_loaded_between_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, verify: bool
) -> None:
    fake.pools.clear()
    bench = Bench(monkeypatch, tmp_path, verify_load=verify)
    told = Handshake(bench.cache.pool_id, bench.part_bytes, "{}", same_step=True)
    bench.half.handshake({(0, 0): told})
    bench.store(256)
    assert bench.half.matched(Request(256), 0) == (255, verify)


def test_no_more_are_promised_once_a_rank_has_said_that_it_cannot(bench: Bench) -> None:
    bench.store(256)
    request = Request(256)
    assert bench.half.matched(request, 0) == (255, False)
    bench.half.report(WorkerReport().aggregate(WorkerReport(same_step=False)), (), ())
    assert bench.half.matched(request, 0) == (255, True)


def test_fewer_blocks_than_promised_are_an_error(bench: Bench) -> None:
    """The forward would read pages that nobody loads."""
    bench.store(256)
    request = Request(256)
    assert bench.half.matched(request, 0) == (255, False)
    few = SimpleNamespace(get_block_ids=lambda: ([1, 2],))
    with pytest.raises(RuntimeError, match="within the step"):
        bench.half.allocated(request, few, 255)  # type: ignore[arg-type]


def test_a_worker_says_of_a_load_that_it_is_over_even_if_the_copies_were_given_up() -> None:
    class Broken:
        """A GPU transfer with an error after the engine's stream was told to wait for the load."""

        same_step = True

        def __init__(self) -> None:
            self.jobs: list[int] = []

        def load(self, job: int, *_: object) -> None:
            self.jobs.append(job)

        def follow_loads(self) -> None:
            pass

        def poll(self) -> list[tuple[int, bool]]:
            self.same_step = False
            return [(job, False) for job in self.jobs]

    nothing: Any = SimpleNamespace(prefix_cacheable_group_ids=())
    half = WorkerHalf(
        nothing, nothing, CacheConfig(transfer="sync"), nothing,
        groups=Groups((0,)), geometry=Geometry(64, 32, 32), rank=0,
    )  # fmt: skip
    half._transfer, half._same_step = Broken(), True  # type: ignore[assignment]
    plan = StepPlan()
    plan.loads, plan.chunks = [(7, None, 1)], [(7, 0, 0, 1, 1, b"")]
    half.start_loads(plan)
    half.poll()
    assert half.take_report() == WorkerReport(copied={(7, 0): 1}, same_step=False)
    assert half.take_report() is None
    half._settle()
    half.take_results()
    assert not half.busy()


@pytest.mark.parametrize("idle", [True, False])
def test_a_worker_with_copies_under_way_does_not_leave_the_pool(tmp_path: Any, idle: bool) -> None:
    """Leaving gives up its pins, and what they hold could become another object."""
    cache = fake.Cache(cache_dir=None, ram_dir=str(tmp_path))
    nothing: Any = SimpleNamespace(prefix_cacheable_group_ids=())
    half = WorkerHalf(
        nothing, nothing, CacheConfig(transfer="sync"), cache,
        groups=Groups((0,)), geometry=Geometry(64, 32, 32), rank=0,
    )  # fmt: skip
    over = SimpleNamespace(close=lambda _: idle, poll=list, same_step=True)
    half._transfer = over  # type: ignore[assignment]
    half.shutdown()
    assert cache.closed == idle


def test_others_are_not_held_up(bench: Bench) -> None:
    bench.store(256)
    busy, request = Request(100), Request(256)
    bench.half.matched(busy, 0)
    assert bench.half.matched(request, 0) == (255, True)


def test_what_is_on_disk_is_loaded_between_steps(bench: Bench) -> None:
    bench.store(256)
    bench.cache.clear_memory()
    assert bench.half.matched(Request(256), 0) == (255, True)


def test_a_declined_allocation_lets_go(bench: Bench) -> None:
    bench.store(256)
    request = Request(256)
    assert bench.half.matched(request, 0) == (255, False)
    bench.allocate(request, 0)
    assert bench.step(request, 1) is IDLE
    assert not any(slot.pins for slot in bench.cache.pool.slots.values())
