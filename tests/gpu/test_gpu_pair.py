"""Tensor parallelism on two GPUs: each rank has a half of every object, no half is served alone.

The engine core lives in this process, as in `tests/vllm`, and its ranks in processes of their own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from site_engines import DEVICE, Site
from site_engines import prompt as long_prompt

import vllm_engine
from vllm_engine import Engine, Result, difference

pytestmark = [
    pytest.mark.gpu if DEVICE == "cuda" else pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.timeout(540),
]

UNIT = 16
CHUNK = 256
LENGTHS = [CHUNK + 10, 3 * CHUNK + 10, 5 * CHUNK + 10]
PROMPTS = [long_prompt(900 + number, length) for number, length in enumerate(LENGTHS)]
# Of log-probabilities in bfloat16.
TOLERANCE = 0.02
# The same where forwards take other numbers of tokens; wrong bytes change the tokens.
OTHER_SHAPE = 0.5
KINDS = ["qwen3", "hybrid"]


@pytest.fixture(scope="module")
def pair_site() -> Iterator[Site]:
    if DEVICE == "cuda":
        import torch

        if (count := torch.cuda.device_count()) < 2:
            pytest.skip(f"tensor parallelism takes two GPUs; {count} seen")
    site = Site()
    yield site
    site.place.remove()


@pytest.fixture(autouse=True)
def workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks in processes of their own, with one core each where there is no GPU."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    # NCCL alone, and without multicast, which not every host of several GPUs allows.
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    if DEVICE == "cpu":
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


def pair(site: Site, kind: str, directory: str, ram: str = "") -> Any:
    """Run an engine of two ranks."""
    settings: dict[str, Any] = {
        "model": str(site.checkpoint(kind)), "tensor_parallel_size": 2, "dtype": "bfloat16",
        "skip_tokenizer_init": True, "max_model_len": 4096, "kv_bytes": 256 << 20,
    }  # fmt: skip
    if DEVICE == "cuda":
        settings |= {"block_size": None, "gpu_memory_utilization": 0.05}
        settings |= {"distributed_executor_backend": "mp", "disable_custom_all_reduce": True}
    if kind == "hybrid":
        settings["prefix_match_unit"] = UNIT
        if DEVICE == "cuda":
            settings["additional_config"] = {"gdn_prefill_backend": "triton"}
    extra = {
        "cache_dir": str(site.place.scratch / directory),
        "ram_dir": str(site.place.ram / (ram or directory)),
        "cpu_bytes": "256MiB", "disk_capacity_bytes": "1GiB", "chunk_size": CHUNK,
    }  # fmt: skip
    return vllm_engine.engine(extra, **settings)


def ask(cached: Engine) -> list[Result]:
    return [cached.generate([tokens], tokens=8)[0] for tokens in PROMPTS]


def worst(one: list[Result], other: list[Result]) -> float:
    return max(difference(a, b) for a, b in zip(one, other, strict=True))


def hits(kind: str) -> list[int]:
    unit = UNIT if kind == "hybrid" else CHUNK
    return [(length - 1) // unit * unit for length in LENGTHS]


def restored(answers: list[Result]) -> list[int]:
    return [answer[2] for answer in answers]


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks(pair_site: Site, kind: str) -> None:
    with pair(pair_site, kind, kind) as cached:
        assert cached.connector.declined is None
        cold = ask(cached)
        native = ask(cached)
        cached.forget_gpu()
        memory = ask(cached)
        cached.forget_gpu()
        noise = worst(memory, ask(cached))
        assert restored(cold) == [0] * len(PROMPTS)
        assert restored(memory) == hits(kind)
        assert cached.half.total("loads_failed") == cached.connector.errors == 0
    # What vLLM itself restores of a hybrid does not always agree with what it computed.
    measure = cold if kind == "hybrid" else native
    assert noise < 0.1
    assert worst(measure, memory) <= max(noise, TOLERANCE)
    # A restart with a pool of its own finds files alone.
    with pair(pair_site, kind, kind, ram=f"{kind}-again") as cached:
        disk = ask(cached)
        assert restored(disk) == hits(kind)
        assert worst(measure, disk) <= max(noise, TOLERANCE)
        assert cached.half.total("loaded_tokens_disk") > 0
        assert cached.half.total("loads_failed") == cached.connector.errors == 0


def generate_until_broken(cached: Engine, prompts: list[list[int]]) -> None:
    """Kill a rank while prompts are computed and stored: a half of some objects will not come."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=64, ignore_eos=True, detokenize=False)
    for number, tokens in enumerate(prompts):
        cached.llm.llm_engine.add_request(f"cut {number}", {"prompt_token_ids": tokens}, sampling)
    cached.llm.llm_engine.step()
    os.kill(cached.core.model_executor.workers[1].proc.pid, signal.SIGKILL)
    while cached.llm.llm_engine.has_unfinished_requests():
        cached.llm.llm_engine.step()


def test_a_killed_rank_leaves_no_halves(pair_site: Site) -> None:
    cut = [long_prompt(950 + number, 3 * CHUNK + 10) for number in range(8)]
    with pair(pair_site, "qwen3", "killed") as cached:
        want = ask(cached)
        assert len(cached.core.model_executor.workers) == 2
        # vLLM does not say which exception ends an engine.
        with pytest.raises(Exception, match=r".") as failure:
            generate_until_broken(cached, cut)
    print(f"the engine ended with {failure.value!r}", flush=True)
    with pair(pair_site, "qwen3", "killed", ram="killed-again") as cached:
        again = ask(cached)
        found = [cached.generate([tokens], tokens=8)[0] for tokens in cut]
        print(f"of the prompts that were cut, {restored(found)} tokens were whole", flush=True)
        assert restored(again) == hits("qwen3")
        # Neither the GPU nor the store knows them any more.
        assert cached.llm.reset_prefix_cache(reset_connector=True)
        computed = [cached.generate([tokens], tokens=8)[0] for tokens in cut]
        assert restored(computed) == [0] * len(cut)
        assert worst(want, again) <= OTHER_SHAPE
        assert worst(computed, found) <= OTHER_SHAPE
        assert cached.half.total("loads_failed") == cached.connector.errors == 0
