"""Files and directories that are damaged or taken away under a running engine: misses, no more."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

from vllm_engine import Engine, difference, engine, prompt

HIT = 256
RECOVERY_SECONDS = 30


def mangle(directory: str) -> int:
    """Make each file something else: empty, cut, a pipe that nobody writes to, a link, a folder."""
    files = sorted(Path(directory).rglob("*.kv"))
    for number, file in enumerate(files):
        kind = number % 5
        if kind < 2:
            os.truncate(file, 5000 * kind)
            continue
        file.unlink()
        if kind == 2:
            os.mkfifo(file)
        elif kind == 3:
            file.symlink_to("nowhere")
        else:
            file.mkdir()
    return len(files)


def answers(cached: Engine, prompts: list[list[int]]) -> list[Any]:
    cached.forget_gpu()
    return [cached.generate([tokens])[0] for tokens in prompts]


def worst(one: list[Any], other: list[Any]) -> float:
    return max(difference(a, b) for a, b in zip(one, other, strict=True))


def test_taken_away_while_running(places: dict[str, str]) -> None:
    prompts = [prompt(300, seed) for seed in range(4)]
    with engine({**places, "cpu_bytes": "32MiB"}) as cached:
        want = answers(cached, prompts)

        assert mangle(places["cache_dir"]) == 16
        cached.forget_gpu()
        cached.forget_memory()
        got = answers(cached, prompts)
        assert worst(want, got) == 0
        assert all(answer[2] < HIT for answer in got)
        # What was damaged was computed, so it is stored again, whatever lies in its place.
        deadline = time.monotonic() + RECOVERY_SECONDS
        while [answer[2] for answer in answers(cached, prompts)] != [HIT] * 4:
            assert time.monotonic() < deadline, "what was damaged is never stored again"

        # Dates say nothing.
        for number, file in enumerate(sorted(Path(places["cache_dir"]).rglob("*.kv"))):
            os.utime(file, (0, 0) if number % 2 else (4e9, 4e9), follow_symlinks=False)
        assert worst(want, answers(cached, prompts)) == 0

        # Without names, the pool lives on in the processes that have it open.
        shutil.rmtree(places["ram_dir"])
        got = answers(cached, prompts)
        assert [answer[2] for answer in got] == [HIT] * 4
        assert worst(want, got) == 0
        others = [prompt(300, seed) for seed in range(10, 14)]
        fresh = answers(cached, others)
        assert worst(fresh, answers(cached, others)) == 0

        shutil.rmtree(places["cache_dir"])
        cached.forget_gpu()
        cached.forget_memory()
        got = answers(cached, prompts)
        assert worst(want, got) == 0
        # Memory goes on without the disk.
        assert [answer[2] for answer in answers(cached, prompts)] == [HIT] * 4
        assert cached.connector.errors == 0
        assert not cached.half._tracked
        assert not cached.half.loads.between_steps()
