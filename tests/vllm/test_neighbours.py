"""Engines beside each other: one is stopped, one is killed, one has other weights.

Each is a process of its own on one directory and one pool; the parent says what to ask, and
compares the answers of all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_engine import MODEL, ROOT

CPU_BYTES = 32 << 20
DISK_BYTES = 24 << 20
START_SECONDS = 150
ANSWER_SECONDS = 60

CHILD = """
import json, sys
from vllm_engine import engine, prompt
extra, model = json.loads(sys.argv[1]), sys.argv[2]
with engine(extra, model=model) as cached:
    print("RESULTready", flush=True)
    for line in sys.stdin:
        answers = []
        for seed in json.loads(line):
            tokens, logprobs, hit = cached.generate([prompt(300, seed)])[0]
            chosen = [step[token] for step, token in zip(logprobs, tokens)]
            answers.append([seed, tokens, chosen, hit])
            cached.forget_gpu()
        print("RESULT" + json.dumps([answers, cached.connector.errors]), flush=True)
"""


class Neighbour:
    """An engine in a process of its own."""

    def __init__(self, extra: dict[str, Any], model: Path = MODEL) -> None:
        path = [str(ROOT / "python"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, json.dumps(extra), str(model)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.said: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("RESULT"):
                self.said.put(line.removeprefix("RESULT").strip())

    def ready(self) -> Neighbour:
        assert self.said.get(timeout=START_SECONDS) == "ready"
        return self

    def tell(self, seeds: list[int]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(seeds) + "\n")
        self.process.stdin.flush()

    def hear(self) -> list[tuple[int, list[int], list[float], int]]:
        answers, errors = json.loads(self.said.get(timeout=ANSWER_SECONDS))
        assert errors == 0
        return answers

    def ask(self, seeds: list[int]) -> list[tuple[int, list[int], list[float], int]]:
        self.tell(seeds)
        return self.hear()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(timeout=30)


class Book:
    """Every answer so far: one prompt has one answer, wherever it is asked and from wherever."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[list[int], list[float]]] = {}

    def agree(self, answers: list[tuple[int, list[int], list[float], int]]) -> list[int]:
        for seed, tokens, logprobs, _ in answers:
            before = self.known.setdefault(seed, (tokens, logprobs))
            assert before[0] == tokens, seed
            assert max(abs(a - b) for a, b in zip(before[1], logprobs, strict=True)) < 1e-4
        return [hit for *_, hit in answers]


@pytest.fixture
def street(places: dict[str, str]) -> Iterator[Any]:
    """Start neighbours; all of them end with the test."""
    Path(places["ram_dir"]).mkdir(parents=True)
    extra = {**places, "cpu_bytes": CPU_BYTES, "disk_capacity_bytes": DISK_BYTES}
    started: list[Neighbour] = []

    def start(model: Path = MODEL) -> Neighbour:
        started.append(Neighbour(extra, model))
        return started[-1]

    yield start
    for neighbour in started:
        neighbour.end()


@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_stopped_and_killed_neighbours(street: Any) -> None:
    chance = random.Random(3)
    book = Book()
    staying, other = street(), street()
    staying.ready()
    other.ready()
    book.agree(other.ask([1, 2, 3]))
    assert book.agree(staying.ask([1, 2, 3])) == [256] * 3

    # Stopped at any moment of its work, it holds nothing that the other waits for.
    for moment in (0.05, 0.2):
        other.tell(list(range(10, 30)))
        threading.Event().wait(moment)
        other.process.send_signal(signal.SIGSTOP)
        book.agree(staying.ask([1, 40, 41, 10, 11]))
        assert book.agree(staying.ask([40, 41])) == [256] * 2
        other.process.send_signal(signal.SIGCONT)
        book.agree(other.hear())

    # Killed at any moment, too; and its successor works beside the one that stayed.
    for _ in range(2):
        other.tell(list(range(50, 90)))
        staying.tell(list(range(60, 70)))
        threading.Event().wait(chance.uniform(0.1, 1.5))
        other.process.kill()
        book.agree(staying.hear())
        other = street().ready()
        book.agree(other.ask(list(range(50, 56))))
    hits = book.agree(staying.ask([1, 2, 3, 50, 51]))
    assert hits[3:] == [256] * 2


@pytest.mark.multiprocess
@pytest.mark.timeout(400)
def test_other_weights_share_nothing(street: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    # One number of one layer's weights is another.
    twin = tmp_path / "twin"
    shutil.copytree(MODEL, twin)
    weights = load_file(str(twin / "model.safetensors"))
    name = next(name for name in weights if "layers.1.self_attn.v_proj" in name)
    weights[name][0, 0] += 1.0
    save_file(weights, str(twin / "model.safetensors"), metadata={"format": "pt"})
    first, second = street(), street(twin)
    first.ready()
    second.ready()
    seeds = [1, 2]
    one = first.ask(seeds)
    two = second.ask(seeds)
    assert [hit for *_, hit in two] == [0, 0]
    assert all(a[2] != b[2] for a, b in zip(one, two, strict=True))
    for neighbour, before in ((first, one), (second, two)):
        again = neighbour.ask(seeds)
        assert [hit for *_, hit in again] == [256, 256]
        assert [answer[1:3] for answer in again] == [answer[1:3] for answer in before]
