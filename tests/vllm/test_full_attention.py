"""A model with full attention: what is restored answers as what was computed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vllm_engine import BLOCK, CHUNK, Engine, difference, engine, prompt

LENGTHS = [1, BLOCK - 1, BLOCK, CHUNK - 1, CHUNK, CHUNK + 1, 4 * CHUNK, 4 * CHUNK + 1, 300]


@pytest.fixture
def cached(places: dict[str, str]) -> Iterator[Engine]:
    with engine({**places, "cpu_bytes": "64MiB"}) as made:
        yield made


def expected_hit(length: int) -> int:
    hit = min(length // CHUNK * CHUNK, length - 1)
    return hit if hit >= BLOCK else 0


def test_memory_and_disk_answer_as_computed(cached: Engine) -> None:
    for length in LENGTHS:
        cold = cached.generate([prompt(length, length)])[0]
        assert cold[2] == 0
        native = cached.generate([prompt(length, length)])[0]
        cached.forget_gpu()
        memory = cached.generate([prompt(length, length)])[0]
        cached.forget_gpu()
        cached.forget_memory()
        disk = cached.generate([prompt(length, length)])[0]
        for hit in (native, memory, disk):
            assert difference(cold, hit) == 0, length
        assert memory[2] == disk[2] == expected_hit(length)
    assert cached.half.total("loaded_tokens_disk") > 0
    assert cached.half.total("loaded_tokens_memory") > 0
    assert cached.connector.errors == 0


def test_restart_and_no_cache_agree(places: dict[str, str]) -> None:
    prompts = [prompt(300, 1), prompt(200, 2)]
    with engine(None) as plain:
        native = plain.generate(prompts)
    with engine(places) as first:
        cold = first.generate(prompts)
    with engine(places) as second:
        restored = second.generate(prompts)
        assert [result[2] for result in restored] == [256, 192]
    for one, two, three in zip(native, cold, restored, strict=True):
        assert difference(one, two) == difference(one, three) == 0


def test_shared_prefixes_and_partial_hits(cached: Engine) -> None:
    base = prompt(200, 3)
    suffixes = [prompt(70, seed) for seed in range(4, 8)]
    cold = [cached.generate([base + suffix])[0] for suffix in suffixes]
    cached.forget_gpu()
    for suffix, want in zip(suffixes, cold, strict=True):
        got = cached.generate([base + suffix])[0]
        assert difference(want, got) == 0
    cached.forget_gpu()
    # A prefix on the GPU that ends inside a chunk, and the rest from the store.
    cached.generate([base[: CHUNK + BLOCK]])
    got = cached.generate([base + suffixes[0]])[0]
    assert got[2] == 256
    assert difference(cold[0], got) == 0


def test_many_requests_and_little_memory(places: dict[str, str]) -> None:
    prompts = [prompt(260 + seed, seed) for seed in range(20, 44)]
    with engine(None) as plain:
        native = plain.generate(prompts)
    with engine({**places, "cpu_bytes": "8MiB"}) as small:
        for _ in range(3):
            got = small.generate(prompts)
            # Batches are composed differently, so fp32 sums may differ in the last bits.
            assert max(difference(a, b) for a, b in zip(native, got, strict=True)) < 1e-3
            small.forget_gpu()
        assert small.connector.errors == 0
        assert not small.half._tracked
        assert not small.half.loads.between_steps()


def test_preemption(places: dict[str, str]) -> None:
    prompts = [prompt(200, seed) for seed in range(50, 58)]
    with engine(None) as plain:
        native = plain.generate(prompts, tokens=60)
    # Room for about four of the eight requests.
    with engine(places, kv_bytes=6 << 20) as tight:
        got = tight.generate(prompts, tokens=60)
        assert max(difference(a, b) for a, b in zip(native, got, strict=True)) < 1e-3
        assert tight.connector.errors == 0
        assert not tight.half._tracked
        tight.forget_gpu()


def test_abort_leaks_nothing(cached: Engine) -> None:
    from vllm import SamplingParams

    long = prompt(600, 60)
    want = cached.generate([long])[0]
    cached.forget_gpu()
    core = cached.llm.llm_engine
    for steps in range(6):
        core.add_request(
            f"abort-{steps}", {"prompt_token_ids": long}, SamplingParams(max_tokens=50)
        )
        for _ in range(steps):
            core.step()
        inner = list(cached.core.scheduler.requests)
        core.abort_request(inner, internal=True)
        cached.settle()
        assert not cached.half._tracked
        assert not cached.half.loads.between_steps()
        assert not cached.core.scheduler.requests
        cached.forget_gpu()
    assert difference(want, cached.generate([long])[0]) == 0
    assert cached.connector.errors == 0


def test_reset_of_the_store(cached: Engine) -> None:
    tokens = prompt(300, 70)
    cold = cached.generate([tokens])[0]
    cached.settle()
    assert cached.llm.reset_prefix_cache(reset_connector=True)
    again = cached.generate([tokens])[0]
    assert again[2] == 0
    assert difference(cold, again) == 0
    cached.forget_gpu()
    assert cached.generate([tokens])[0][2] == 256
