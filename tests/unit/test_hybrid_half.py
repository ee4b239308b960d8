"""The scheduler half for hybrid models against a stand-in cache: checkpoints, offers, admission."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from fakes import core as fake

pytest.importorskip("vllm")

from fakes.hybrid_scheduler import (
    BLOCK,
    STATES,
    TABLES,
    UNIT,
    Bench,
    Request,
    entries,
)
from lakecache import _backlog, _scheduler
from lakecache._metadata import WorkerReport
from lakecache._objects import KEY_BYTES, KIND_CHUNK, KIND_STATE, KIND_TAIL, Geometry


def ids(blob: bytes) -> list[int]:
    return list(array("i", blob))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Bench]:
    def build(**extra: Any) -> Bench:
        fake.pools.clear()
        return Bench(monkeypatch, tmp_path, load_policy="always", **extra)

    return build


@pytest.fixture
def bench(make: Callable[..., Bench]) -> Bench:
    return make()


def test_chunks_and_the_state_inside_of_a_block(bench: Bench) -> None:
    assert bench.store(90, 80) == [KIND_CHUNK, KIND_CHUNK, KIND_TAIL]
    request = Request(90)
    assert bench.half.matched(request, 0) == (80, True)
    assert bench.half.matched(request, 0) == (80, True)
    bench.allocate(request, 80)
    plan = bench.step()
    assert [(count, name) for _, name, count in plan.loads] == [(3, request.request_id)]
    assert [(kind, ids(blob)) for _, _, kind, _, _, blob in plan.chunks] == [
        (KIND_CHUNK, [1]), (KIND_CHUNK, [2]), (KIND_TAIL, [103, 203, 3]),
    ]  # fmt: skip
    copied = {(plan.loads[0][0], index): 1 for index in range(3)}
    bench.half.report(WorkerReport({}, copied), [request.request_id], ())
    bench.finish(request)
    assert bench.leaks() == []


def test_a_state_at_the_end_of_a_block_brings_no_pages(bench: Bench) -> None:
    assert bench.store(70, 64) == [KIND_CHUNK, KIND_CHUNK, KIND_STATE]
    request = Request(70)
    assert bench.half.matched(request, 0) == (64, True)
    bench.allocate(request, 64)
    plan = bench.step()
    assert [(kind, ids(blob)) for _, _, kind, _, _, blob in plan.chunks] == [
        (KIND_CHUNK, [1]), (KIND_CHUNK, [2]), (KIND_STATE, [102, 202]),
    ]  # fmt: skip


class LongBlocks(Bench):
    """Blocks of 96 tokens in units of 8: tails of 16, 32, 48, 64, 80 and 96 tokens."""

    geometry = Geometry(96, 96, 8)
    part_bytes: ClassVar[dict[int, int]] = {
        KIND_CHUNK: 96, KIND_STATE: 128, **{KIND_TAIL + n: 128 + 16 * (n + 1) for n in range(6)}
    }  # fmt: skip


@pytest.mark.parametrize(
    ("boundary", "number", "rest"),
    [(8, 0, True), (16, 0, True), (24, 1, True), (80, 4, True), (88, 5, False),
     (96, None, False), (96 + 56, 3, True)],
)  # fmt: skip
def test_a_tail_is_cut_behind_its_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, boundary: int, number: int | None, rest: bool
) -> None:
    fake.pools.clear()
    bench = LongBlocks(monkeypatch, tmp_path, load_policy="always")
    tables = ([101, 102], [1, 2], [201, 202])
    reserved, reserve = [], bench.cache.reserve

    def note(number: int, key: bytes, kind: int, *rest: Any) -> Any:
        reserved.append((number, key, kind, rest[-1]))
        return reserve(number, key, kind, *rest)

    monkeypatch.setattr(bench.cache, "reserve", note)
    hashes = [bytes([i]) * 32 for i in range(20)]

    def request() -> Any:
        return Request(boundary + 5, block_hashes=hashes[: (boundary + 5) // 8])

    def leaves_rest(one: Any) -> bool:
        return bench.half.leaves_rest(one)

    first = request()
    assert not leaves_rest(first)
    assert bench.half.matched(first, 0) == (0, False)
    assert not leaves_rest(first)
    bench.allocate(first, 0)
    offers = [(group, tables[group][(boundary - 1) // 96], boundary) for group in STATES]
    bench.step(first, boundary + 5, tables=tables)
    bench.half.stats()
    bench.half.finished_tail(first, tables, offers)
    bench.finish(first)
    plan = bench.half.plan_rest()
    shape = KIND_STATE if number is None else KIND_TAIL + number
    assert sorted(one for _, one, *_ in plan.stores) == [KIND_CHUNK] * (boundary // 96) + [shape]
    # The key and the file's header know only that it is a tail.
    slot = bench.cache.pool.slots[next(e for _, one, e, *_ in plan.stores if one == shape)]
    space = bench.half.spaces.of(None)
    assert space is not None
    kind, hashed = min(shape, KIND_TAIL), hashes[boundary // 8 - 1]
    assert slot.key == fake.derive_keys(space.digest, kind, [hashed])
    assert reserved[-1][2:] == (kind, bench.part_bytes[shape])
    bench.acknowledge(plan)
    second = request()
    assert bench.half.matched(second, 0) == (boundary, True)
    assert leaves_rest(second) == rest
    blocks = SimpleNamespace(get_block_ids=lambda: tables)
    bench.half.allocated(second, blocks, boundary)  # type: ignore[arg-type]
    (*_, last) = bench.step().chunks
    assert last[2] == shape
    bench.finish(second)


def test_what_the_gpu_holds_is_not_loaded(bench: Bench) -> None:
    bench.store(90, 80)
    request = Request(90)
    assert bench.half.matched(request, 32) == (48, True)
    bench.allocate(request, 48)
    plan = bench.step()
    assert [(kind, ids(blob)) for _, _, kind, _, _, blob in plan.chunks] == [
        (KIND_CHUNK, [2]), (KIND_TAIL, [103, 203, 3]),
    ]  # fmt: skip
    assert bench.hit(90, 64) == 16
    assert bench.hit(90, 96) == 0
    # Not after part of a block, from where the chunks of a state are miscounted.
    assert bench.hit(90, 48) == 0


def test_a_state_serves_only_longer_prompts(bench: Bench) -> None:
    bench.store(90, 80)
    bench.store(50, 48)
    # The state of exactly these tokens has consumed the last one already.
    assert bench.hit(80) == 48
    assert bench.hit(81) == 80
    assert bench.hit(48) == 0


def test_no_state_without_its_chunks(bench: Bench) -> None:
    bench.store(90, 80)
    bench.store(50, 48)
    bench.drop(KIND_CHUNK, 64)
    assert bench.hit(90) == 48
    bench.drop(KIND_CHUNK, 32)
    assert bench.hit(90) == 0
    bench.store(90, 80)
    assert bench.hit(90) == 80


def test_a_prompt_within_the_first_block_needs_no_chunk(bench: Bench) -> None:
    assert bench.store(30, 16) == [KIND_TAIL]
    assert bench.hit(30) == 16


def test_only_the_last_boundary_is_kept(bench: Bench) -> None:
    assert bench.store(90, 32, 64, 80).count(KIND_STATE) == 0
    assert bench.hit(70) == 0
    assert bench.hit(81) == 80


def test_junctions_are_kept(bench: Bench) -> None:
    # vLLM saw that another prompt parts from this one at 40, and stops at the block before.
    kinds = bench.store(90, 32, 64, 80, shared_prefix_boundary=40)
    assert kinds == [KIND_CHUNK, KIND_CHUNK, KIND_STATE, KIND_TAIL]
    assert bench.hit(40) == 32


def test_the_store_sees_where_prompts_part(bench: Bench) -> None:
    bench.store(150, 144)
    other = Request(150)
    # The same up to 96 tokens and a bit.
    other.block_hashes[6:] = [bytes([9, i]) * 16 for i in range(3)]
    assert bench.half.matched(other, 0) == (0, False)
    assert other.shared_prefix_boundary == 96
    # The scheduler looks anew in each step, and forgets what we said.
    other.shared_prefix_boundary = 0
    assert bench.half.matched(other, 64) == (0, False)
    assert other.shared_prefix_boundary == 96
    # What vLLM itself saw further on stays.
    other.shared_prefix_boundary = 128
    assert bench.half.matched(other, 0) == (0, False)
    assert other.shared_prefix_boundary == 128
    bench.finish(other)
    # With a state of its own there, or where the prompt ends anyway, there is none to add.
    for tokens in (150, 100):
        same = Request(tokens)
        bench.half.matched(same, 0)
        assert same.shared_prefix_boundary == 0
        bench.finish(same)
    assert bench.leaks() == []


@pytest.mark.parametrize(("apart", "kept"), [(32, [32, 64, 80]), (33, [64, 80]), (200, [80])])
def test_further_ones_lie_apart(make: Callable[..., Bench], apart: int, kept: list[int]) -> None:
    bench = make(checkpoint_tokens=apart)
    bench.store(90, 32, 64, 80)
    assert [end for end in (32, 64, 80) if bench.hit(end + 1) == end] == kept


def test_states_of_answers_are_not_kept(make: Callable[..., Bench]) -> None:
    bench = make()
    assert bench.store(40, 64, num_prompt_tokens=30) == []
    assert bench.half.pending_stores() is False
    bench = make(save_decode=True)
    assert KIND_STATE in bench.store(70, 64, num_prompt_tokens=30)


def test_with_a_drafter_the_last_boundary_is_a_unit_earlier(bench: Bench) -> None:
    bench.half.boundaries.drops_block = True
    assert bench.store(90, 64) == [KIND_CHUNK, KIND_CHUNK, KIND_STATE]
    assert bench.hit(90) == 64


def test_blocks_are_pinned_until_all_have_copied(bench: Bench) -> None:
    request = bench.begin(90)
    plan = bench.compute(request, 90, offers=(80,))
    pinned = {block.block_id for block in bench.pool.blocks if block.ref_cnt}
    assert pinned == {1, 2, 3, 103, 203}
    bench.finish(request)
    assert bench.half.pending_stores()
    bench.acknowledge(plan)
    assert not bench.half.pending_stores()
    assert bench.leaks() == []


def test_copies_of_a_state_begin_behind_the_token_of_its_step(bench: Bench) -> None:
    request = bench.begin(90)
    plans = [bench.step(request, 90, (80,)), bench.step(), bench.step()]
    kinds = [sorted(kind for _, kind, *_ in plan.stores) for plan in plans]
    assert kinds == [[], [], [KIND_CHUNK, KIND_CHUNK, KIND_TAIL]]
    bench.acknowledge(plans[-1])
    bench.finish(request)
    assert bench.leaks() == []


def test_a_state_that_is_there_is_not_stored_again(bench: Bench) -> None:
    bench.store(90, 80)
    # vLLM offers again what was just loaded.
    assert bench.store(90, 80) == []
    one, other = bench.begin(120, seed=1), bench.begin(120, seed=1)
    bench.step(one, 120, (112,))
    first = bench.compute(other, 120, offers=(112,))
    assert sorted(kind for _, kind, *_ in first.stores) == [*[KIND_CHUNK] * 3, KIND_TAIL]
    bench.acknowledge(first)
    for request in (one, other):
        bench.finish(request)
    bench.step()
    assert bench.leaks() == []


def test_a_checkpoint_computed_although_it_is_on_disk_goes_into_memory(bench: Bench) -> None:
    def compute() -> list[int]:
        request = Request(90)
        assert bench.half.matched(request, 0) == (80, True)
        bench.allocate(request, 0)
        plan = bench.compute(request, 90, offers=(80,))
        bench.acknowledge(plan)
        bench.finish(request)
        return sorted(kind for _, kind, *_ in plan.stores)

    bench.store(90, 80)
    assert compute() == []
    bench.cache.clear_memory()
    assert compute() == [KIND_CHUNK, KIND_CHUNK, KIND_TAIL]
    # The state alone is missing.
    bench.cache.pool.drop(bench.cache.pool.by_key[bench.key(KIND_TAIL, 80)])
    assert compute() == [KIND_TAIL]
    assert compute() == []
    assert bench.leaks() == []


def test_a_block_that_a_state_has_the_beginning_of_goes_into_memory_once_it_is_full(
    bench: Bench,
) -> None:
    bench.store(90, 80)
    bench.store(140, 128)
    bench.drop(KIND_STATE, 128)
    bench.cache.clear_memory()
    # All that is left is on disk: the state, inside of the third block, and four chunks.
    request = bench.begin(140)
    bench.step()
    bench.half.report(None, [request.request_id], ())
    request.num_computed_tokens = 80
    plan = bench.compute(request, 60, offers=(128,))
    assert sorted(kind for _, kind, *_ in plan.stores) == [KIND_CHUNK, KIND_CHUNK, KIND_STATE]
    bench.acknowledge(plan)
    bench.finish(request)
    assert bench.cache.lookup(bench.half.keys.chunks(bench.half._track(request)))[1] == 4
    bench.finish(request)
    assert bench.leaks() == []


def test_the_rest_is_planned_at_the_end(bench: Bench) -> None:
    request = bench.begin(90)
    bench.step(request, 90, (80,))
    bench.half.stats()
    bench.finish(request)
    plan = bench.half.plan_rest()
    assert sorted(kind for _, kind, *_ in plan.stores) == [KIND_CHUNK, KIND_CHUNK, KIND_TAIL]
    bench.acknowledge(plan)
    assert bench.hit(90) == 80
    assert bench.leaks() == []


def test_the_rest_of_a_step_that_does_not_come_back_is_given_up(bench: Bench) -> None:
    request = bench.begin(90)
    bench.step(request, 90, (64,))
    bench.half.finished_tail(request, TABLES, entries(80))
    bench.finish(request)
    assert bench.half.plan_rest().stores == []
    assert bench.leaks() == []


def test_half_an_offer_is_refused(bench: Bench) -> None:
    request = bench.begin(90)
    table = (TABLES[0], TABLES[1][:2], TABLES[2])
    # The page that the state needs is not in the table any more.
    plan = bench.step(request, 90, (80,), tables=table)
    assert KIND_TAIL not in [kind for _, kind, *_ in plan.stores]
    assert bench.half.total("states_dropped") == 1


def test_a_state_waits_for_room_and_is_then_given_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = bench.begin(90)
    bench.cache.pool.refuse_reserve = True
    bench.step(request, 90, (80,))
    bench.step(request, 1)
    assert bench.half.total("stores_put_off") == 1
    bench.cache.pool.refuse_reserve = False
    plan = bench.step(request, 1)
    assert sorted(kind for _, kind, *_ in plan.stores) == [KIND_CHUNK, KIND_CHUNK, KIND_TAIL]
    bench.acknowledge(plan)
    bench.finish(request)
    # Now for ever: the chunks are given up, and the state would have no use without them.
    request = bench.begin(90, seed=2)
    bench.cache.pool.refuse_reserve = True
    bench.compute(request, 90, offers=(80,))
    bench.finish(request)
    bench.step()
    assert bench.half.pending_stores()
    monkeypatch.setattr(_backlog, "PUT_OFF_SECONDS", 0.0)
    bench.step()
    assert bench.half.total("stores_dropped") == bench.half.total("states_dropped") == 1
    assert bench.leaks() == []


def test_no_chunks_are_stored_that_no_state_needs(bench: Bench) -> None:
    # 64 tokens are two blocks, but the last state of such a prompt is at 48.
    assert bench.store(64, 48) == [KIND_CHUNK, KIND_TAIL]


def test_the_state_of_a_request_that_ends(bench: Bench) -> None:
    request = bench.begin(90)
    bench.acknowledge(bench.compute(request, 80))
    bench.half.finished_tail(request, TABLES, entries(80))
    bench.finish(request)
    assert bench.half.pending_stores()
    plan = bench.step()
    # The workers must know first where the work ends that made the state.
    assert plan.pinned
    assert plan.stores == []
    plan = bench.step()
    assert not plan.pinned
    assert [kind for _, kind, *_ in plan.stores] == [KIND_TAIL]
    bench.acknowledge(plan)
    assert bench.hit(90) == 80
    assert bench.leaks() == []


def test_a_failed_load_is_computed_in_the_end(bench: Bench) -> None:
    bench.store(90, 80)
    request = Request(90)
    for _ in range(_scheduler.LOAD_ATTEMPTS):
        assert bench.half.matched(request, 0) == (80, True)
        bench.allocate(request, 80)
        bench.step()
        bench.half.report(None, [request.request_id], [request.request_id])
    assert bench.half.matched(request, 0) == (0, False)
    bench.finish(request)
    assert bench.leaks() == []


def test_another_number_than_promised_fails_the_load(bench: Bench) -> None:
    bench.store(90, 80)
    request = Request(90)
    assert bench.half.matched(request, 0) == (80, True)
    bench.allocate(request, 64)
    plan = bench.step()
    assert plan.failed == [plan.loads[0][0]]
    bench.half.report(None, [request.request_id], [request.request_id])
    bench.finish(request)
    assert bench.leaks() == []


def test_an_incomplete_lease_is_a_miss(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.store(90, 80)
    bench.cache.clear_memory()
    bench.cache.pool.polls_pending = 1 << 30
    monkeypatch.setattr(_scheduler, "OPEN_SECONDS", 0.0)
    assert bench.hit(90) == 0
    assert bench.leaks() == []


def test_waits_while_files_are_opened(bench: Bench) -> None:
    bench.store(90, 80)
    bench.cache.clear_memory()
    bench.cache.pool.polls_pending = 1
    request = Request(90)
    assert bench.half.matched(request, 0) == (None, False)
    assert bench.half.matched(request, 0) == (80, True)
    bench.finish(request)
    assert bench.leaks() == []


def test_a_state_that_is_continued_ages(bench: Bench) -> None:
    """In a chat each turn continues the last one's state, which nobody reads again."""
    bench.store(90, 80)
    bench.touched()

    def turn(tokens: int) -> set[tuple[int, int]]:
        request = bench.begin(tokens)
        found = bench.touched()
        bench.half.report(None, [request.request_id], ())
        bench.finish(request)
        return found

    chunks = {(KIND_CHUNK, 32), (KIND_CHUNK, 64)}
    assert turn(200) == chunks
    # A second hit shows that more than one prompt continues it.
    assert turn(220) == chunks | {(KIND_TAIL, 80)}
    assert turn(90) == chunks | {(KIND_TAIL, 80)}


def test_a_chunk_left_behind_a_lost_one_is_refreshed(bench: Bench) -> None:
    """Else it would go before the state that is stored for it now."""
    bench.store(90, 80)
    bench.drop(KIND_TAIL, 80)
    bench.drop(KIND_CHUNK, 32)
    bench.touched()
    assert bench.store(90, 80) == [KIND_CHUNK, KIND_TAIL]
    assert (KIND_CHUNK, 64) in bench.touched()


def test_the_same_prompt_again_refreshes_its_state(bench: Bench) -> None:
    bench.store(90, 80)
    bench.touched()
    bench.begin(90)
    assert (KIND_TAIL, 80) in bench.touched()


def test_reset_lets_go_of_offers(bench: Bench) -> None:
    request = bench.begin(90)
    bench.cache.pool.refuse_reserve = True
    bench.step(request, 90, (80,))
    assert bench.half.reset()
    bench.finish(request)
    assert bench.leaks() == []


def test_the_faster_checkpoint_is_taken(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.store(90, 32, 80, shared_prefix_boundary=32)
    asked: list[Any] = []

    def decide(hit: Any) -> int:
        asked.append(hit)
        return answers.pop(0)

    bench.half.policy = SimpleNamespace(  # type: ignore[assignment]
        decide=decide, clock=SimpleNamespace(planned=lambda _: None),
        load_started=lambda *_, **__: None, load_ended=lambda *_, **__: None,
    )  # fmt: skip
    answers = [2, 1, 0]
    assert [bench.hit(90) for _ in range(3)] == [80, 32, 0]
    hit = asked[0]
    assert (hit.tokens, hit.local, list(hit.ends)) == (90, 0, [32, 80])
    assert list(hit.memory) == [64 + 128, 2 * 64 + 192]
    assert list(hit.disk) == [0, 0]
    # vLLM ends steps at block boundaries, and at the last of all.
    assert [list(hit.stops(begin)) for begin in (0, 32, 80)] == [
        [0, 64, 80], [32, 64, 80], [64, 80, 96],
    ]  # fmt: skip
    bench.cache.clear_memory()
    answers = [2]
    request = Request(90)
    assert bench.half.matched(request, 0)[0] == 80
    # Asked again, it has its answer.
    assert bench.half.matched(request, 0)[0] == 80
    assert list(asked[-1].disk) == [64 + 128, 2 * 64 + 192]
    bench.finish(request)
    assert bench.leaks() == []


@pytest.mark.parametrize(("stored", "made"), [((), 1), ((64,), 3), ((256,), 8)])
def test_no_keys_of_states_are_made_beyond_the_chunks_that_are_there(
    bench: Bench, stored: tuple[int, ...], made: int
) -> None:
    for tokens in stored:
        bench.store(tokens + 1, tokens)
    request = Request(256)
    bench.half.matched(request, 0)
    per_block = BLOCK // UNIT
    tracked = bench.half._tracked[request.request_id]
    assert len(tracked.states) // KEY_BYTES == min(made * per_block - 1, 255 // UNIT)


def test_keys_of_states_are_made_once_and_extended(bench: Bench) -> None:
    request = Request(150)
    tracked = bench.half._track(request)  # type: ignore[arg-type]
    request.block_hashes, rest = request.block_hashes[:4], request.block_hashes[4:]
    bench.half.keys.chunks(tracked)
    some = bench.half.keys.states(tracked, 0, 99)
    request.block_hashes = request.block_hashes + rest
    few = bench.half.keys.states(tracked, 0, 6)
    every = bench.half.keys.states(tracked, 0, 99)
    assert len(few) == 6 * KEY_BYTES
    assert every[: len(few)] == few
    assert bench.half.keys.states(tracked, 0, 3) == every[: 3 * KEY_BYTES]
    assert every[: len(some)] == some
    for begin in (1, 2, 5):
        assert bench.half.keys.states(tracked, begin, 99) == every[begin * KEY_BYTES :]
    for index in range(len(every) // KEY_BYTES):
        tokens = (index + 1) * UNIT
        kind = KIND_TAIL if tokens % BLOCK else KIND_STATE
        one = every[index * KEY_BYTES : (index + 1) * KEY_BYTES]
        assert one == bench.key(kind, tokens) == bench.half.keys.state(tracked, tokens)
