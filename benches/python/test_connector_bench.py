"""What the connector's hooks cost in a step of the engine, each half of one in a real vLLM."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("lakecache._core")

from vllm_engine import CHUNK, MODEL, Engine, engine

pytestmark = pytest.mark.bench

CHUNKS = 512


@pytest.fixture(scope="module")
def cached() -> Iterator[Engine]:
    if not MODEL.exists():
        pytest.skip(f"{MODEL} is missing: make prepares it")
    with tempfile.TemporaryDirectory(prefix="lakecache-bench-", dir="/dev/shm") as folder:
        extra = {"ram_dir": folder, "cpu_bytes": 128 << 20}
        with engine(extra) as made:
            yield made


@pytest.fixture(scope="module")
def worker() -> Any:
    from vllm.distributed.kv_transfer import kv_transfer_state

    return lambda: kv_transfer_state._KV_CONNECTOR_AGENT


def step_output() -> Any:
    """What vLLM hands over in a step of 16 decoding requests."""
    from vllm.v1.core.sched.output import SchedulerOutput

    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {f"request {number}": 1 for number in range(16)}
    output.total_num_scheduled_tokens = 16
    return output


def test_plan_of_an_idle_step(benchmark, cached):
    """`plan_step` alone."""
    plan = benchmark(cached.half.plan_step, step_output())
    assert not plan


def test_scheduler_half_of_an_idle_step(benchmark, cached):
    """Everything that vLLM's scheduler calls in each step."""
    from vllm.v1.outputs import KVConnectorOutput

    connector, output, answer = cached.connector, step_output(), KVConnectorOutput()

    def step() -> Any:
        plan = connector.build_connector_meta(output)
        connector.update_connector_output(answer)
        connector.get_kv_connector_stats()
        connector.take_events()
        return plan

    assert not benchmark(step)
    assert connector.errors == 0


def test_worker_half_of_an_idle_step(benchmark, cached, worker):
    """Everything that vLLM's model runner calls in each step, on the worker's connector."""
    half, plan = worker(), cached.connector.build_connector_meta(step_output())
    finished: set[str] = set()

    def step() -> Any:
        half.bind_connector_metadata(plan)
        half.handle_preemptions(plan)
        half.start_load_kv(None)
        half.wait_for_save()
        results = half.get_transfer_results(finished)
        half.get_block_ids_with_load_errors()
        half.get_kv_connector_stats()
        half.get_kv_connector_kv_cache_events()
        half.build_connector_worker_meta()
        half.clear_connector_metadata()
        return results

    assert not benchmark(step).finished_recving
    assert half.errors == 0


@pytest.fixture(scope="module")
def hashes(cached) -> list[bytes]:
    """Block hashes of a prompt whose 512 chunks are all in memory."""
    half = cached.half
    blocks = [number.to_bytes(32, "big") for number in range(1, CHUNKS * CHUNK // half.unit + 1)]
    space = half.spaces.of(None)
    per_chunk = half.chunk // half.unit
    names = half.keys._core.derive_keys(space.digest, 0, blocks[per_chunk - 1 :: per_chunk])
    for at in range(CHUNKS):
        slot = half._cache.reserve(
            space.number, names[at * 32 : at * 32 + 32], 0,
            names[at * 32 - 32 : at * 32] if at else None,
            at * CHUNK, (at + 1) * CHUNK - 1, 1, 4096,
        )  # fmt: skip
        half._cache.commit(*slot)
    # Checksums are taken in the background.
    deadline = time.monotonic() + 30
    while half._cache.lookup(names) != (CHUNKS, CHUNKS):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return blocks


@pytest.mark.parametrize("asked", ["first", "again"])
def test_matched(benchmark, cached, hashes, asked):
    """`matched` for 512 chunks in memory: keys, lookup and lease; or asked again, as when no block
    was free. The first time the request is also forgotten again, which ends its lease.
    """
    half, numbers, tokens = cached.half, itertools.count(), CHUNKS * CHUNK + 1

    def request() -> Any:
        return SimpleNamespace(
            request_id=f"r{next(numbers)}", num_tokens=tokens, num_prompt_tokens=tokens,
            block_hashes=hashes, num_computed_tokens=0, num_output_placeholders=0,
            lora_request=None, skip_reading_prefix_cache=False, resumable=False,
            kv_transfer_params=None,
        )  # fmt: skip

    def first() -> Any:
        made = request()
        answer = half.matched(made, 0)
        half.finished(made.request_id)
        return answer

    if asked == "first":
        assert benchmark(first) == (CHUNKS * CHUNK, True)
        return
    same = request()
    assert benchmark(half.matched, same, 0) == (CHUNKS * CHUNK, True)
    half.finished(same.request_id)
