"""Chunks that wait for slots, their blocks pinned: order, fairness, and what is given up when."""

from __future__ import annotations

from array import array
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from fakes import core as fake

pytest.importorskip("vllm")

from fakes.scheduler import Bench, Request
from lakecache import _backlog, _scheduler
from lakecache._metadata import IDLE, Tally, WorkerReport
from lakecache.connector import LakeCacheConnector


class SavesUnderWay(list):  # type: ignore[type-arg]
    """As many as there are elements."""

    ranks = 2


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Bench:
    fake.pools.clear()
    return Bench(monkeypatch, tmp_path)


def test_the_step_that_computes_only_pins(bench: Bench) -> None:
    request, other = Request(640), Request(64)
    other.block_hashes = [bytes([100 + i]) * 32 for i in range(2)]
    bench.allocate(request, 0)
    plan = bench.step(request, 640)
    assert plan.pinned
    assert plan.stores == []
    assert bench.pool.pinned() == 20
    # It ends before any of it is stored. The next step has nothing to compute: it is left alone,
    # but not two steps in a row.
    bench.half.finished(request.request_id)
    assert bench.step() is IDLE
    # What comes later neither overtakes nor waits for all of it.
    bench.allocate(other, 0)
    stored = []
    for number in range(6):
        plan = bench.step() if number else bench.step(other, 64)
        stored.append(len(plan.stores))
        bench.acknowledge(plan)
    assert stored == [4, 0, 4, 3, 0, 0]
    bench.half.finished(other.request_id)
    assert bench.leaks() == []
    assert bench.half.matched(Request(640), 0) == (639, True)


def test_more_is_stored_while_more_is_computed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "total", lambda scheduled: sum(scheduled.values()))
    bench.half.policy = None
    request = Request(2560)
    bench.allocate(request, 0)
    assert bench.step(request, 640).stores == []
    # As many as a step computes, and some more; a small step has time for those alone.
    plans = [bench.step(request, 1280), bench.step(request, 640)]
    assert [len(plan.stores) for plan in plans] == [10, 14]
    for plan in plans:
        bench.acknowledge(plan)
    assert len(bench.step(request, 1).stores) == 4


def test_chunks_behind_one_without_room_wait_with_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(256)
    bench.allocate(request, 0)
    bench.step(request, 128)
    bench.cache.pool.refuse_reserve = True
    assert bench.step(request, 128).stores == []
    assert bench.step(request, 1) is IDLE
    bench.cache.pool.refuse_reserve = False
    plan = bench.step(request, 1)
    stored = [array("i", ids).tolist() for *_, ids in plan.stores]
    assert stored == [[1, 2], [3, 4], [5, 6], [7, 8]]
    bench.acknowledge(plan)
    bench.half.finished(request.request_id)
    assert bench.leaks() == []


def test_the_lock_is_waited_for_once_in_a_step(bench: Bench) -> None:
    bench.cache.pool.refuse_reserve = True
    requests = [Request(64) for _ in range(3)]
    for number, request in enumerate(requests):
        request.block_hashes = [bytes([100 + number]) * 32] * 2
        bench.allocate(request, 0)
        bench.step(request, 64)
    bench.cache.pool.waits.clear()
    bench.step(requests[0], 1)
    first, *others = bench.cache.pool.waits
    assert first > 0
    assert others == [0, 0]
    bench.cache.pool.refuse_reserve = False
    bench.acknowledge(bench.step(requests[0], 1))
    for request in requests:
        bench.half.finished(request.request_id)
    assert bench.leaks() == []


def test_the_engine_preempts_rather_than_wait_for_room(bench: Bench) -> None:
    request = Request(256)
    bench.allocate(request, 0)
    bench.step(request, 256)
    assert bench.half.pending_frees()
    bench.cache.pool.refuse_reserve = True
    bench.step(request, 1)
    # Nobody knows when the store has room again.
    assert not bench.half.pending_frees()
    assert bench.half.pending_stores()
    bench.cache.pool.refuse_reserve = False
    plan = bench.step(request, 1)
    assert bench.half.pending_frees()
    bench.acknowledge(plan)
    assert not bench.half.pending_frees()
    bench.half.finished(request.request_id)
    assert bench.leaks() == []


def test_what_waits_for_room_makes_room_for_requests(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = object.__new__(LakeCacheConnector)
    connector.scheduler, connector.worker = bench.half, None
    request, other = Request(256), Request(64)
    bench.allocate(request, 0)
    bench.step(request, 256)
    bench.half.finished(request.request_id)
    bench.cache.pool.refuse_reserve = True
    bench.half.finished(request.request_id)
    for _ in range(3):
        bench.step()
    assert bench.pool.pinned() == 8
    # It is looked at, but gets no blocks. What waits only since the last step is not given up.
    assert connector.get_num_new_matched_tokens(other, 0) == (0, False)
    bench.step()
    assert bench.pool.pinned() == 8
    monkeypatch.setattr(_backlog, "SHORT_SECONDS", 0.0)
    assert connector.get_num_new_matched_tokens(other, 0) == (0, False)
    bench.allocate(other, 0)
    bench.step()
    assert bench.pool.pinned() == 8
    assert connector.get_num_new_matched_tokens(other, 0) == (0, False)
    bench.step()
    assert bench.pool.pinned() == 0
    assert bench.half.total("stores_dropped") == 1
    # A request that runs needs blocks.
    bench.allocate(other, 0)
    for _ in range(2):
        bench.step(other, 64)
    assert bench.pool.pinned() == 2
    assert not connector.has_pending_block_frees()
    bench.step(other, 1)
    bench.half.finished(other.request_id)
    assert bench.leaks() == []


def test_room_that_comes_slowly_serves_all_of_a_prompt(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(_backlog, "time", clock)
    now = 0.0
    request = Request(1024)
    bench.allocate(request, 0)
    stored = 0
    monkeypatch.setattr(_backlog, "STORES_PER_STEP", 1)
    for number in range(40):
        # Room for a chunk each second; the prompt's second half is computed in the second step.
        bench.cache.pool.refuse_reserve = True
        bench.acknowledge(bench.step(request, 512 if number < 2 else 1))
        now += 1.0
        bench.cache.pool.refuse_reserve = False
        plan = bench.step(request, 1)
        bench.acknowledge(plan)
        stored += len(plan.stores)
    assert stored == 16
    assert bench.half.total("stores_dropped") == 0
    bench.half.finished(request.request_id)
    assert bench.leaks() == []


def test_slow_copies_delay_stores_and_lose_none(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_backlog, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(_scheduler, "time", _backlog.time)
    now = 0.0
    # Two chunks may be pinned at a time.
    bench.half.saves.num_blocks = 8
    request = Request(1024)
    bench.allocate(request, 0)
    stored = 0
    for number in range(20):
        plan = bench.step(request, 1024 if number == 0 else 1)
        assert bench.pool.pinned() <= 4
        now += 1.0
        bench.acknowledge(plan)
        stored += len(plan.stores)
    assert stored == 16
    assert bench.half.total("stores_dropped") == 0
    bench.half.finished(request.request_id)
    assert bench.leaks() == []


def test_a_long_prompt_leaves_room_for_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_backlog, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(_scheduler, "time", _backlog.time)
    now = 0.0
    bench.half.saves.num_blocks = 8
    requests = [Request(1024), Request(256, block_hashes=[bytes([100 + i]) * 32 for i in range(8)])]
    for request in requests:
        bench.allocate(request, 0)
    state = SimpleNamespace(get_block_ids=lambda _: ([*range(1, 100)],))
    for number in range(24):
        tokens = {r.request_id: 1 if number else r.num_tokens for r in requests}
        output = SimpleNamespace(
            num_scheduled_tokens=tokens, total_num_scheduled_tokens=2,
            kv_connector_block_state=state,
        )  # fmt: skip
        plan = bench.half.plan_step(output)  # type: ignore[arg-type]
        for request in requests:
            request.num_computed_tokens += tokens[request.request_id]
        now += 0.4
        bench.acknowledge(plan)
    assert bench.half.total("stores_dropped") == 0
    assert bench.half.total("stores") == 20
    for request in requests:
        bench.half.finished(request.request_id)
    assert bench.leaks() == []


def test_what_lies_behind_lost_chunks_is_not_kept_pinned(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(512)
    bench.allocate(request, 0)
    bench.cache.pool.refuse_reserve = True
    bench.step(request, 128)
    bench.step(request, 128)
    monkeypatch.setattr(_backlog, "PUT_OFF_SECONDS", 0.0)
    bench.step(request, 1)
    bench.cache.pool.refuse_reserve = False
    # Nobody would find them.
    bench.step(request, 200)
    assert bench.pool.pinned() == 0
    assert bench.half.total("stores_dropped") == 1
    bench.half.finished(request.request_id)
    assert bench.leaks() == []


def test_a_full_store_is_not_asked_for_everybody_in_each_step(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [Request(64, block_hashes=[bytes([100 + i]) * 32] * 2) for i in range(20)]
    asked: list[bytes] = []
    with monkeypatch.context() as full:
        full.setattr(bench.cache, "reserve", lambda space, key, *rest: asked.append(key))
        for request in requests:
            bench.allocate(request, 0)
            bench.step(request, 64)
        asked.clear()
        for _ in range(5):
            bench.step(requests[0], 1)
    # Each has its turn.
    assert len(asked) == len(set(asked)) == 5 * _backlog.FAILURES_PER_STEP
    stored = 0
    for _ in range(10):
        plan = bench.step(requests[0], 1)
        stored += len(plan.stores)
        bench.acknowledge(plan)
    assert stored == 20
    for request in requests:
        bench.half.finished(request.request_id)
    assert bench.leaks() == []


def test_chunks_that_another_has_stored_go_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Request(1280), Request(1280)
    for request in (one, other):
        bench.allocate(request, 0)
    monkeypatch.setattr(_backlog, "STORES_PER_STEP", 20)
    bench.step(one, 1280)
    bench.acknowledge(bench.step(other, 1280))
    assert bench.pool.pinned() == 40
    bench.step(other, 1)
    # Their ages are set once, not for each chunk anew.
    assert bench.pool.pinned() == 0
    assert len(bench.cache.pool.touched) == 20
    for request in (one, other):
        bench.half.finished(request.request_id)
    assert bench.leaks() == []


def test_the_first_step_after_idle_ones_is_left_alone(bench: Bench) -> None:
    request = Request(640)
    bench.allocate(request, 0)
    plans = [bench.step(request, 640), bench.step(), bench.step(), bench.step(request, 1)]
    plans.append(bench.step(request, 1))
    assert [len(plan.stores) for plan in plans] == [0, 0, 4, 0, 4]
    for plan in plans:
        bench.acknowledge(plan)
    bench.acknowledge(bench.step(request, 1))
    bench.half.finished(request.request_id)
    assert bench.leaks() == []


@pytest.mark.parametrize("decoding", [False, True])
def test_short_steps_leave_little_queued(bench: Bench, *, decoding: bool) -> None:
    request = Request(1280)
    take_step = partial(bench.step, request, 1) if decoding else bench.step
    bench.allocate(request, 0)
    bench.step(request, 1280)
    plans = [take_step() for _ in range(12)]
    # The next token waits for all that is queued before it.
    few = _backlog.STORES_PER_STEP
    assert [len(plan.stores) for plan in plans if plan.stores] == [few, few]
    stored = 2 * few
    for plan in plans:
        bench.acknowledge(plan)
    for _ in range(4):
        plan = take_step()
        stored += len(plan.stores)
        bench.acknowledge(plan)
    assert stored == 20
    bench.half.finished(request.request_id)
    assert bench.leaks() == []


def test_steps_with_and_without_tokens_by_turns_store_all(bench: Bench) -> None:
    request = Request(1280)
    bench.allocate(request, 0)
    bench.step(request, 1280)
    stored = []
    for number in range(15):
        plan = bench.step(request, 1) if number % 2 else bench.step()
        stored.append(len(plan.stores))
        bench.acknowledge(plan)
    # Two in three steps are left alone.
    assert stored == [0, 4, 0] * 5
    bench.half.finished(request.request_id)
    assert bench.leaks() == []


@pytest.mark.parametrize(("part", "few"), [(1, 4), (60 << 20, 2), (1 << 30, 1)])
def test_a_short_step_queues_few_bytes(part: int, few: int) -> None:
    saves: Any = SavesUnderWay()
    backlog = _backlog.Backlog(
        None, saves, chunk=256, counts=Tally(), chunk_bytes=lambda: saves.ranks * part
    )
    assert backlog.allowed(1, 8192) == backlog.allowed(0, 0) == few
    assert backlog.allowed(1, 1) == backlog.allowed(8192, 0) == few
    # A step that computes as many after one that did copies them meanwhile, whatever is queued.
    saves.extend(range(100))
    assert backlog.allowed(8192, 8192) == few + 32
    assert backlog.allowed(8192, 1) == backlog.allowed(0, 0) == backlog.allowed(0, 8192) == 0
    del saves[2 * few - 1 :]
    assert backlog.allowed(0, 0) == 1


def test_reset_gives_up_what_is_only_pinned(bench: Bench) -> None:
    request = Request(256)
    bench.allocate(request, 0)
    bench.step(request, 256)
    assert bench.pool.pinned() == 8
    assert bench.half.reset()
    assert bench.pool.pinned() == 0
    assert bench.step(request, 1) is IDLE
    assert not bench.half.pending_stores()


def test_what_a_step_computes_that_does_not_come_back_is_not_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "total", lambda scheduled: sum(scheduled.values()))
    bench.half.policy = None
    request = Request(512)
    bench.allocate(request, 0)
    plans = [bench.step(request, 128)]
    bench.half.stats()
    # The second step fails, and the third is under way already.
    plans += [bench.step(request, 128), bench.step(request, 128)]
    assert [len(plan.stores) for plan in plans] == [0, 2, 2]
    assert bench.half.plan_rest().stores == []
    done = {store[0]: (1, 0) for plan in plans for store in plan.stores}
    bench.half.drained(WorkerReport(done))
    assert bench.half.matched(Request(512), 0) == (128, True)


def test_what_waits_when_all_steps_are_back_is_kept(bench: Bench) -> None:
    request = Request(256)
    bench.allocate(request, 0)
    bench.step(request, 256)
    bench.half.stats()
    plan = bench.half.plan_rest()
    assert len(plan.stores) == 4
    bench.half.drained(WorkerReport({store[0]: (1, 0) for store in plan.stores}))
    assert bench.half.matched(Request(256), 0) == (255, True)
