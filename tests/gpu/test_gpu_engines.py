"""Real vLLM on a GPU, random checkpoints: what is restored answers as what was computed.

The tests run in the order of this file: those of the first generation of engines, then a restart.
"""

from __future__ import annotations

import pytest
from site_engines import BLOCK, CHUNK, DEVICE, Answer, Engine, Site, difference, external, prompt

pytestmark = [
    pytest.mark.gpu if DEVICE == "cuda" else pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.timeout(540),
]
MODELS = ["pinned", "mla"]

# Ten tokens behind a chunk: a native hit and a restored one compute the same ten tokens, in a
# forward of the same shape, so that they can agree to the last bit.
LENGTHS = [CHUNK + 10, 3 * CHUNK + 10, 9 * CHUNK + 10]
PROMPTS = {seed: prompt(seed, length) for seed, length in enumerate(LENGTHS, start=1)}
SYNC_SEED = 50


def native_noise(one: list[Answer], other: list[Answer]) -> float:
    """What two native runs of the same prompts differ by."""
    return max(difference(a, b) for a, b in zip(one, other, strict=True))


def assert_restored(
    natives: list[Answer], restored: list[Answer], noise: float, tokens: int | None = None
) -> None:
    for native, answer in zip(natives, restored, strict=True):
        assert external(answer) > 0, "nothing was restored"
        if tokens is not None:
            assert external(answer) == tokens
        assert difference(native, answer) <= noise


@pytest.mark.parametrize("name", MODELS)
def test_memory_answers_as_a_native_hit(site: Site, name: str) -> None:
    engine = site.start(1)[name]
    prompts = list(PROMPTS.values())
    cold = engine.ask(*prompts)
    natives = engine.ask(*prompts)
    noise = native_noise(natives, engine.ask(*prompts))
    assert [answer["cached"] for answer in cold] == [0] * len(prompts)
    engine.forget_gpu()
    restored = engine.ask(*prompts)
    assert_restored(natives, restored, noise)
    for length, answer in zip(LENGTHS, restored, strict=True):
        assert external(answer) == length // CHUNK * CHUNK
    assert noise < 0.5
    assert engine.count("loads_failed") == engine.count("errors") == 0
    site.answers[name] = natives
    site.answers[f"{name} cold"] = cold


def test_odd_lengths(site: Site) -> None:
    engine = site.start(1)["pinned"]
    for number, length in enumerate(
        [1, BLOCK, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + BLOCK + 1]
    ):
        tokens = prompt(100 + number, length)
        (cold,) = engine.ask(tokens)
        engine.forget_gpu()
        (restored,) = engine.ask(tokens)
        assert restored["tokens"] == cold["tokens"], length
        hit = min(length // CHUNK * CHUNK, length - 1)
        assert external(restored) == (hit if length >= CHUNK else 0), length
    assert engine.count("loads_failed") == 0


def test_load_while_others_decode(site: Site) -> None:
    engine = site.start(1)["pinned"]
    natives = site.answers["pinned"]
    engine.forget_gpu()
    seen = engine.call(
        "decode", streams=8, tokens=60, prompt=40, seed=200, at=10, intruders=[1, 2],
        length=3 * CHUNK + 10,
    )  # fmt: skip
    assert len(seen["answered_ms"]) == 2
    engine.call("settle")
    engine.forget_gpu()
    again = engine.ask(*PROMPTS.values())
    assert_restored(natives, again, native_noise(natives, engine.ask(*PROMPTS.values())))


def test_abort_during_load(site: Site) -> None:
    engine = site.start(1)["pinned"]
    prompts = list(PROMPTS.values())
    engine.forget_gpu()
    for steps in (0, 1, 3):
        finished = engine.call("abort_after", prompts=prompts * 2, steps=steps)
        assert finished >= len(prompts)
        engine.call("settle")
        engine.forget_gpu()
    restored = engine.ask(*prompts)
    natives = engine.ask(*prompts)
    assert_restored(natives, restored, native_noise(natives, engine.ask(*prompts)))
    assert engine.count("errors") == 0


def test_preemption(site: Site) -> None:
    engine = site.start(1)["tight"]
    prompts = [prompt(300 + number, CHUNK + 10) for number in range(12)]
    answered = engine.call("together", prompts=prompts, max_tokens=100)
    assert [len(tokens) for tokens in answered] == [100] * len(prompts)
    engine.call("settle")
    for tokens in prompts[::4]:
        engine.forget_gpu()
        (restored,) = engine.ask(tokens)
        (native,) = engine.ask(tokens)
        assert_restored([native], [restored], native_noise([native], engine.ask(tokens)))
    assert engine.count("errors") == engine.count("loads_failed") == 0


def test_decoded_tokens_are_saved(site: Site) -> None:
    engine = site.start(1)["tight"]
    engine.forget_gpu()
    start = prompt(400, CHUNK + 10)
    (spoken,) = engine.ask(start, tokens=CHUNK + 20)
    longer = start + spoken["tokens"][: CHUNK + 5]
    (native,) = engine.ask(longer)
    noise = native_noise([native], engine.ask(longer))
    engine.forget_gpu()
    (restored,) = engine.ask(longer)
    assert external(restored) >= 2 * CHUNK
    assert difference(native, restored) <= max(noise, 0.1)
    assert engine.count("loads_failed") == 0


def test_flipped_bytes_in_memory_are_refused(site: Site) -> None:
    engine = site.start(1)["tight"]
    tokens = prompt(500, 2 * CHUNK + 10)
    engine.ask(tokens)
    (native,) = engine.ask(tokens)
    noise = native_noise([native], engine.ask(tokens))
    assert site.flip_in_memory("tight") >= 2
    engine.forget_gpu()
    (answer,) = engine.ask(tokens)
    assert engine.count("loads_failed") > 0
    # What memory got wrong is right on disk, and is loaded from there.
    assert answer["cached"] == 2 * CHUNK
    assert difference(native, answer) <= noise


# From here on the engines are restarted, and the pools are gone.


@pytest.mark.parametrize("name", MODELS)
def test_disk_answers_as_a_native_hit(site: Site, name: str) -> None:
    engine = site.start(2)[name]
    natives = site.answers[name]
    restored = engine.ask(*PROMPTS.values())
    noise = native_noise(natives, engine.ask(*PROMPTS.values()))
    assert_restored(natives, restored, noise)
    assert engine.count("loaded_tokens_disk") > 0
    assert engine.count("loads_failed") == engine.count("errors") == 0


def ask_cold_and_again(engine: Engine, seed: int) -> tuple[Answer, Answer]:
    (cold,) = engine.ask(prompt(seed, 3 * CHUNK + 10))
    (native,) = engine.ask(prompt(seed, 3 * CHUNK + 10))
    return cold, native


def test_sync_and_pinned_read_each_other(site: Site) -> None:
    running = site.start(2)
    pinned, sync = running["pinned"], running["sync"]
    restored = sync.ask(*PROMPTS.values())
    natives = site.answers["pinned"]
    assert_restored(natives, restored, native_noise(natives, sync.ask(*PROMPTS.values())))
    for writer, reader, seed in ((sync, pinned, SYNC_SEED), (pinned, sync, SYNC_SEED + 1)):
        _, native = ask_cold_and_again(writer, seed)
        (answer,) = reader.ask(prompt(seed, 3 * CHUNK + 10))
        assert external(answer) == 3 * CHUNK
        assert difference(native, answer) == 0
    for engine in (pinned, sync):
        assert engine.count("loads_failed") == engine.count("errors") == 0


def test_flipped_bytes_on_disk_are_refused(site: Site) -> None:
    running = site.start(2)
    engine = running["pinned"]
    (cold,) = engine.ask(prompt(600, 2 * CHUNK + 10))
    site.stop()
    assert site.flip_on_disk("qwen3") > 0
    host = site.engine("damaged", "qwen3", "qwen3")
    host.spawn()
    engine = Engine(host.wait())
    site.running = {"damaged": engine}
    (answer,) = engine.ask(prompt(600, 2 * CHUNK + 10))
    assert answer["tokens"] == cold["tokens"]
    assert engine.count("loads_failed") > 0
    assert engine.count("errors") == 0
