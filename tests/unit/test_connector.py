"""The connector's hooks: whatever happens inside, vLLM gets an answer it can go on with."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorTransferResults,
)

from lakecache._metadata import IDLE, CacheStats, Handshake, StepPlan, WorkerReport
from lakecache._metrics import STORE_COUNTERS, StoreGrowth
from lakecache.connector import CacheConnector, LakeCacheConnector, MiniCacheConnector
from lakecache.errors import ConfigError


class Broken:
    """A half in which everything fails, but for the counters and what reports a failed load."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: list[str] = []
        self.owes = False
        self.declined: str | None = None

    def fail_load(self, request_id: str) -> None:
        self.failed.append(request_id)

    def owes_this_step(self) -> bool:
        return self.owes

    def promised_this_step(self, request_id: str) -> bool:
        return self.owes

    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any, **__: Any) -> Any:
            raise RuntimeError(f"{name} is broken")

        return fail


@pytest.fixture
def broken() -> MiniCacheConnector:
    made = LakeCacheConnector.__new__(LakeCacheConnector)
    made.errors = 0
    made.declined = None
    made._workers, made._told = [], True
    plan = StepPlan()
    plan.loads.append((1, "r", 1))
    made._connector_metadata = plan
    made.scheduler: Any = Broken()
    made.worker: Any = Broken()
    return made


REQUEST: Any = SimpleNamespace(request_id="r")
OUTPUT: Any = SimpleNamespace(
    kv_connector_worker_meta=WorkerReport(), finished_recving={"r"}, failed_recving=set(),
    invalid_block_ids={1},
)  # fmt: skip
HOOKS: list[tuple[str, tuple[Any, ...], Any]] = [
    ("register_kv_caches", ({},), None),
    ("get_handshake_metadata", (), None),
    ("start_load_kv", (None,), None),
    ("wait_for_save", (), None),
    ("get_transfer_results", (set(),), KVConnectorTransferResults()),
    ("build_connector_worker_meta", (), None),
    ("bind_gpu_block_pool", (None,), None),
    ("set_xfer_handshake_metadata_pp_aware", ({},), None),
    ("get_num_new_matched_tokens", (REQUEST, 0), (0, False)),
    ("update_state_after_alloc", (REQUEST, None, 0), None),
    ("get_external_cache_hit_sources", (REQUEST, 64), {}),
    ("build_connector_meta", (None,), IDLE),
    ("update_connector_output", (OUTPUT,), None),
    ("register_finished_partial_tail", (REQUEST, ([],), []), False),
    ("request_finished", (REQUEST, []), (False, None)),
    ("request_finished_all_groups", (REQUEST, ([],)), (False, None)),
    ("reset_cache", (), False),
    ("get_kv_connector_stats", (), None),
    ("shutdown", (), None),
]


@pytest.mark.parametrize(("hook", "arguments", "answer"), HOOKS, ids=[h[0] for h in HOOKS])
def test_no_exception_reaches_the_engine(
    broken: MiniCacheConnector,
    warnings: pytest.LogCaptureFixture,
    hook: str,
    arguments: tuple[Any, ...],
    answer: Any,
) -> None:
    method = getattr(broken, hook)
    assert method(*arguments) == answer
    counted = broken.errors
    assert counted > 0
    if hook != "shutdown":
        assert method(*arguments) == answer
        assert broken.errors > counted
    assert len([line for line in warnings.records if line.exc_info]) == 1


def test_a_load_that_vllm_waits_for_is_failed(broken: MiniCacheConnector) -> None:
    """vLLM has set the request aside by now: no report, and it would wait for ever."""
    broken.update_state_after_alloc(REQUEST, None, 64)  # type: ignore[arg-type]
    assert broken.scheduler.failed == ["r"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("hook", "arguments"),
    [("update_state_after_alloc", (REQUEST, None, 64)), ("build_connector_meta", (None,))],
)
def test_a_load_that_this_step_needs_is_not_left_out_in_silence(
    broken: MiniCacheConnector, hook: str, arguments: tuple[Any, ...]
) -> None:
    """The forward would read pages that nobody has written: a wrong answer."""
    broken.scheduler.owes = True  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="broken"):
        getattr(broken, hook)(*arguments)
    plan = StepPlan()
    plan.loads.append((1, None, 1))
    broken._connector_metadata = plan
    with pytest.raises(RuntimeError, match="broken"):
        broken.start_load_kv(None)  # type: ignore[arg-type]


def test_hooks_without_a_half_answer_as_if_there_were_no_cache(
    broken: MiniCacheConnector,
) -> None:
    broken.scheduler = broken.worker = None
    for hook, arguments, answer in HOOKS:
        if hook == "reset_cache":
            answer = True
        assert getattr(broken, hook)(*arguments) == answer, hook
    assert broken.errors == 0


def test_delivery_is_not_required_and_layers_are_not_hooked(broken: MiniCacheConnector) -> None:
    assert broken.requires_kv_delivery is False
    assert not MiniCacheConnector.requires_piecewise_for_cudagraph({})
    # Per-layer hooks would cost every layer of every step.
    assert broken.wait_for_layer_load("layer") is None
    assert broken.save_kv_layer("layer", None, None) is None  # type: ignore[arg-type]
    assert broken.errors == 0


def test_wrong_settings_are_refused_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match="cache_dir"):
        MiniCacheConnector.requires_piecewise_for_cudagraph({"cachedir": "/var/cache"})


def test_counters_reach_vllms_metrics() -> None:
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    types: dict[type[PromMetric], Any] = {kind: kind for kind in (Counter, Gauge, Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    labels = ["model_name", "engine"]

    def counted(engine: str, name: str) -> float | None:
        found = {"model_name": "m", "engine": engine, "counter": name}
        return REGISTRY.get_sample_value("vllm:lakecache_total", found)

    try:
        for _ in range(2):  # Another engine in the same process takes the place of the first.
            unregister_vllm_metrics()
            made = LakeCacheConnector.build_prom_metrics(
                config, types, labels, {0: ["m", "0"], 1: ["m", "1"]}
            )
            assert counted("0", "loads_failed") == counted("1", "disk_evictions") == 0
            made.observe({"loads_failed": 2}, 1)
            made.observe({"loads_failed": 1, "disk_evictions": 5}, engine_idx=1)
            assert counted("1", "loads_failed") == 3
            assert counted("1", "disk_evictions") == 5
            assert counted("0", "loads_failed") == 0
    finally:
        unregister_vllm_metrics()


def test_the_stores_counters_go_along_as_they_grow(broken: MiniCacheConnector) -> None:
    # The pool is an older one, and has a past.
    now = dict.fromkeys(STORE_COUNTERS, 0) | {"writes": 9, "memory_evictions": 7}
    told: list[CacheStats | None] = []
    broken._growth = StoreGrowth(SimpleNamespace(stats=lambda: now))
    broken.worker = None
    broken.scheduler = SimpleNamespace(stats=lambda: told.pop())  # type: ignore[assignment]
    for grows, seen in ((4, {"loads": 1, "damaged": 4}), (0, {"loads": 1})):
        now = {**now, "damaged": now["damaged"] + grows}
        told.append(CacheStats(data={"loads": 1}))
        stats = broken.get_kv_connector_stats()
        assert stats is not None
        assert stats.data == seen
    told.append(None)
    assert broken.get_kv_connector_stats() is None
    assert broken.errors == 0


def test_a_store_without_a_disk_has_counters_too(ram_folder: Path) -> None:
    core = pytest.importorskip("lakecache._core")
    cache = core.Cache(
        cache_dir=None, ram_dir=str(ram_folder), cpu_bytes=16 << 20, disk_capacity_bytes=None
    )
    try:
        assert StoreGrowth(cache).take() == {}
    finally:
        cache.close()


def test_every_hook_of_vllm_that_it_calls_is_known() -> None:
    """A hook that a new vLLM adds shows up here, to be answered or left alone on purpose."""
    overridden = {name for name in vars(CacheConnector) if not name.startswith("_")}
    ours = {
        "requires_kv_delivery", "wait_for_layer_load", "save_kv_layer",
        "build_kv_connector_stats", "build_prom_metrics",
        "has_pending_block_frees", "has_pending_push_work",
        "get_loaded_kv_cache_group_ids", "requires_piecewise_for_cudagraph",
        *(hook for hook, _, _ in HOOKS),
    }  # fmt: skip
    assert {name for name in overridden if hasattr(KVConnectorBase_V1, name)} <= ours
    left = {"wait_for_layer_load", "save_kv_layer"}
    # vLLM's front end calls these two, with its own arguments.
    left |= {"build_kv_connector_stats", "build_prom_metrics"}
    # These look at one dictionary, once per step; there is nothing in them to go wrong.
    left |= {"has_pending_block_frees", "has_pending_push_work", "get_loaded_kv_cache_group_ids"}
    # This one is there to raise, before anything was started.
    left.add("requires_piecewise_for_cudagraph")
    assert overridden - left - {"requires_kv_delivery"} == {hook for hook, _, _ in HOOKS}


def test_metadata_pickles_small() -> None:
    """It is pickled once per step, on the critical path."""
    assert len(pickle.dumps(IDLE, pickle.HIGHEST_PROTOCOL)) < 64
    assert pickle.loads(pickle.dumps(IDLE)) is IDLE
    plan = StepPlan()
    per_chunk = 16
    for number in range(64):
        plan.chunks.append((1, number, 0, number, 1, bytes(4 * per_chunk)))
        plan.stores.append((number, 0, number, 1, bytes(range(4 * per_chunk))))
    blob = pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)
    # 4 bytes per block, and a constant for each chunk.
    assert len(blob) < 128 * (4 * per_chunk + 64)
    again = pickle.loads(blob)
    assert (again.loads, again.chunks, again.failed, again.stores) == (
        plan.loads, plan.chunks, plan.failed, plan.stores,
    )  # fmt: skip


def test_statistics_add_up_and_survive_the_front_end() -> None:
    one, other = CacheStats(data={"loads": 2}), CacheStats(data={"loads": 1, "stores": 3})
    rebuilt = MiniCacheConnector.build_kv_connector_stats(dict(one.data))
    assert rebuilt is not None
    assert rebuilt.aggregate(other).reduce() == {"loads": 3, "stores": 3}
    rebuilt.reset()
    assert rebuilt.is_empty()


class End:
    """A half of engine `name` that notes what it is given at its end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.declined: str | None = None
        self.ranks = 1
        self.given: list[str] = []

    def handshake(self, workers: dict[Any, Any]) -> None:
        """Agree."""

    def plan_rest(self) -> str:
        return f"rest of {self.name}"

    def mark_computed(self) -> None:
        self.given.append("computed")

    def start_stores(self, plan: str) -> None:
        self.given.append(plan)

    def take_report(self) -> str:
        return f"report of {self.name}"

    def drained(self, report: str) -> None:
        self.given.append(report)

    def shutdown(self) -> None:
        self.given.append("shut down")


def connector(**half: Any) -> Any:
    made = LakeCacheConnector.__new__(LakeCacheConnector)
    made.errors, made._workers = 0, []
    made.scheduler = made.worker = None
    vars(made).update(half)
    return made


def test_engines_of_one_process_end_with_their_own_rest() -> None:
    schedulers, workers = ({name: End(name) for name in "ab"} for _ in range(2))
    halves = []
    for name in "ab":
        leading = connector(scheduler=schedulers[name])
        told = Handshake("pool", {}, "{}", worker=name)
        leading.set_xfer_handshake_metadata_pp_aware({(0, 0): told})
        halves += [leading, connector(worker=workers[name])]
    # One that declines has no claim on another's worker.
    declining = End("c")
    declining.declined = "another pool"
    third = connector(scheduler=declining)
    third.set_xfer_handshake_metadata_pp_aware({(0, 0): Handshake("pool", {}, "{}", worker="a")})
    for half in (halves[1], halves[3], third, halves[2], halves[0]):
        half.shutdown()
        assert half.errors == 0
    for name in "ab":
        assert workers[name].given == ["computed", f"rest of {name}", "shut down"]
        assert schedulers[name].given == [f"report of {name}", "shut down"]
    assert declining.given == ["shut down"]
