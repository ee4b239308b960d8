"""Models that the chunk connector does not serve: one clear sentence, and the answers of vLLM."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import vllm_models
from vllm_engine import CHUNK, difference, engine, prompt

REFUSED = "LakeCache does nothing in this engine"
SETTINGS: dict[str, Any] = {"connector": "MiniCacheConnector", "kv_bytes": 128 << 20}


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Give the folder of a model, which is made when it is first asked for."""
    root = tmp_path_factory.mktemp("models")

    def folder(name: str) -> str:
        if not (root / name).exists():
            vllm_models.RECIPES[name](root / name)
        return str(root / name)

    return folder


@pytest.fixture
def sentences(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What LakeCache warns of. Starting an engine resets vLLM's loggers, so they can't be used."""
    from lakecache import connector

    said: list[str] = []
    monkeypatch.setattr(connector.log, "warning", lambda text, *more: said.append(text % more))
    return said


@pytest.mark.parametrize(
    ("name", "says", "settings"),
    [
        ("sliding", "sliding_window", {}),
        ("interleaved", "2 KV cache groups", {}),
        ("hybrid", "KV cache groups", {"dtype": "bfloat16"}),
    ],
)
def test_one_sentence_and_the_right_answer(
    places: dict[str, str], made: Any, sentences: list[str], name: str, says: str, settings: Any
) -> None:
    tokens = prompt(300, 31)
    folder = made(name)
    with engine(None, model=folder, **{**SETTINGS, **settings}) as plain:
        want = plain.generate([tokens])[0]
    with engine(places, model=folder, **SETTINGS, **settings) as refused:
        assert refused.half is None
        got = [refused.generate([tokens])[0]]
        refused.forget_gpu()
        got.append(refused.generate([tokens])[0])
        assert [answer[2] for answer in got] == [0, 0]
        assert max(difference(want, answer) for answer in got) == 0
        assert refused.connector.errors == 0
    (sentence,) = sentences
    assert REFUSED in sentence
    assert says in sentence
    assert "full attention" in sentence
    # It was refused before anything was made.
    assert not list(Path(places["cache_dir"]).glob("**/*.kv"))


def test_windows_without_the_hybrid_manager_are_served(
    places: dict[str, str], made: Any, sentences: list[str]
) -> None:
    """vLLM then keeps the KV of every token in every layer, as for full attention."""
    tokens = prompt(300, 32)
    settings = {**SETTINGS, "disable_hybrid_kv_cache_manager": True}
    with engine(places, model=made("interleaved"), **settings) as cached:
        cold = cached.generate([tokens])[0]
        cached.forget_gpu()
        hit = cached.generate([tokens])[0]
        assert (cold[2], hit[2]) == (0, 300 // CHUNK * CHUNK)
        assert difference(cold, hit) == 0
    assert sentences == []


def test_encoder_decoder(
    places: dict[str, str], made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM itself takes no connector there, and says so."""
    if importlib.util.find_spec("blake3") is None:
        # Only names the audio that vLLM profiles with.
        stand_in = types.ModuleType("blake3")
        monkeypatch.setattr(stand_in, "blake3", hashlib.sha256, raising=False)
        monkeypatch.setitem(sys.modules, "blake3", stand_in)
    with (
        pytest.raises(Exception, match="Encoder-decoder models are not currently supported"),
        engine(places, model=made("encoder_decoder"), max_model_len=448, **SETTINGS),
    ):
        pass
