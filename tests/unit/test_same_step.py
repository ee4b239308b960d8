"""Loads within the step that admits a request: when they are used, and how they end."""

from __future__ import annotations

from typing import Any

import pytest

from fakes import core as fake

pytest.importorskip("vllm")

from fakes.scheduler import Bench, Request
from lakecache._metadata import IDLE, Handshake, WorkerReport


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
