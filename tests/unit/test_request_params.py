"""What a client says of one request: whether it is stored, whether it is loaded."""

from __future__ import annotations

import reprlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fakes import core as fake

pytest.importorskip("vllm")

from fakes import hybrid_scheduler as hybrid
from fakes.scheduler import Bench, Request
from lakecache import _request_params
from lakecache._objects import KIND_CHUNK, KIND_TAIL

NOT_STORED: dict[str, Any] = {"lakecache.store": False}
NOT_LOADED: dict[str, Any] = {"lakecache.load": False}
COUNTERS = ("requests_not_stored", "requests_not_loaded", "params_refused")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    fake.pools.clear()
    return Bench(monkeypatch, tmp_path, load_policy="always", save_decode=True)


@pytest.fixture
def hybrid_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> hybrid.Bench:
    fake.pools.clear()
    return hybrid.Bench(monkeypatch, tmp_path, load_policy="always", save_decode=True)


def counted(bench: Bench) -> tuple[int, ...]:
    return tuple(bench.half.total(name) for name in COUNTERS)


def run(bench: Bench, request: Any, **more: Any) -> tuple[int, list[int]]:
    """Compute a request's prompt; gives its hit, and the kinds of what is stored of it."""
    hit = bench.half.matched(request, 0)[0]
    assert hit is not None
    bench.allocate(request, hit)
    plan = bench.compute(request, request.num_tokens, **more)
    bench.acknowledge(plan)
    bench.half.report(None, [request.request_id], ())
    return hit, [kind for _, kind, *_ in plan.stores]


def test_nothing_is_stored_of_a_request_that_says_so(bench: Bench) -> None:
    request = Request(256, kv_transfer_params=NOT_STORED)
    assert run(bench, request) == (0, [])
    # Nor of what it generates, nor after it was preempted.
    request.num_tokens += 64
    request.block_hashes += [bytes([20 + number]) * 32 for number in range(2)]
    assert not bench.compute(request, 64).stores
    request.num_computed_tokens = 0
    assert bench.half.matched(request, 0) == (0, False)
    bench.allocate(request, 0)
    assert not bench.compute(request, 320).stores
    bench.half.finished(request.request_id)
    assert not bench.cache.pool.slots
    assert bench.leaks() == []
    assert counted(bench) == (1, 0, 0)
    # Another one with the same prompt is stored.
    bench.store(256)
    assert len(bench.cache.pool.slots) == 4


def test_it_loads_and_refreshes_what_others_stored(bench: Bench) -> None:
    bench.store(128)
    bench.cache.pool.touched.clear()
    assert run(bench, Request(256, kv_transfer_params=NOT_STORED)) == (128, [])
    assert len(bench.cache.pool.touched) == 2
    # In the GPU as a whole.
    bench.cache.pool.touched.clear()
    request = Request(128, kv_transfer_params=NOT_STORED)
    assert bench.half.matched(request, 127) == (0, False)
    bench.allocate(request, 0)
    assert len(bench.cache.pool.touched) == 2


def test_it_brings_nothing_into_memory_that_is_on_disk(bench: Bench) -> None:
    bench.store(256)
    bench.cache.clear_memory()
    both = NOT_STORED | NOT_LOADED
    assert run(bench, Request(256, kv_transfer_params=both)) == (0, [])
    assert not bench.cache.pool.slots
    assert run(bench, Request(256, kv_transfer_params=NOT_LOADED)) == (0, [KIND_CHUNK] * 4)


def test_nothing_is_stored_anew_after_a_load_that_failed(bench: Bench) -> None:
    bench.store(256)
    request = Request(256, kv_transfer_params=NOT_STORED)
    assert bench.half.matched(request, 0) == (255, True)
    bench.allocate(request, 255)
    bench.step()
    bench.half.report(None, [request.request_id], [request.request_id])
    bench.cache.clear_memory()
    for file in Path(bench.cache.pool.directory or "").glob("*.kv"):
        file.unlink()
    assert run(bench, request) == (0, [])


def test_nothing_is_loaded_for_a_request_that_says_so(bench: Bench) -> None:
    bench.store(256)
    request = Request(256, kv_transfer_params=NOT_LOADED)
    for _ in range(2):
        assert bench.half.matched(request, 0) == (0, False)
    bench.allocate(request, 0)
    assert bench.step().loads == []
    bench.half.finished(request.request_id)
    assert bench.leaks() == []
    assert counted(bench) == (0, 1, 0)
    assert bench.half.matched(Request(256), 0) == (255, True)


def test_no_state_of_a_hybrid(hybrid_bench: hybrid.Bench) -> None:
    bench = hybrid_bench
    request = hybrid.Request(90, kv_transfer_params=NOT_STORED, shared_prefix_boundary=40)
    # A junction, a state at the end of a block, and a tail.
    assert run(bench, request, offers=(32, 64, 80)) == (0, [])
    # The state that vLLM hands over as the request ends.
    request.num_tokens += 16
    request.block_hashes.append(bytes([99]) * 32)
    bench.compute(request, 16)
    bench.half.finished_tail(request, hybrid.TABLES, hybrid.entries(96))
    bench.finish(request)
    assert not bench.compute(hybrid.Request(1), 1).stores
    assert not bench.cache.pool.slots
    assert bench.leaks() == []
    assert bench.half.total("states_dropped") == 0
    assert bench.store(90, 80) == [KIND_CHUNK, KIND_CHUNK, KIND_TAIL]
    assert bench.hit(90) == 80
    request = hybrid.Request(90, kv_transfer_params=NOT_LOADED)
    assert bench.half.matched(request, 0) == (0, False)


@pytest.mark.parametrize(
    ("params", "stored", "loaded"),
    [
        (None, True, True),
        ({}, True, True),
        ({"lakecache.store": True, "lakecache.load": True}, True, True),
        # Another connector's.
        ({"do_remote_prefill": False, "max_offload_tokens": 0, 7: 8}, True, True),
        ({"max_offload_tokens": 0, **NOT_STORED}, False, True),
        (NOT_STORED | NOT_LOADED, False, False),
    ],
)  # fmt: skip
def test_what_is_understood_is_not_warned_of(
    bench: Bench, warnings: pytest.LogCaptureFixture, params: Any, stored: bool, loaded: bool
) -> None:
    tracked = bench.half._track(Request(64, kv_transfer_params=params))  # type: ignore[arg-type]
    assert (tracked.stores, tracked.loads) == (stored, loaded)
    assert counted(bench) == (not stored, not loaded, 0)
    assert not warnings.records


@pytest.mark.parametrize(
    ("params", "stored", "loaded", "named"),
    [
        *[
            ({"lakecache.store": value}, False, True, f"'lakecache.store' with value {value!r}")
            for value in (None, 0, 1, "true", "false", 1.0, [], [True], {})
        ],
        ({"lakecache.load": "no"}, True, False, "'lakecache.load' with value 'no'"),
        ({"lakecache.stored": True}, False, True, "'lakecache.stored' with value True"),
        ({"lakecache": {"store": False}}, False, True, "'lakecache' with value {'store': False}"),
        ({"LakeCache.store": False}, False, True, "'LakeCache.store' with value False"),
        ({"lakecache_store": False}, False, True, "'lakecache_store' with value False"),
        ({b"lakecache.store": False}, False, True, "b'lakecache.store' with value False"),
        ({"lakecache.x": 1, "lakecache.store": True}, False, True, "'lakecache.x' with value 1"),
        ({"lakecache.store": True, "lakecache.x": 1}, False, True, "'lakecache.x' with value 1"),
        (["lakecache.store"], False, True, "kv_transfer_params is ['lakecache.store']"),
        ('{"lakecache.store": false}', False, True, "kv_transfer_params is "),
        (False, False, True, "kv_transfer_params is False"),
    ],
)  # fmt: skip
def test_what_is_not_understood_means_no(
    bench: Bench,
    warnings: pytest.LogCaptureFixture,
    params: Any,
    stored: bool,
    loaded: bool,
    named: str,
) -> None:
    request = Request(128, kv_transfer_params=params)
    bench.store(64)
    hit, kinds = run(bench, request)
    assert (hit, len(kinds)) == (64 * loaded, stored)
    bench.half.finished(request.request_id)
    assert bench.leaks() == []
    assert counted(bench) == (not stored, not loaded, 1)
    said = [record.getMessage() for record in warnings.records]
    assert len(said) == 1
    assert f"request {request.request_id!r}: " in said[0]
    assert named in said[0]
    assert "allowed are lakecache.store and lakecache.load, each true or false" in said[0]
    assert said[0].endswith(f"The request is not {'loaded' if stored else 'stored'}.")


def test_clients_cannot_fill_the_log(
    bench: Bench, warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = {f"lakecache.{number}\n": "x" * 10_000 for number in range(500)}
    shown = []

    def show(value: Any) -> str:
        shown.append(value)
        return reprlib.repr(value)

    monkeypatch.setattr(_request_params, "reprlib", SimpleNamespace(repr=show))
    for _ in range(3):
        run(bench, Request(64, kv_transfer_params=many))
    monkeypatch.setattr(_request_params, "WARN_SECONDS", 0.0)
    run(bench, Request(64, kv_transfer_params=many))
    first, second = [record.getMessage() for record in warnings.records]
    assert "(and 499 more)" in first
    assert second.endswith("2 such requests since the last warning.")
    assert "\n" not in first + second
    assert len(first + second) < 1000
    assert counted(bench) == (4, 0, 4)
    # Of two warnings: a client's parameters, of which there may be a million, hold up no step.
    assert len(shown) == 4


def test_a_request_whose_parameters_cannot_be_read_is_not_stored(bench: Bench) -> None:
    class Key:
        def __str__(self) -> str:
            raise ValueError("no text")

    request = Request(128, kv_transfer_params={Key(): 1})
    # The connector answers such errors as a miss.
    for _ in range(2):
        with pytest.raises(ValueError, match="no text"):
            bench.half.matched(request, 0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no text"):
            bench.allocate(request, 0)
    assert not bench.compute(request, 128).stores
    bench.half.finished(request.request_id)
    assert bench.leaks() == []
