"""Requests with LoRA adapters: real files, and a stand-in for the cache."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from fakes import core as fake
from fakes.scheduler import Bench, Request

FULL = 255


def lora(path: Path, name: str = "tuned", number: int = 1, **more: Any) -> Any:
    return SimpleNamespace(
        lora_name=name, lora_int_id=number, lora_path=str(path), load_inplace=False, **more
    )


def write(path: Path, content: bytes) -> Path:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text('{"r": 8}')
    (path / "adapter_model.safetensors").write_bytes(content)
    return path


@pytest.fixture
def make_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Engines that start one after the other on one directory."""
    fake.pools.clear()
    return lambda: Bench(monkeypatch, tmp_path)


def ready(bench: Bench, adapter: Any) -> bool:
    deadline = time.monotonic() + 20
    while bench.half.spaces.of(adapter) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return bench.half.spaces.of(adapter) is not None


def store(bench: Bench, adapter: Any) -> None:
    request = Request(256, lora_request=adapter)
    bench.half.matched(request, 0)
    bench.allocate(request, 0)
    bench.acknowledge(bench.compute(request, 256))
    bench.half.finished(request.request_id)


def hit(bench: Bench, adapter: Any) -> int | None:
    request = Request(256, lora_request=adapter)
    tokens, _ = bench.half.matched(request, 0)
    bench.half.finished(request.request_id)
    return tokens


def test_unread_files_are_a_miss(make_bench: Any, tmp_path: Path) -> None:
    bench = make_bench()
    adapter = lora(tmp_path / "nothing")
    assert hit(bench, adapter) == 0
    store(bench, adapter)
    assert not bench.cache.pool.slots
    # That one adapter cannot be read says nothing about the others.
    assert ready(bench, lora(write(tmp_path / "a", b"1"), "other", 2))


def test_content_decides(make_bench: Any, tmp_path: Path) -> None:
    bench = make_bench()
    place = write(tmp_path / "a", b"one")
    assert ready(bench, lora(place))
    store(bench, lora(place))
    assert hit(bench, lora(place)) == FULL
    assert hit(bench, None) == 0

    write(place, b"two")
    other = make_bench()
    assert ready(other, lora(place))
    assert hit(other, lora(place)) == 0
    store(other, lora(place))

    write(place, b"one")
    again = make_bench()
    assert ready(again, lora(place))
    assert hit(again, lora(place)) == FULL
    copy = write(tmp_path / "b", b"one")
    assert ready(again, lora(copy, number=2))
    # Name and path are vLLM's business: its block hashes hold them, which are equal here.
    assert hit(again, lora(copy, number=2)) == FULL


def test_the_model_alone_is_not_mistaken_for_an_adapter(make_bench: Any, tmp_path: Path) -> None:
    bench = make_bench()
    place = write(tmp_path / "a", b"one")
    bench.store(256)
    assert ready(bench, lora(place))
    assert hit(bench, None) == FULL
    assert hit(bench, lora(place)) == 0


@pytest.mark.parametrize("change", [{"load_inplace": True}, {"lora_int_id": 2}])
def test_an_adapter_that_was_loaded_anew_is_left_alone(
    make_bench: Any, tmp_path: Path, change: dict[str, Any]
) -> None:
    """vLLM's own prefix cache may still hold blocks of the first content under the same hashes."""
    bench = make_bench()
    place = write(tmp_path / "a", b"one")
    adapter = lora(place)
    assert ready(bench, adapter)
    store(bench, adapter)
    write(place, b"two")
    renewed = lora(place)
    vars(renewed).update(change)
    assert hit(bench, renewed) == 0
    store(bench, renewed)
    # Not even as before: requests that say nothing of it come to the new weights, too.
    assert hit(bench, adapter) == 0
    assert len(bench.cache.pool.slots) == 4
    assert hit(bench, None) == 0
