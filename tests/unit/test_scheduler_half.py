"""The scheduler half against a stand-in cache: leases, loads, saves and their ends."""

from __future__ import annotations

from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fakes import core as fake

pytest.importorskip("vllm")

from fakes.scheduler import BLOCK, CHUNK, Bench, Request
from lakecache import _backlog, _scheduler
from lakecache._metadata import IDLE, Handshake, WorkerReport
from lakecache._objects import KIND_CHUNK


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Bench:
    fake.pools.clear()
    return Bench(monkeypatch, tmp_path)


def test_idle_step_is_one_constant(bench: Bench) -> None:
    assert bench.step() is IDLE
    bench.store(200)
    assert bench.step() is IDLE
    assert not bench.half.pending_stores()


@pytest.mark.parametrize("tokens", [1, 31, 63, 64, 65, 127, 128, 129, 192])
def test_a_hit_ends_one_token_before_the_prompt_at_most(bench: Bench, tokens: int) -> None:
    bench.store(tokens)
    request = Request(tokens)
    full = tokens // CHUNK * CHUNK
    want = min(full, tokens - 1)
    assert bench.half.matched(request, 0) == ((want, True) if want >= BLOCK else (0, False))
    bench.half.finished(request.request_id)
    assert bench.leaks() == []


def test_only_computed_tokens_are_saved(bench: Bench) -> None:
    request = Request(300)
    bench.allocate(request, 0)
    assert len(bench.compute(request, 100).stores) == 1
    assert len(bench.compute(request, 27).stores) == 0
    assert len(bench.compute(request, 1).stores) == 1
    assert len(bench.compute(request, 172).stores) == 2
    assert bench.step(request, 1) is IDLE


def test_repeated_lookups_hold_one_lease(bench: Bench) -> None:
    bench.store(256)
    request = Request(256)
    for _ in range(5):
        assert bench.half.matched(request, 0) == (255, True)
    assert all(slot.pins == 1 for slot in bench.cache.pool.slots.values())
    # The local cache grew meanwhile: the lease moves, and nothing of the old one is left.
    assert bench.half.matched(request, 128) == (127, True)
    assert sum(slot.pins for slot in bench.cache.pool.slots.values()) == 2
    bench.half.finished(request.request_id)
    assert bench.leaks() == []


def test_declined_allocation_lets_go(bench: Bench) -> None:
    bench.store(256)
    request = Request(256)
    bench.half.matched(request, 0)
    bench.allocate(request, 0)
    assert not any(slot.pins for slot in bench.cache.pool.slots.values())


def test_a_load_that_straddles_a_chunk_leaves_out_what_is_there(bench: Bench) -> None:
    bench.store(256)
    request = Request(256)
    assert bench.half.matched(request, 96) == (159, True)
    bench.allocate(request, 159)
    plan = bench.step()
    held = [(chunk[1], [block == 0 for block in array("i", chunk[5])]) for chunk in plan.chunks]
    assert held == [(0, [True, False]), (1, [False, False]), (2, [False, False])]
    bench.half.report(None, [request.request_id], ())
    bench.half.finished(request.request_id)
    assert bench.leaks() == []


def test_abort_during_a_load_keeps_the_lease_until_it_is_over(bench: Bench) -> None:
    bench.store(256)
    request = Request(256)
    bench.half.matched(request, 0)
    bench.allocate(request, 255)
    bench.step()
    bench.half.finished(request.request_id)
    assert all(slot.pins == 1 for slot in bench.cache.pool.slots.values())
    bench.half.report(None, [request.request_id], ())
    assert bench.leaks() == []


def test_pending_opens_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.store(256)
    bench.cache.pool.polls_pending = 1_000_000
    request = Request(256)
    assert bench.half.matched(request, 0) == (None, False)
    monkeypatch.setattr(_scheduler, "OPEN_SECONDS", 0.0)
    assert bench.half.matched(request, 0) == (255, True)  # what memory holds
    bench.cache.clear_memory()
    bench.half.finished(request.request_id)
    bench.cache.clear_memory()
    other = Request(256)
    assert bench.half.matched(other, 0) == (0, False)  # the disk alone: compute
    bench.half.finished(other.request_id)
    assert bench.leaks() == []


def test_a_damaged_file_fails_the_load_once_and_then_misses(bench: Bench) -> None:
    bench.store(256)
    bench.cache.clear_memory()
    for file in Path(bench.cache.pool.directory or "").glob("*.kv"):
        file.write_bytes(b"x" * 100)
    request = Request(256)
    assert bench.half.matched(request, 0) == (255, True)
    bench.allocate(request, 255)
    plan = bench.step()
    assert plan.failed == [plan.loads[0][0]]
    assert bench.step() is IDLE
    bench.half.report(None, [request.request_id], [request.request_id])
    tracked = bench.half._tracked[request.request_id]
    assert tracked.failures == 1
    tracked.failures = _scheduler.LOAD_ATTEMPTS
    assert bench.half.matched(request, 0) == (0, False)


def test_a_failed_start_is_reported_as_a_failed_load(bench: Bench) -> None:
    request = Request(256)
    bench.allocate(request, 128)  # vLLM waits for a load that nobody promised
    plan = bench.step()
    assert len(plan.loads) == 1
    assert plan.failed == [plan.loads[0][0]]


def test_a_negative_acknowledgement_abandons(bench: Bench) -> None:
    request = Request(128)
    bench.allocate(request, 0)
    plan = bench.compute(request, 128)
    assert bench.half.pending_stores()
    assert bench.pool.pinned() == 4
    bench.acknowledge(plan, good=False)
    assert not bench.half.pending_stores()
    assert not bench.cache.pool.slots
    bench.half.finished(request.request_id)
    assert bench.leaks() == []


def test_a_chunk_becomes_readable_when_every_rank_has_stored_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    fake.pools.clear()
    bench = Bench(monkeypatch, tmp_path, ranks=2)
    request = Request(64)
    bench.allocate(request, 0)
    plan = bench.compute(request, 64)
    bench.acknowledge(plan)
    assert bench.half.pending_stores()
    assert bench.half.matched(Request(128), 0) == (0, False)
    bench.acknowledge(plan)
    assert not bench.half.pending_stores()
    assert bench.half.matched(Request(128), 0) == (64, True)


def test_no_room_is_not_an_error(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.cache.pool.refuse_reserve = True
    request = Request(256)
    bench.allocate(request, 0)
    # Steps may be short: their number says nothing.
    for _ in range(100):
        assert bench.step(request, 256).stores == []
        request.num_computed_tokens = 0
    assert bench.half.pending_stores()
    assert bench.half.counts["stores_put_off"] == 1
    monkeypatch.setattr(_backlog, "PUT_OFF_SECONDS", 0.0)
    assert bench.step(request, 256).stores == []
    assert not bench.half.pending_stores()
    assert bench.pool.pinned() == 0
    assert bench.half.counts["stores_dropped"] == 1


def test_what_was_put_off_is_stored_when_there_is_room(bench: Bench) -> None:
    bench.cache.pool.refuse_reserve = True
    request = Request(256)
    bench.allocate(request, 0)
    assert bench.step(request, 256).stores == []
    request.num_computed_tokens = 256
    bench.cache.pool.refuse_reserve = False
    assert len(bench.compute(request, 1).stores) == 4


@pytest.mark.parametrize("attribute", ["skip_reading_prefix_cache", "resumable"])
def test_requests_that_must_not_read(bench: Bench, attribute: str) -> None:
    bench.store(256)
    assert bench.half.matched(Request(256, **{attribute: True}), 0) == (0, False)


def test_a_prompt_that_the_gpu_holds_is_left_alone(bench: Bench) -> None:
    bench.store(256)
    request = Request(256)
    assert bench.half.matched(request, 224) == (0, False)  # less than a block is missing
    bench.half.finished(request.request_id)
    assert bench.leaks() == []


def test_reset_shares_nothing_with_what_is_stored(bench: Bench) -> None:
    bench.store(256)
    assert bench.half.reset()
    assert bench.half.matched(Request(256), 0) == (0, False)
    bench.store(256)
    assert bench.half.matched(Request(256), 0) == (255, True)
    assert bench.cache.pool.persistent == [True, False]


def test_resets_without_end_do_not_use_up_the_namespaces_of_the_pool(bench: Bench) -> None:
    bench.store(256)
    digests = set()
    for _ in range(20):
        assert bench.half.reset()
        digests.add(bench.half.spaces.of(None).digest)
        assert bench.half.matched(Request(256), 0) == (0, False)
        bench.store(256)
    assert len(digests) == 20
    assert len(bench.cache.pool.spaces) == 2


def test_unequal_pools_decline(bench: Bench) -> None:
    bench.half.handshake({(0, 0): Handshake("another", {KIND_CHUNK: 4096}, "{}")})
    assert bench.half.declined is not None
    assert "pool" in bench.half.declined


def test_unknown_reports_are_ignored(bench: Bench) -> None:
    bench.half.report(WorkerReport({99: (1, 0)}, {(99, 0): 1}), ["nobody"], ["nobody"])
    bench.half.finished("nobody")
    assert bench.leaks() == []


def test_reports_add_up() -> None:
    one, other = WorkerReport({1: (1, 0)}, {(2, 3): 1}), WorkerReport({1: (0, 1)}, {(2, 3): 1})
    both = one.aggregate(other)
    assert both.stores == {1: (1, 1)}
    assert both.copied == {(2, 3): 2}


def test_a_plan_that_broke_off_still_reaches_the_workers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM waits for its loads, and its stores hold blocks: losing it would be for ever."""
    bench.store(256)
    loading, first, second = Request(256), Request(100), Request(100)
    first.block_hashes = [bytes([100 + i]) * 32 for i in range(3)]
    second.block_hashes = [bytes([150 + i]) * 32 for i in range(3)]
    for request in (first, second):
        bench.allocate(request, 0)
    reserve, calls = bench.cache.reserve, []

    def once(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) > 1:
            raise OSError("the second store breaks")
        return reserve(*arguments)

    monkeypatch.setattr(bench.cache, "reserve", once)
    state = SimpleNamespace(get_block_ids=lambda _: ([*range(1, 100)],))
    scheduled = {first.request_id: 100, second.request_id: 100}
    output = SimpleNamespace(
        num_scheduled_tokens=scheduled, total_num_scheduled_tokens=len(scheduled),
        kv_connector_block_state=state,
    )  # fmt: skip
    bench.half.plan_step(output)  # type: ignore[arg-type]
    bench.half.matched(loading, 0)
    bench.allocate(loading, 255)
    with pytest.raises(OSError, match="breaks"):
        bench.half.plan_step(output)  # type: ignore[arg-type]
    plan = bench.half.abandon_plan()
    assert [load[1] for load in plan.loads] == [loading.request_id]
    assert plan.failed == [plan.loads[0][0]]
    assert len(plan.stores) == 1
    bench.acknowledge(plan)
    bench.half.report(None, [loading.request_id], [loading.request_id])
    assert not bench.half.pending_stores()
    assert bench.step() is IDLE
    for request in (loading, first, second):
        bench.half.finished(request.request_id)
    assert bench.leaks() == []


def test_a_step_whose_planning_fails_at_once_repeats_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(128)
    bench.allocate(request, 0)
    bench.step(request, 64)
    assert len(bench.step(request, 64).stores) == 1

    def refuse() -> None:
        raise ValueError("no estimate")

    assert bench.half.policy is not None
    monkeypatch.setattr(bench.half.policy.prefill.fit, "prepare", refuse)
    # Nothing is estimated while the tokens of a step are waited for.
    assert bench.step() is IDLE
    for _ in range(2):
        bench.half.stats()
    with pytest.raises(ValueError, match="no estimate"):
        bench.step()
    assert bench.half.abandon_plan() is IDLE


def test_one_report_that_fails_does_not_lose_the_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.store(256)
    loading, storing = Request(256), Request(256)
    storing.block_hashes = [bytes([100 + i]) * 32 for i in range(8)]
    bench.half.matched(loading, 0)
    bench.allocate(loading, 255)
    bench.allocate(storing, 0)
    plan = bench.compute(storing, 256)
    assert len(plan.stores) == 4

    def refuse(*_: Any) -> None:
        raise OSError("no commit")

    monkeypatch.setattr(bench.cache, "commit", refuse)
    told = WorkerReport({store[0]: (1, 0) for store in plan.stores})
    with pytest.raises(OSError, match="no commit"):
        bench.half.report(told, [loading.request_id], ())
    assert not bench.half.pending_stores()
    assert bench.pool.pinned() == 0
    assert not bench.half.loads.between_steps()


def chunks_in_memory(bench: Bench) -> int:
    return sum(slot.state == 1 for slot in bench.cache.pool.slots.values())


def compute_declined(bench: Bench, local: int = 0) -> Any:
    """Ask for a prompt of four chunks, load nothing, and compute what the GPU lacks."""
    request = Request(256)
    assert bench.half.matched(request, local)[0]
    bench.allocate(request, 0)
    request.num_computed_tokens = local
    plan = bench.compute(request, 256 - local)
    bench.acknowledge(plan)
    bench.half.finished(request.request_id)
    return plan


@pytest.mark.parametrize(("local", "stores"), [(0, 4), (64, 3), (96, 3), (128, 2)])
def test_what_is_computed_although_it_is_on_disk_goes_into_memory(
    bench: Bench, local: int, stores: int
) -> None:
    bench.store(256)
    bench.cache.clear_memory()
    # Of what the GPU still has, only a chunk that is finished now is copied.
    assert len(compute_declined(bench, local).stores) == stores
    assert chunks_in_memory(bench) == stores
    assert compute_declined(bench, local).stores == []
    assert bench.leaks() == []


def test_what_memory_holds_in_between_is_not_copied_again(bench: Bench) -> None:
    bench.store(256)
    pool = bench.cache.pool
    first, _, third, _ = list(pool.slots)
    pool.drop(first)
    pool.drop(third)
    assert len(compute_declined(bench).stores) == 2
    assert chunks_in_memory(bench) == 4
    assert bench.leaks() == []


@pytest.mark.parametrize("on_disk", [[], [0], [7], [3, 5], [1, 2, 6], range(8)])
def test_chunks_in_memory_are_counted_up_to_the_first_on_disk_alone(
    bench: Bench, on_disk: list[int]
) -> None:
    bench.store(512)
    slots = list(bench.cache.pool.slots)
    for number in on_disk:
        bench.cache.pool.drop(slots[number])
    keys = bench.half.keys.chunks(bench.half._track(Request(512)))
    first = min(on_disk, default=8)
    assert bench.half._leading(keys, *bench.cache.lookup(keys)) == first


def test_what_is_on_disk_does_not_wait_for_room_in_memory(bench: Bench) -> None:
    bench.store(256)
    bench.cache.clear_memory()
    bench.cache.pool.refuse_reserve = True
    assert compute_declined(bench).stores == []
    assert bench.half.total("stores_put_off") == 0
    assert bench.leaks() == []


def test_a_prompt_that_could_not_be_looked_up_is_stored_all_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: bytes) -> None:
        raise OSError("no look-up")

    request = Request(256)
    assert bench.half.matched(request, 0) == (0, False)
    with monkeypatch.context() as broken:
        broken.setattr(bench.cache, "lookup", refuse)
        with pytest.raises(OSError, match="no look-up"):
            bench.allocate(request, 0)
    plan = bench.compute(request, 256)
    assert len(plan.stores) == 4
    bench.acknowledge(plan)
    bench.half.finished(request.request_id)
    assert bench.leaks() == []


def test_what_is_loaded_from_disk_is_not_stored_again(bench: Bench) -> None:
    bench.store(256)
    bench.cache.clear_memory()
    request = Request(320)
    assert bench.half.matched(request, 0) == (256, True)
    bench.allocate(request, 256)
    plan = bench.step()
    assert len(plan.chunks) == 4
    bench.half.report(None, [request.request_id], ())
    request.num_computed_tokens = 256
    assert [store[1] for store in bench.compute(request, 64).stores] == [KIND_CHUNK]


def test_what_a_failed_load_lost_is_stored_anew(bench: Bench) -> None:
    bench.store(256)
    bench.cache.clear_memory()
    lost = sorted(Path(bench.cache.pool.directory or "").glob("*.kv"))
    for file in lost:
        file.write_bytes(b"x" * 100)
    request = Request(256)
    assert bench.half.matched(request, 0) == (255, True)
    bench.allocate(request, 255)
    bench.step()
    bench.half.report(None, [request.request_id], [request.request_id])
    # vLLM asks again from the beginning. Only the first file was read, and is known to be bad.
    assert bench.half.matched(request, 0) == (0, False)
    bench.allocate(request, 0)
    plan = bench.compute(request, 256)
    assert plan.stores
    bench.acknowledge(plan)
    bench.half.finished(request.request_id)
    assert bench.leaks() == []


def test_preempted_while_its_chunks_are_saved(bench: Bench) -> None:
    request = Request(256)
    bench.allocate(request, 0)
    plan = bench.compute(request, 200)
    assert len(plan.stores) == 3
    assert bench.pool.pinned() == 6
    # vLLM takes the blocks away; the pins keep them until they are copied.
    request.num_computed_tokens = 0
    assert bench.half.matched(request, 0) == (0, False)
    assert bench.step() is IDLE
    assert bench.pool.pinned() == 6
    assert bench.half.pending_stores()
    bench.acknowledge(plan)
    assert bench.pool.pinned() == 0
    # It comes back, and finds its own beginning.
    assert bench.half.matched(request, 0) == (192, True)
    bench.allocate(request, 192)
    plan = bench.step()
    assert len(plan.chunks) == 3
    bench.half.report(None, [request.request_id], ())
    request.num_computed_tokens = 192
    bench.allocate(request, 0)
    plan = bench.compute(request, 64)
    assert len(plan.stores) == 1
    bench.acknowledge(plan)
    bench.half.finished(request.request_id)
    assert bench.leaks() == []


def test_allocation_fails_and_is_tried_again(bench: Bench) -> None:
    """Between its lookups the request holds what was promised, whatever is evicted meanwhile."""
    bench.store(256)
    request = Request(256)
    assert bench.half.matched(request, 0) == (255, True)
    bench.cache.clear_memory()
    for file in Path(bench.cache.pool.directory or "").glob("*.kv"):
        file.unlink()
    for _ in range(3):
        assert bench.half.matched(request, 0) == (255, True)
        assert bench.step() is IDLE
    bench.allocate(request, 255)
    plan = bench.step()
    assert len(plan.chunks) == 4
    assert plan.failed == []
    bench.half.report(None, [request.request_id], ())
    bench.half.finished(request.request_id)
    assert bench.leaks() == []


def test_aborted_between_lookup_and_allocation(bench: Bench) -> None:
    bench.store(256)
    bench.cache.clear_memory()
    bench.cache.pool.polls_pending = 1_000_000
    request = Request(256)
    assert bench.half.matched(request, 0) == (None, False)
    bench.half.finished(request.request_id)
    assert bench.leaks() == []
    assert bench.step() is IDLE


def test_reset_with_a_load_and_stores_under_way(bench: Bench) -> None:
    bench.store(256)
    loading, storing = Request(256), Request(256)
    storing.block_hashes = [bytes([100 + i]) * 32 for i in range(8)]
    bench.half.matched(loading, 0)
    bench.allocate(loading, 255)
    bench.allocate(storing, 0)
    begun = bench.compute(storing, 200)
    assert len(begun.stores) == 3
    assert bench.half.reset()
    plan = bench.step(storing, 56)
    # The load's bytes are of the old weights; the rest of the prompt is not saved as of the new.
    assert plan.failed == [begun.loads[0][0]]
    assert plan.stores == []
    bench.acknowledge(begun)
    bench.half.report(None, [loading.request_id], [loading.request_id])
    assert not bench.half.pending_stores()
    for request in (loading, storing):
        assert bench.half.matched(request, 0) == (0, False)
        bench.half.finished(request.request_id)
    assert bench.leaks() == []
    later = Request(256)
    later.block_hashes = storing.block_hashes
    assert bench.half.matched(later, 0) == (0, False)


def test_a_failed_load_reports_once_and_ends(bench: Bench) -> None:
    """Every failure path ends in one failed load, also when several come together."""
    bench.store(256)
    request = Request(256)
    bench.half.matched(request, 0)
    bench.allocate(request, 255)
    bench.half.fail_load(request.request_id)
    bench.half.fail_load(request.request_id)
    bench.half.reset()
    plan = bench.step()
    assert len(plan.failed) == len(plan.loads) == 1
    assert bench.step() is IDLE
