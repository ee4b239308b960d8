"""Two ranks, each with a half of every object and a process that learns the name by itself."""

from __future__ import annotations

import os
import signal

import pytest

from vllm_engine import Engine, difference, engine, prompt

pytestmark = pytest.mark.multiprocess


@pytest.fixture(autouse=True)
def one_core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


def test_two_ranks(places: dict[str, str]) -> None:
    tokens = prompt(300, 6)
    with engine(places, tensor_parallel_size=2, module_path=None) as pair:
        cold = pair.generate([tokens])[0]
        pair.forget_gpu()
        memory = pair.generate([tokens])[0]
        pair.forget_gpu()
        pair.forget_memory()
        disk = pair.generate([tokens])[0]
        assert cold[2] == 0
        assert memory[2] == disk[2] == 256
        assert difference(cold, memory) == difference(cold, disk) == 0


def generate_until_broken(pair: Engine, prompts: list[list[int]]) -> None:
    """Kill a rank while prompts are computed and stored: its half of some objects will not come."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=64, ignore_eos=True, detokenize=False)
    core = pair.llm.llm_engine
    for number, tokens in enumerate(prompts):
        core.add_request(f"cut {number}", {"prompt_token_ids": tokens}, sampling)
    core.step()
    os.kill(pair.core.model_executor.workers[1].proc.pid, signal.SIGKILL)
    while core.has_unfinished_requests():
        core.step()


def test_a_killed_rank_leaves_no_halves(places: dict[str, str]) -> None:
    kept, cut = prompt(300, 7), [prompt(300, seed) for seed in range(8, 14)]
    with engine(places, tensor_parallel_size=2) as pair:
        want = pair.generate([kept])[0]
        # vLLM does not say which exception ends an engine.
        with pytest.raises(Exception, match=r".") as failure:
            generate_until_broken(pair, cut)
    # As the caller that handles it still has the error, and with it the engine.
    assert failure.traceback
    with engine(places, tensor_parallel_size=2) as pair:
        again = pair.generate([kept])[0]
        found = [pair.generate([tokens])[0] for tokens in cut]
        assert again[2] == 256
        # Neither the GPU nor the store knows them any more.
        assert pair.llm.reset_prefix_cache(reset_connector=True)
        computed = [pair.generate([tokens])[0] for tokens in cut]
        assert [answer[2] for answer in computed] == [0] * len(cut)
        assert difference(want, again) == 0
        assert max(map(difference, computed, found)) == 0
        assert pair.half.total("loads_failed") == pair.connector.errors == 0
