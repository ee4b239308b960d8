"""What vLLM's `MultiConnector` passes on, or does not: handshakes, and others' failures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fakes import core as fake

pytest.importorskip("vllm")

from fakes.scheduler import CHUNK, Bench, Request
from lakecache import connector as module
from lakecache._metadata import Handshake, WorkerReport
from lakecache.connector import LakeCacheConnector


class Worker:
    """A worker half of one rank, with nothing but a handshake."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.report: WorkerReport | None = None

    def handshake(self) -> Handshake:
        return Handshake("pool", {}, "{}", worker=f"rank {self.rank}")

    def report_handshake(self, told: Handshake) -> None:
        self.report = WorkerReport(handshakes={(0, self.rank): told})

    def take_report(self) -> WorkerReport | None:
        report, self.report = self.report, None
        return report


class Scheduler:
    """A scheduler half that notes whom it meets."""

    def __init__(self) -> None:
        self.declined: str | None = None
        self.met: list[Any] = []

    def handshake(self, workers: dict[Any, Any]) -> None:
        self.met.append(workers)
        self.declined = next((one.declined for one in workers.values()), None)

    def report(self, *report: Any) -> None:
        """Take nothing."""


def connector(**half: Any) -> Any:
    made = LakeCacheConnector.__new__(LakeCacheConnector)
    made.errors, made._workers, made._told = 0, [], False
    made.scheduler = made.worker = None
    vars(made).update(half)
    return made


def wrapped(monkeypatch: pytest.MonkeyPatch, *children: Any, policy: str = "recompute") -> None:
    whole = SimpleNamespace(
        sub_connectors=children,
        _kv_transfer_config=SimpleNamespace(kv_load_failure_policy=policy),
    )
    monkeypatch.setattr(module, "_outermost", lambda _: whole)


def output(report: WorkerReport) -> Any:
    return SimpleNamespace(
        kv_connector_worker_meta=report, finished_recving=None, failed_recving=set(),
        invalid_block_ids=set(),
    )  # fmt: skip


@pytest.mark.parametrize("asked", [True, False])
def test_beside_another_handshake_ours_comes_with_the_first_reports(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the other one comes first, vLLM does not even ask for ours."""
    other = SimpleNamespace(get_handshake_metadata=lambda: "another's")
    reports = []
    for rank in range(2):
        ours = connector(worker=Worker(rank))
        wrapped(monkeypatch, ours, other, policy="fail")
        if asked:
            assert ours.get_handshake_metadata() is None
        reports.append(ours.build_connector_worker_meta())
        assert ours.build_connector_worker_meta() is None
    half = Scheduler()
    leading = connector(scheduler=half)
    leading.set_xfer_handshake_metadata_pp_aware({(0, 0): "another's", (0, 1): "another's"})
    assert half.met == []
    both = reports[0].aggregate(reports[1])
    for _ in range(2):
        leading.update_connector_output(output(both))
    (met,) = half.met
    assert leading._workers == [met[0, 0].worker, met[0, 1].worker] == ["rank 0", "rank 1"]
    # vLLM reads it beside MultiConnector's name, not in our entry.
    assert met[0, 1].failure_policy == "fail"
    assert leading.errors == 0


def test_alone_or_beside_none_it_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(get_handshake_metadata=lambda: None)
    for others in ((), (other,)):
        ours = connector(worker=Worker(0))
        wrapped(monkeypatch, *others, ours)
        assert ours.get_handshake_metadata().worker == "rank 0"
        assert ours.build_connector_worker_meta() is None


def test_two_entries_are_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = connector(worker=Worker(0)), connector(worker=Worker(0))
    wrapped(monkeypatch, first, second)
    told = first.get_handshake_metadata()
    for _ in range(2):
        leading = connector(scheduler=Scheduler())
        leading.set_xfer_handshake_metadata_pp_aware({(0, 0): told})
        leading.update_connector_output(output(second.build_connector_worker_meta()))
        assert len(leading.scheduler.met) == 1
        assert "more than once" in leading.scheduler.declined


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Bench:
    fake.pools.clear()
    return Bench(monkeypatch, tmp_path)


@pytest.mark.parametrize(("policy", "warned"), [("fail", 1), ("recompute", 0)])
def test_a_policy_that_fails_requests_is_warned_of(
    bench: Bench, warnings: pytest.LogCaptureFixture, policy: str, warned: int
) -> None:
    told = Handshake(bench.cache.pool_id, bench.part_bytes, "{}", failure_policy=policy)
    bench.half.handshake({(0, 0): told})
    assert bench.half.declined is None
    said = [one.getMessage() for one in warnings.records if one.levelname == "WARNING"]
    assert len(said) == warned
    assert all(f"kv_load_failure_policy is {policy!r}" in line for line in said)


def test_what_another_one_failed_to_load_is_not_stored(bench: Bench) -> None:
    request = Request(6 * CHUNK)
    bench.half.matched(request, 0)
    bench.allocate(request, 0)
    bench.step(request, request.num_tokens)
    plan = next(plan for plan in (bench.step() for _ in range(3)) if plan.stores)
    assert bench.half.chunk_saver.backlog
    bench.half.distrust()
    assert not bench.half.chunk_saver.backlog
    bench.acknowledge(plan)
    assert bench.half.total("stores_failed") == len(plan.stores)
    assert not bench.pool.pinned()
    keys = bench.half.keys.chunks(bench.half._tracked[request.request_id])
    assert bench.cache.lookup(keys)[0] == 0
    # vLLM computes it again, and from then on it is what it should be.
    request.num_computed_tokens = 0
    plan = bench.compute(request, 3 * CHUNK)
    assert len(plan.stores) == 3
    bench.acknowledge(plan)
    assert bench.cache.lookup(keys)[0] == 3
    bench.half.finished(request.request_id)
    assert bench.leaks() == []


@pytest.mark.parametrize("weights_change", [False, True])
def test_what_was_under_way_is_stored_once_it_is_sure(bench: Bench, weights_change: bool) -> None:
    """Also of a request that has nothing else to store by then, as one that generates."""
    request = Request(2 * CHUNK)
    bench.half.matched(request, 0)
    bench.allocate(request, 0)
    plan = bench.compute(request, request.num_tokens)
    assert len(plan.stores) == 2
    if weights_change:
        bench.half.reset()
    bench.half.distrust()
    bench.acknowledge(plan)
    assert bench.half.total("stores_failed") == 2
    plan = bench.compute(request, 1)
    if weights_change:
        assert not plan.stores
        return
    assert len(plan.stores) == 2
    bench.acknowledge(plan)
    keys = bench.half.keys.chunks(bench.half._tracked[request.request_id])
    assert bench.cache.lookup(keys)[0] == 2
    bench.half.finished(request.request_id)
    assert bench.leaks() == []


def test_nothing_is_stored_where_looking_anew_fails(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [Request(2 * CHUNK, block_hashes=[bytes([at]) * 32] * 4) for at in (1, 2)]
    for request in requests:
        bench.half.matched(request, 0)
        bench.allocate(request, 0)
    for request in requests:
        bench.step(request, request.num_tokens)
    assert len(bench.half.chunk_saver.backlog.runs) == 2
    with monkeypatch.context() as broken:
        broken.setattr(bench.cache, "lookup", lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            bench.half.distrust()
    assert not bench.half.chunk_saver.backlog
