"""Two engines, each in a process of its own, on one directory and one pool."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_engine import ROOT

SCRIPT = """
import json, sys
from vllm_engine import engine, prompt
places, rounds = json.loads(sys.argv[1]), int(sys.argv[2])
with engine({**places, "cpu_bytes": "32MiB", "disk_capacity_bytes": "64MiB"}) as cached:
    found = []
    for _ in range(rounds):
        for seed in range(80, 84):
            tokens, _, hit = cached.generate([prompt(300, seed)])[0]
            found.append([seed, tokens, hit])
            cached.forget_gpu()
    print("RESULT" + json.dumps([found, cached.connector.errors]))
"""


def start(places: dict[str, str], rounds: int) -> subprocess.Popen[str]:
    path = [str(ROOT / "python"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, json.dumps(places), str(rounds)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        stdout=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen[str]) -> tuple[list[tuple[int, list[int], int]], int]:
    try:
        out, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    line = next(line for line in out.splitlines() if line.startswith("RESULT"))
    found, errors = json.loads(line.removeprefix("RESULT"))
    return found, errors


@pytest.mark.multiprocess
def test_two_engines_share(places: dict[str, str]) -> None:
    Path(places["ram_dir"]).mkdir(parents=True)
    answers: dict[int, list[int]] = {}
    both = [start(places, 3), start(places, 3)]
    for process in both:
        found, errors = result(process)
        assert errors == 0
        assert any(hit == 256 for _, _, hit in found)
        for seed, tokens, _ in found:
            assert answers.setdefault(seed, tokens) == tokens
    # A third finds all of it from its first request on.
    found, errors = result(start(places, 1))
    assert errors == 0
    assert [hit for _, _, hit in found] == [256] * 4
    assert all(answers[seed] == tokens for seed, tokens, _ in found)
