"""A hybrid with a multi-token prediction head on a GPU: hits with speculation, never wrong ones.

What is restored has to agree with the first run, as in `test_gpu_hybrid.py`, and answers have to be
those of an engine that does not speculate.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from site_engines import DEVICE, Answer, Engine, Site, difference, engines, external, prompt

import mtp_model

pytestmark = [
    pytest.mark.gpu if DEVICE == "cuda" else pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.timeout(540),
]

UNIT = 16
TOLERANCE = 0.02
# Speculation computes tokens in forwards of other shapes: two that are as likely may change places.
TIE = 0.1
LENGTHS = [200, 600, 1153, 2500]
PROMPTS = [prompt(800 + number, length) for number, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def speculating() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


def prepare(site: Site, name: str, *, speculates: bool, bare: bool = False) -> engines.Host:
    """An engine, `bare` without connector, that is still to be started."""
    settings = {
        "prefix_match_unit": UNIT,
        "additional_config": {"gdn_prefill_backend": "triton"} if DEVICE == "cuda" else {},
    }
    if speculates:
        settings["speculative_config"] = mtp_model.SPECULATIVE
    host = site.engine(name, "mtp", "mtp", settings, verify_load=True)
    config = host.spec["engine"]["kv_transfer_config"]
    if bare:
        del host.spec["engine"]["kv_transfer_config"]
    elif speculates and DEVICE == "cpu":
        config["kv_connector_module_path"] = "connector_on_cpu"
    return host


def start(site: Site, *hosts: engines.Host) -> list[Engine]:
    """Start engines together."""
    for host in hosts:
        host.spawn()
    found = [Engine(host.wait()) for host in hosts]
    site.running = {engine.host.name: engine for engine in found}
    return found


def skip_where_vllm_fails(site: Site, failed: engines.EngineError) -> None:
    """Skip, if vLLM without any connector fails to speculate too."""
    site.stop()
    engines.stop_all()
    try:
        (bare,) = start(site, prepare(site, "bare", speculates=True, bare=True))
        bare.ask(PROMPTS[0])
    except engines.EngineError as error:
        pytest.skip(f"vLLM itself does not run the head here: {error}")
    raise failed


def assert_same_but_for_ties(plain: Answer, answer: Answer) -> None:
    for place, (wanted, got) in enumerate(zip(plain["tokens"], answer["tokens"], strict=True)):
        if wanted != got:
            table = plain["logprobs"][place]
            assert table[str(wanted)] - table.get(str(got), float("-inf")) < TIE, place
            return


def assert_restored(computed: list[Answer], restored: list[Answer], noise: float) -> None:
    for length, first, answer in zip(LENGTHS, computed, restored, strict=True):
        assert external(answer) == mtp_model.deepest(length, UNIT) > 0, length
        assert difference(first, answer) <= max(noise, TOLERANCE), length


def test_speculation_keeps_its_hits(speculating: Site) -> None:
    site = speculating
    try:
        plain, engine = start(
            site,
            prepare(site, "plain", speculates=False, bare=True),
            prepare(site, "mtp", speculates=True),
        )
        cold = engine.ask(*PROMPTS)
    except engines.EngineError as error:
        skip_where_vllm_fails(site, error)
    for alone, answer in zip(plain.ask(*PROMPTS), cold, strict=True):
        assert answer["cached"] == 0
        assert_same_but_for_ties(alone, answer)
    natives = engine.ask(*PROMPTS)
    engine.forget_gpu()
    memory = engine.ask(*PROMPTS)
    engine.forget_gpu()
    noise = max(difference(a, b) for a, b in zip(memory, engine.ask(*PROMPTS), strict=True))
    assert noise < 0.1
    assert [answer["cached"] for answer in natives] == [answer["cached"] for answer in memory]
    assert_restored(cold, memory, noise)
    assert engine.count("loads_failed") == engine.count("errors") == 0
    site.stop()
    (engine,) = start(site, prepare(site, "mtp", speculates=True))
    disk = engine.ask(*PROMPTS)
    assert_restored(cold, disk, noise)
    assert engine.count("loaded_tokens_disk") > 0
    assert engine.count("loads_failed") == engine.count("errors") == 0
    with_natives = [difference(*pair) for pair in zip(natives, disk, strict=True)]
    print(f"noise {noise:.3g}; against vLLM's own hits {with_natives}", flush=True)
