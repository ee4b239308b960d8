"""A hit that is slower than computing is declined; the answer stays the same."""

from __future__ import annotations

import json
from pathlib import Path

from vllm_engine import BLOCK, difference, engine, prompt

MEGABYTE = 1_000_000


def estimates_of(places: dict[str, str]) -> Path:
    [path] = Path(places["cache_dir"]).glob("*/estimates.json")
    return path


def test_a_slow_disk_is_declined(places: dict[str, str]) -> None:
    auto = {**places, "cpu_bytes": "64MiB", "load_policy": "auto"}
    tokens = prompt(1500, 1)
    with engine(auto) as first:
        cold = first.generate([tokens])[0]
        for length in (100, 300, 700):
            first.generate([prompt(length, length)])
        told = first.half.explain()
        assert told["prefill"]["measured"] == 4
        assert told["prefill"]["ms_per_1k_tokens"] > 0
        assert first.connector.errors == told["prefill"]["errors"] == 0

    # The engine has kept what it learnt. Say that the disk gives one megabyte per second.
    path = estimates_of(places)
    saved = json.loads(path.read_text())
    saved["disk"] = [[[1, size], size / MEGABYTE] for size in (MEGABYTE, 4 * MEGABYTE)] * 3
    path.write_text(json.dumps(saved))
    with engine(auto) as second:
        second.half.policy.file.wait(10)
        assert second.half.explain()["disk"]["measured"] == 6
        second.forget_memory()
        declined = second.generate([tokens])[0]
        assert declined[2] == 0
        assert difference(cold, declined) == 0
        assert second.half.total("hits_declined") == 1
        assert second.half.total("tokens_declined") == 1472
        assert second.half.total("loads") == second.connector.errors == 0
        # Once computed, it is in memory: the disk's slowness is paid for once.
        second.settle()
        writes = second.half._cache.stats()["writes"]
        second.forget_gpu()
        again = second.generate([tokens])[0]
        assert again[2] == second.half.total("loaded_tokens_memory") == 1472
        assert difference(cold, again) == 0
        assert second.half._cache.stats()["writes"] == writes

    with engine({**auto, "load_policy": "always"}) as third:
        third.forget_memory()
        taken = third.generate([tokens])[0]
        assert taken[2] == 1472
        assert difference(cold, taken) == 0
        assert third.half.total("loaded_tokens_disk") == 1472
        assert third.half.explain() == {}


def test_hits_of_an_engine_that_knows_nothing_are_taken(places: dict[str, str]) -> None:
    """Chunked prefill, several requests at once, and loads whose times are learnt."""
    prompts = [prompt(400 + BLOCK * seed, seed) for seed in range(6)]
    auto = {**places, "cpu_bytes": "64MiB", "load_policy": "auto"}
    with engine(auto, max_num_batched_tokens=256) as made:
        made.half.policy.prefill.fit.clear()
        cold = made.generate(prompts)
        assert made.half.explain()["prefill"]["measured"] >= 10
        made.half.policy.prefill.fit.clear()
        made.forget_gpu()
        again = made.generate(prompts)
        assert max(result[2] for result in again) > 0
        assert max(difference(a, b) for a, b in zip(cold, again, strict=True)) < 1e-3
        assert made.half.explain()["memory"]["measured"] >= 1
        assert made.half.policy.memory.under_way == made.half.policy.disk.under_way == 0
        assert made.half.policy.clock._open == []
        assert made.connector.errors == made.half.policy.clock.errors == 0
