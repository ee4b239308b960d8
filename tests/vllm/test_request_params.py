"""A request that says that it is not to be stored, or not to be loaded, on real vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid_engine import deepest, hybrid
from vllm_engine import Engine, difference, engine, prompt

LENGTH = 300
# To where the hit of a chunk, or of a checkpoint, ends.
KINDS = [(engine, 256), (hybrid, deepest(LENGTH))]
NOT_STORED = {"lakecache.store": False}
NOT_LOADED = {"lakecache.load": False}


def objects(cached: Engine) -> tuple[int, int, int]:
    """What was stored, what is found in memory, and the files."""
    found = cached.half._cache.stats()
    files = list(Path(cached.half._config.cache_dir).rglob("*.kv"))
    return cached.half.total("stores"), found["memory_entries"], len(files)


@pytest.mark.parametrize(("make", "hit"), KINDS, ids=["dense", "hybrid"])
def test_of_one_request(places: dict[str, str], make: Callable[..., Any], hit: int) -> None:
    tokens = prompt(LENGTH, 5)
    settings = {**places, "cpu_bytes": "64MiB", "save_decode": True}
    with make(settings, max_num_seqs=8) as cached:

        def ask(params: Any = None, answer: int = 80) -> Any:
            cached.forget_gpu()
            return cached.generate([tokens], tokens=answer, params=params)[0]

        private = ask(NOT_STORED)
        # What a client misspells is not stored either.
        misspelt = ask({"lakecache.stored": False})
        assert objects(cached) == (0, 0, 0)
        cold = ask()
        assert private[2] == misspelt[2] == cold[2] == 0
        assert difference(cold, private) == difference(cold, misspelt) == 0
        stores, in_memory, files = objects(cached)
        assert stores == in_memory == files > 0
        computed = ask(NOT_LOADED)
        assert computed[2] == 0
        assert difference(cold, computed) == 0
        restored = ask(NOT_STORED)
        assert restored[2] == hit
        assert objects(cached) == (stores, in_memory, files)
        assert cached.half.total("loads") == 1
        assert cached.half.total("requests_not_stored") == 3
        assert cached.half.total("requests_not_loaded") == 1
        assert cached.half.total("params_refused") == 1
        assert cached.connector.errors == 0
        assert not cached.half._tracked
