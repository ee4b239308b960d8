"""Engines that are not served run as if LakeCache were not there."""

from __future__ import annotations

import pytest

from vllm_engine import difference, engine, prompt


def test_random_hashes_stay_in_the_process(
    places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    tokens = prompt(300, 8)
    settings = {"prefix_caching_hash_algo": "xxhash"}
    pytest.importorskip("xxhash")
    with engine(places, **settings) as first:
        cold = first.generate([tokens])[0]
        first.forget_gpu()
        assert first.generate([tokens])[0][2] == 256
    with engine(places, **settings) as second:
        again = second.generate([tokens])[0]
        assert again[2] == 0
        assert difference(cold, again) == 0


def test_a_declined_engine_runs(places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from lakecache import connector

    monkeypatch.setattr(connector, "declined_reason", lambda *_, **__: "a reason")
    with engine(places) as inert:
        assert inert.half is None
        first = inert.generate([prompt(300, 9)])[0]
        inert.forget_gpu()
        second = inert.generate([prompt(300, 9)])[0]
        assert second[2] == 0
        assert difference(first, second) == 0


def test_wrong_settings_stop_the_start(places: dict[str, str]) -> None:
    with pytest.raises(Exception, match="cache_dir"), engine({**places, "cachedir": "x"}):
        pass
