"""Hybrid models: a restored checkpoint answers as vLLM's own hit at the same position.

One engine serves most tests. Its steps take at most 100 tokens, no multiple of its block of 64, so
prompts are cut in many places.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_engine import MODEL, Engine, Result, difference, engine, prompt

DENSE, MOE = (MODEL.parent / name for name in ("qwen35-tiny", "qwen35-moe-tiny"))
UNIT = 16
HEADER_BYTES = 4096


def hybrid(extra: dict[str, Any] | None, model: Path = DENSE, **settings: Any) -> Any:
    if not (model / "config.json").exists():
        pytest.skip(f"{model} is missing: make prepares it")
    wanted = {
        "model": str(model), "dtype": "bfloat16", "prefix_match_unit": UNIT,
        "max_num_batched_tokens": 100,
    }  # fmt: skip
    return engine(extra, **{**wanted, **settings})


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


def deepest(length: int) -> int:
    return (length - 1) // UNIT * UNIT


def one(cached: Engine, tokens: list[int], answer: int = 6) -> Result:
    return cached.generate([tokens], tokens=answer)[0]


def files(cached: Engine) -> set[Path]:
    return set(Path(cached.half._config.cache_dir).rglob("*.kv"))


def forget_since(cached: Engine, before: set[Path]) -> None:
    """Empty both memories, and remove what was stored after `before`."""
    cached.forget_gpu()
    cached.forget_memory()
    for file in files(cached) - before:
        file.unlink()


def test_memory_and_disk_answer_as_a_native_hit(cached: Engine) -> None:
    for length in (2, UNIT, UNIT + 1, 63, 64, 65, 80, 128, 129, 333):
        tokens = prompt(length, length)
        cold = one(cached, tokens)
        native = one(cached, tokens)
        cached.forget_gpu()
        memory = one(cached, tokens)
        cached.forget_gpu()
        cached.forget_memory()
        disk = one(cached, tokens)
        assert cold[2] == 0
        assert native[2] == memory[2] == disk[2] == deepest(length), length
        assert difference(native, memory) == difference(native, disk) == 0, length
    assert cached.half.total("loaded_tokens_disk") > 0
    assert cached.half.total("loaded_tokens_memory") > 0


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
        assert not cached.half._offers
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


def flip(file: Path, part_bytes: dict[int, int]) -> bool:
    """Change the exponents of a state's numbers; False for files of other objects."""
    data = bytearray(file.read_bytes())
    if len(data) - HEADER_BYTES < part_bytes[1]:
        return False
    for at in range(HEADER_BYTES + 3, HEADER_BYTES + part_bytes[1], 4):
        data[at] ^= 0x40
    file.write_bytes(data)
    return True


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


def test_restart_and_damage_without_checksums(places: dict[str, str]) -> None:
    tokens = prompt(333, 1)
    with hybrid(places, connector="HybridCheckpointConnector") as first:
        cold = one(first, tokens)
        native = one(first, tokens)
    with hybrid({**places, "checksum": "off"}) as second:
        restored = one(second, tokens)
        assert restored[2] == native[2] == deepest(333)
        assert difference(native, restored) == 0
        assert difference(cold, restored) == 0
        sizes = second.half.part_bytes
        assert sum(flip(file, sizes) for file in files(second)) == 1
        second.forget_gpu()
        second.forget_memory()
        damaged = one(second, tokens)
        assert damaged[2] == deepest(333)
        assert difference(native, damaged) > 0.1


def test_experts_and_whole_blocks_only(places: dict[str, str]) -> None:
    """Without `prefix_match_unit` there are states at the ends of blocks alone; here vLLM keeps
    them all, and of those in between the ones at least 100 tokens apart are wanted.
    """
    settings = {"prefix_match_unit": None, "prefix_cache_retention_interval": None}
    with hybrid({**places, "checkpoint_tokens": 100}, MOE, **settings) as cached:
        block = cached.half.block
        for length in (block, block + 1, 333):
            tokens = prompt(length, length)
            one(cached, tokens)
            native = one(cached, tokens)
            cached.forget_gpu()
            memory = one(cached, tokens)
            cached.forget_gpu()
            cached.forget_memory()
            disk = one(cached, tokens)
            assert native[2] == memory[2] == disk[2] == (length - 1) // block * block
            assert difference(native, memory) == difference(native, disk) == 0
        found = {}
        for length in (333, 270, 200, 150, 100):
            cached.forget_gpu()
            found[length] = one(cached, tokens[:length], 1)[2]
        assert found == {100: 0, 150: 128, 200: 128, 270: 256, 333: 320}
        assert cached.connector.errors == 0


def test_preemption(places: dict[str, str]) -> None:
    prompts = [prompt(100, seed) for seed in range(50, 58)]
    # Room for the beginning of about four of the eight requests, and not for their ends.
    with hybrid(places, num_gpu_blocks_override=44, max_model_len=512) as tight:
        preemptions: list[str] = []
        preempt = tight.core.scheduler._preempt_request

        def note(request: Any, *rest: Any, **more: Any) -> None:
            preemptions.append(request.request_id)
            preempt(request, *rest, **more)

        tight.core.scheduler._preempt_request = note
        tight.generate(prompts, tokens=220)
        assert preemptions
        assert tight.connector.errors == 0
        assert not tight.half._tracked
        assert not tight.half._offers
        for tokens in prompts:
            tight.forget_gpu()
            got = one(tight, tokens)
            native = one(tight, tokens)
            assert got[2] == native[2] == deepest(100)
            assert difference(native, got) == 0


@pytest.mark.multiprocess
def test_two_ranks(places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    tokens = prompt(300, 6)
    with hybrid(places, tensor_parallel_size=2) as pair:
        assert pair.connector.declined is None
        one(pair, tokens)
        native = one(pair, tokens)
        pair.forget_gpu()
        memory = one(pair, tokens)
        pair.forget_gpu()
        pair.forget_memory()
        disk = one(pair, tokens)
        assert native[2] == memory[2] == disk[2] == deepest(300)
        assert difference(native, memory) == difference(native, disk) == 0
