"""Hybrid models: a restored checkpoint answers as vLLM's own hit at the same position.

One engine serves all tests here; a process can have but one at a time. Its steps take at most 100
tokens, no multiple of its block, so prompts are cut in many places.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_engine import (
    UNIT,
    deepest,
    files,
    flip,
    forget_since,
    from_each_tier,
    hybrid,
    one,
    poison,
)
from vllm_engine import Engine, difference, prompt


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrid")


@pytest.fixture(scope="module")
def shared_engine(directory: Path) -> Iterator[Engine]:
    pytest.importorskip("vllm")
    pytest.importorskip("lakecache._core")
    places = {"cache_dir": str(directory / "kv"), "ram_dir": str(directory / "ram")}
    with hybrid({**places, "cpu_bytes": "64MiB"}, max_num_seqs=8) as made:
        assert made.connector.declined is None
        yield made
        assert made.connector.errors == 0


@pytest.fixture
def cached(shared_engine: Engine) -> Engine:
    shared_engine.forget_gpu()
    return shared_engine


def test_memory_and_disk_answer_as_a_native_hit(cached: Engine) -> None:
    for length in (2, UNIT, UNIT + 1, 63, 64, 65, 80, 128, 129, 333):
        tokens = prompt(length, length)
        tiers = from_each_tier(cached, tokens)
        assert tiers.cold[2] == 0
        assert tiers.found() == {deepest(length)}, length
        for restored in (tiers.memory, tiers.disk):
            assert difference(tiers.native, restored) == 0, length
    assert cached.half.total("loaded_tokens_disk") > 0
    assert cached.half.total("loaded_tokens_memory") > 0


def test_what_a_tail_leaves_of_its_page_is_never_read(
    cached: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM clears those blocks: without that, a NaN left in one reaches the answer."""
    sizes = cached.half.part_bytes
    # 16, 32 or 48 of a block's 64 tokens.
    assert [sizes[2 + n] - sizes[1] for n in range(3)] == [sizes[0] // 4 * n for n in (1, 2, 3)]
    for length in (20, 40, 60, 129, 150, 333):
        tokens = prompt(length, 200 + length)
        one(cached, tokens)
        native = one(cached, tokens)
        for disk in (False, True):
            cached.forget_gpu()
            if disk:
                cached.forget_memory()
            poison(cached)
            restored = one(cached, tokens)
            assert restored[2] == deepest(length)
            assert difference(native, restored) == 0, (length, disk)
    # The last prompt's state is at the end of a block; this one's is not.
    tokens = prompt(340, 200)
    native = one(cached, tokens), one(cached, tokens)
    cached.forget_gpu()
    poison(cached)
    whole = cached.connector._loaded_groups
    monkeypatch.setattr(cached.connector, "get_loaded_kv_cache_group_ids", lambda _: whole)
    spoilt = one(cached, tokens)
    assert spoilt[2] == deepest(340)
    assert difference(native[1], spoilt) != 0


@pytest.mark.parametrize("seen_by", ["vLLM", "the store"])
def test_prompts_that_share_a_part(cached: Engine, seen_by: str) -> None:
    seed = 30 if seen_by == "vLLM" else 40
    base = prompt(200, seed)
    parts = [prompt(70, seed + number) for number in range(1, 4)]
    one(cached, base + parts[0])
    if seen_by == "the store":
        cached.forget_gpu()
    # It is seen here where the two part, and the state of the block before is kept.
    assert one(cached, base + parts[1])[2] == 0
    before = files(cached)
    native = one(cached, base + parts[2])
    assert native[2] == 192
    forget_since(cached, before)
    disk = one(cached, base + parts[2])
    assert disk[2] == 192
    assert difference(native, disk) == 0
    cached.forget_gpu()
    memory = one(cached, base + parts[1])
    assert memory[2] == deepest(270)
    # The GPU holds the junction, and the store the rest.
    cached.forget_gpu()
    one(cached, base[:193])
    assert one(cached, base + parts[2])[2] == deepest(270)


def test_a_chat(cached: Engine) -> None:
    history, expected = prompt(90, 10), 0
    for turn in range(3):
        before = files(cached)
        if turn:
            native = one(cached, history)
            assert native[2] == expected
            forget_since(cached, before)
            restored = one(cached, history)
            assert restored[2] == expected
            assert difference(native, restored) == 0, turn
        else:
            native = one(cached, history)
        expected = deepest(len(history))
        history = history + native[0] + prompt(50, 11 + turn)
    assert not cached.half._tracked


def test_prompts_cut_by_others(cached: Engine) -> None:
    """Eight prompts share the steps, so chunks of prefill end wherever there is no more room."""
    prompts = [prompt(120 + 31 * seed, 20 + seed) for seed in range(8)]
    cached.generate(prompts, tokens=3)
    native = [one(cached, tokens) for tokens in prompts]
    cached.forget_gpu()
    together = cached.generate(prompts, tokens=3)
    for tokens, want, batch in zip(prompts, native, together, strict=True):
        cached.forget_gpu()
        got = one(cached, tokens)
        assert got[2] == want[2] == batch[2] == deepest(len(tokens))
        assert difference(want, got) == 0


def test_abort_leaks_nothing(cached: Engine) -> None:
    from vllm import SamplingParams

    long = prompt(600, 60)
    one(cached, long)
    want = one(cached, long)
    llm = cached.llm.llm_engine
    for steps in range(6):
        cached.forget_gpu()
        if steps % 2:
            cached.forget_memory()
        llm.add_request(f"abort-{steps}", {"prompt_token_ids": long}, SamplingParams(max_tokens=50))
        for _ in range(steps):
            llm.step()
        llm.abort_request(list(cached.core.scheduler.requests), internal=True)
        cached.settle()
        assert not cached.half._tracked
        assert not cached.half.loads.between_steps()
        assert not cached.half.state_saver
        assert not cached.core.scheduler.requests
    cached.forget_gpu()
    assert difference(want, one(cached, long)) == 0


def test_a_damaged_state_is_refused(cached: Engine) -> None:
    tokens = prompt(200, 70)
    before = files(cached)
    cold = one(cached, tokens)
    states = [file for file in files(cached) - before if flip(file, cached.half.part_bytes)]
    assert len(states) == 1
    cached.forget_gpu()
    cached.forget_memory()
    assert difference(cold, one(cached, tokens)) == 0
    assert cached.half.total("loads_failed") > 0


def test_reset_of_the_store(cached: Engine) -> None:
    """The last test of this engine: what it stores from now on is its own."""
    tokens = prompt(200, 71)
    cold = one(cached, tokens)
    assert cached.llm.reset_prefix_cache(reset_connector=True)
    again = one(cached, tokens)
    assert again[2] == 0
    assert difference(cold, again) == 0
    cached.forget_gpu()
    assert one(cached, tokens)[2] == deepest(200)
