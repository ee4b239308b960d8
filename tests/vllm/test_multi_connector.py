"""Beside another connector in vLLM's `MultiConnector`: each loads what it has, LakeCache stores
also what the other one loaded, and all answers are those of an engine without connectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_engine import deepest, files, forget_since, from_each_tier, hybrid
from vllm_engine import Engine, Result, difference, engine, prompt

PROMPTS = [prompt(300, seed) for seed in range(80, 84)]
HIT = 256
# The other one gives whole blocks.
PEER_HIT = 288
# Of sums in fp32, where steps are cut elsewhere.
ROUNDING = 1e-3


def lake(places: dict[str, str], **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "LakeCacheConnector",
        "kv_connector_module_path": "lakecache.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            **places, "cpu_bytes": "64MiB", "chunk_size": 64, "load_policy": "always", **extra,
        },
    }  # fmt: skip


def peer(mode: str, **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "PeerConnector",
        "kv_connector_module_path": "peer_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"mode": mode, **extra},
    }


def example(directory: Path) -> dict[str, Any]:
    """vLLM's own example, which loads within the step and knows whole prompts only."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(directory)},
    }


def both(
    connectors: list[dict[str, Any]], run: Callable[..., Any] = engine, **settings: Any
) -> Any:
    return run({"connectors": connectors}, connector="MultiConnector", module_path=None, **settings)


@pytest.fixture(scope="module")
def native() -> list[Result]:
    pytest.importorskip("vllm")
    with engine(None) as plain:
        return [plain.generate([tokens])[0] for tokens in PROMPTS]


@pytest.fixture(autouse=True)
def neighbour() -> Iterator[Any]:
    pytest.importorskip("vllm")
    from peer_connector import PeerConnector

    PeerConnector.loaded = 0
    yield PeerConnector
    PeerConnector.kept.clear()
    PeerConnector.pages = []


def answers(
    cached: Engine, number: int, want: list[Result], hit: int, tolerance: float = 0
) -> None:
    got = cached.generate([PROMPTS[number]])[0]
    assert got[2] == hit
    assert difference(want[number], got) <= tolerance


def at_rest(cached: Engine) -> None:
    assert cached.connector.errors == 0
    assert not cached.half._tracked
    assert not cached.half.loads.between_steps()
    assert not cached.half.pending()
    cached.forget_gpu()


@pytest.mark.parametrize("first", ["lake", "example"])
def test_beside_the_example_connector(
    first: str, places: dict[str, str], tmp_path: Path, native: list[Result]
) -> None:
    kept = tmp_path / "example"
    connectors = [lake(places), example(kept)][:: 1 if first == "lake" else -1]
    with both(connectors) as cached:
        answers(cached, 0, native, 0)
        for disk in (False, True):
            cached.forget_gpu()
            if disk:
                cached.forget_memory()
            answers(cached, 0, native, HIT if first == "lake" else PEER_HIT)
        loaded = cached.half.total("loads")
        assert loaded == (2 if first == "lake" else 0)
        at_rest(cached)
    if first == "lake":
        return
    # What was stored beside the other one, which loaded it each time, is right.
    with engine(places) as alone:
        answers(alone, 0, native, HIT)
        alone.forget_gpu()
        alone.forget_memory()
        answers(alone, 0, native, HIT)


@pytest.mark.parametrize("order", [1, -1])
def test_beside_loads_of_another_host(
    order: int,
    places: dict[str, str],
    native: list[Result],
    neighbour: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A connector that has a handshake, and whose loads vLLM waits for."""
    monkeypatch.setattr("lakecache._metadata.STATS_SECONDS", 0)
    connectors = [peer("async", handshake=True), lake(places)][::order]
    with both(connectors, late=True, disable_log_stats=False) as cached:
        assert cached.connector.declined is None
        assert cached.half.declined is None
        children = cached.core.scheduler.connector.sub_connectors
        assert next(one for one in children if one is not cached.connector).met
        before = files(cached)
        answers(cached, 0, native, 0)
        forget_since(cached, before)
        # Its blocks hold other prompts' tokens until the pages come.
        cached.generate([prompt(900, 90)])
        cached.forget_gpu()
        answers(cached, 0, native, PEER_HIT)
        assert neighbour.loaded == 1
        # Now both have it, and who is asked first loads it.
        abort_at_each_step(cached)
        cached.forget_gpu()
        loads = cached.half.total("loads")
        answers(cached, 0, native, PEER_HIT if order == 1 else HIT)
        assert cached.half.total("loads") == loads + (order == -1)
        for disk in (False, True):
            neighbour.kept.clear()
            cached.forget_gpu()
            if disk:
                cached.forget_memory()
            answers(cached, 0, native, HIT)
        at_rest(cached)
        assert counted("loads") == cached.half.total("loads") > 0


def counted(name: str) -> float:
    """A counter as vLLM's `/metrics` has it."""
    from prometheus_client import REGISTRY

    samples = [one for metric in REGISTRY.collect() for one in metric.samples]
    wanted = ("vllm:lakecache_total", name)
    (found,) = [one for one in samples if (one.name, one.labels.get("counter")) == wanted]
    return found.value


def abort_at_each_step(cached: Engine) -> None:
    from vllm import SamplingParams

    llm = cached.llm.llm_engine
    for steps in range(6):
        cached.forget_gpu()
        sampling = SamplingParams(max_tokens=50)
        llm.add_request(f"abort-{steps}", {"prompt_token_ids": PROMPTS[0]}, sampling)
        for _ in range(steps):
            llm.step()
        llm.abort_request(list(cached.core.scheduler.requests), internal=True)
        cached.settle()
        assert not cached.half._tracked
        assert not cached.core.scheduler.requests


def test_preemption_and_many_loads(places: dict[str, str], neighbour: Any) -> None:
    prompts = [prompt(200, seed) for seed in range(50, 58)]
    with engine(None) as plain:
        native = plain.generate(prompts, tokens=60)
    # Room for about four of the eight requests.
    with both([peer("async"), lake(places)], kv_bytes=6 << 20) as tight:
        for _ in range(2):
            got = tight.generate(prompts, tokens=60)
            assert max(difference(a, b) for a, b in zip(native, got, strict=True)) < ROUNDING
            tight.forget_gpu()
        assert neighbour.loaded > 0
        neighbour.kept.clear()
        got = tight.generate(prompts, tokens=60)
        assert tight.half.total("loads") > 0
        assert max(difference(a, b) for a, b in zip(native, got, strict=True)) < ROUNDING
        at_rest(tight)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_another_one_failed_to_load_is_not_stored(
    mode: str, places: dict[str, str], native: list[Result], neighbour: Any
) -> None:
    # Computing anew takes several steps, and by then the first stores would have begun.
    with both([peer(mode, fails=1), lake(places)], max_num_batched_tokens=64) as cached:
        before = files(cached)
        answers(cached, 0, native, 0, ROUNDING)
        forget_since(cached, before)
        got = cached.generate([PROMPTS[0]])[0]
        # Of a load that it waits for, vLLM asks again.
        assert neighbour.loaded == (2 if mode == "async" else 1)
        assert difference(native[0], got) <= ROUNDING
        for disk in (False, True):
            neighbour.kept.clear()
            cached.forget_gpu()
            if disk:
                cached.forget_memory()
            answers(cached, 0, native, HIT, ROUNDING)
        at_rest(cached)


@pytest.mark.parametrize("handshake", [False, True])
def test_a_hybrid(handshake: bool, places: dict[str, str]) -> None:
    connectors = [lake(places), peer("idle", handshake=handshake)][:: -1 if handshake else 1]
    with both(connectors, hybrid, late=handshake, max_num_seqs=8) as cached:
        assert cached.half.declined is None
        for length in (129, 333):
            tiers = from_each_tier(cached, prompt(length, length))
            assert tiers.cold[2] == 0
            assert tiers.found() == {deepest(length)}
            for restored in (tiers.memory, tiers.disk):
                assert difference(tiers.native, restored) == 0
        at_rest(cached)
