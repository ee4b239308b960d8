"""Prompts in pieces, answers saved while they grow, drafts that are refused: one engine."""

from __future__ import annotations

import importlib.util
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_engine import BLOCK, CHUNK, Engine, Result, difference, engine, prompt

BUDGET = 96
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
# What became of them, since the start.
DRAFTED = {"num_draft_tokens": 0, "num_accepted_tokens": 0}
# Steps of another size add up in another order.
ROUNDING = 1e-3


@pytest.fixture(scope="module")
def module_places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("steps")
    return {"cache_dir": str(root / "kv"), "ram_dir": str(root / "ram")}


def plain_numba() -> types.ModuleType:
    """What vLLM's n-gram drafting takes from numba, which nothing else here needs."""
    module = types.ModuleType("numba")

    def same(*arguments: Any, **_: Any) -> Any:
        return arguments[0] if arguments and callable(arguments[0]) else lambda function: function

    module.jit = module.njit = same  # type: ignore[attr-defined]
    module.prange = range  # type: ignore[attr-defined]
    module.get_num_threads = lambda: 1  # type: ignore[attr-defined]
    module.set_num_threads = lambda _: None  # type: ignore[attr-defined]
    return module


@pytest.fixture(scope="module")
def stepping(module_places: dict[str, str]) -> Iterator[Engine]:
    if importlib.util.find_spec("numba") is None:
        sys.modules["numba"] = plain_numba()
    with engine(
        {**module_places, "save_decode": True}, max_num_batched_tokens=BUDGET,
        enable_chunked_prefill=True, max_num_seqs=8, speculative_config=DRAFTS,
    ) as made:  # fmt: skip
        scheduler: Any = made.core.scheduler
        counting = scheduler.make_spec_decoding_stats

        def count(stats: Any, **told: Any) -> Any:
            for name in DRAFTED:
                DRAFTED[name] += told[name]
            return counting(stats, **told)

        scheduler.make_spec_decoding_stats = count
        yield made


def computed(cached: Engine, tokens: list[int], count: int = 8) -> Result:
    """An answer for which neither cache was asked, and which stores nothing over what is there."""
    cached.forget_gpu()
    keys = cached.half.keys
    chunks, keys.chunks = keys.chunks, lambda _: b""
    try:
        answer = cached.generate([tokens], count)[0]
    finally:
        keys.chunks = chunks
    assert answer[2] == 0
    cached.forget_gpu()
    return answer


def test_prompts_cut_anywhere(stepping: Engine) -> None:
    chance = random.Random(9)
    lengths = [BUDGET, BUDGET + 1, 2 * BUDGET, *(chance.randint(97, 700) for _ in range(5))]
    for number, length in enumerate(lengths):
        tokens = prompt(length, 100 + number)
        # A companion of another length takes a share of each step, so that cuts fall anywhere.
        companion = prompt(chance.randint(1, 300), 200 + number)
        stepping.forget_gpu()
        cold = stepping.generate([companion, tokens])[1]
        stepping.forget_gpu()
        hit = stepping.generate([tokens])[0]
        assert hit[2] == min(length // CHUNK * CHUNK, length - 1), length
        assert difference(computed(stepping, tokens), hit) < ROUNDING, length
        assert difference(cold, hit) < ROUNDING, length
        # The GPU has the beginning, up to any of its blocks; the rest is loaded.
        local = chance.randrange(1, length // BLOCK) * BLOCK
        stepping.forget_gpu()
        stepping.generate([tokens[:local]], 1)
        mixed = stepping.generate([tokens])[0]
        # Less than a block is not worth a load.
        assert mixed[2] > hit[2] - BLOCK
        assert difference(hit, mixed) < ROUNDING, (length, local)
    assert stepping.connector.errors == 0
    assert not stepping.half._tracked


def test_an_answer_is_the_next_prompts_beginning(stepping: Engine) -> None:
    """Drafts are checked in the same steps; what is saved must be accepted tokens only."""
    # Repetition makes n-gram drafts, and most of them wrong.
    first = prompt(70, 300) * 2 + prompt(40, 300)
    stepping.forget_gpu()
    answer = stepping.generate([first], 150)[0]
    known = [*first, *answer[0]]
    # The last token was never computed, and a step saves what earlier steps have settled.
    surely = (len(known) - 8) // CHUNK * CHUNK
    second = [*known, *prompt(30, 301)]
    stepping.forget_gpu()
    hit = stepping.generate([second], 20)[0]
    assert surely > len(first)
    assert surely <= hit[2] < len(known)
    assert difference(computed(stepping, second, 20), hit) < ROUNDING
    assert DRAFTED["num_draft_tokens"] > DRAFTED["num_accepted_tokens"] > 0
    assert stepping.connector.errors == 0
