"""Restarts: the pool of the last engine is adopted, and without it the files are there.

The same four engines show what `verify_load` is for: bytes that change in shared memory.
"""

from __future__ import annotations

import mmap
import shutil
from pathlib import Path

import pytest

from vllm_engine import Engine, difference, engine, prompt

HEADER_BYTES = 4096
PAGE = 4096
HIT = 256


def pools(places: dict[str, str]) -> list[Path]:
    return list(Path(places["ram_dir"]).rglob("pool"))


def damage_memory(places: dict[str, str]) -> int:
    """Flip the highest exponent bit of every float in one page of each object in the pool."""
    (pool,) = pools(places)
    hurt = 0
    with pool.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for stored in Path(places["cache_dir"]).rglob("*.kv"):
            data = stored.read_bytes()
            page = data[HEADER_BYTES : HEADER_BYTES + PAGE]
            at = memory.find(page)
            if at < 0:
                continue
            for byte in range(at + 3, at + PAGE, 4):
                memory[byte] ^= 0x40
            hurt += 1
    return hurt


def sources(cached: Engine) -> tuple[int, int]:
    return (
        cached.half.total("loaded_tokens_memory"),
        cached.half.total("loaded_tokens_disk"),
    )


@pytest.mark.timeout(400)
def test_adoption_and_verification(places: dict[str, str]) -> None:
    tokens = prompt(300, 41)
    checking = {**places, "verify_load": True}
    with engine(checking) as first:
        cold = first.generate([tokens])[0]
        first.forget_gpu()
        memory = first.generate([tokens])[0]
        first.forget_gpu()
        first.forget_memory()
        disk = first.generate([tokens])[0]
        assert (cold[2], memory[2], disk[2]) == (0, HIT, HIT)
        assert difference(cold, memory) == difference(cold, disk) == 0
        assert sources(first) == (HIT, HIT)
        assert first.half.total("loads_failed") == 0

    with engine(places) as adopting:
        kept = adopting.generate([tokens])[0]
        assert (kept[2], *sources(adopting)) == (HIT, HIT, 0)
        assert difference(cold, kept) == 0
        assert damage_memory(places) == 4
        # Nothing looks at the bytes in memory, so the damage shows: the next engine's check is
        # what helps there.
        adopting.forget_gpu()
        assert difference(cold, adopting.generate([tokens])[0]) > 0.1

    with engine(checking) as refusing:
        for found in ((0, HIT), (HIT, HIT)):
            got = refusing.generate([tokens])[0]
            assert difference(cold, got) == 0
            assert refusing.half.total("loads_failed") == 1
            # The copies in memory are dropped: the files are read once, and serve from then on.
            assert (sources(refusing)[0] - HIT, sources(refusing)[1]) == found
            refusing.forget_gpu()
        assert refusing.half._cache.stats()["memory_objects_damaged"] == 4
        assert not refusing.half._tracked
        assert refusing.connector.errors == 0

    for pool in pools(places):
        shutil.rmtree(pool.parent)
    with engine(places) as again:
        got = again.generate([tokens])[0]
        assert (got[2], *sources(again)) == (HIT, 0, HIT)
        assert difference(cold, got) == 0


def test_an_engine_that_ends_at_once_loses_nothing(places: dict[str, str]) -> None:
    """In one process vLLM takes no step after the last token, and the chunks have no slots yet."""
    from vllm import SamplingParams

    tokens = prompt(300, 43)
    with engine(places) as first:
        sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        first.llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        assert first.half.chunk_saver.backlog
        assert not first.half.saves
    with engine(places) as second:
        second.generate([tokens])
        assert sources(second) == (HIT, 0)
