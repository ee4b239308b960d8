"""Simulated engines and tiers, whose true speed a test knows, and the time that they take."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lakecache import _estimates, _estimates_file, _policy
from lakecache._policy import LoadPolicy

TOKEN_BYTES = 114_688
CHUNK = 256
numbers = itertools.count(1)


class Clock:
    """The time, as far as the policy can see."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        fake = SimpleNamespace(monotonic=lambda: self.now)
        for module in (_policy, _estimates, _estimates_file):
            monkeypatch.setattr(module, "time", fake)


def fast_gpu(tokens: float, pairs: float, decoding: int = 0) -> float:
    """A small model on a large GPU: 8K tokens in 36 ms, 32K in about 270 ms."""
    return 6e-3 + 1.8e-6 * tokens + 4.5e-10 * pairs + 2e-5 * decoding


def slow_cpu(tokens: float, pairs: float, decoding: int = 0) -> float:
    return 5e-3 + 2e-3 * tokens + 1e-8 * pairs


def launched(tokens: float, pairs: float, decoding: int = 0) -> float:
    """A fast GPU on a slow host: small steps replay a graph, larger ones wait for launches."""
    if tokens <= 128:
        return 15e-3 + 1e-5 * decoding
    return max(30e-3, 13e-3 + 1.4e-6 * tokens + 2.6e-10 * pairs) + 1e-5 * decoding


class Engine:
    """An engine and its tiers, with vLLM's sequence of calls; bandwidths in bytes per second."""

    def __init__(
        self, clock: Clock, compute: Callable[..., float] = fast_gpu, *, noise: float = 0.0,
        step_tokens: int = 8192,
    ) -> None:  # fmt: skip
        self.clock, self.compute, self.noise = clock, compute, noise
        self.random = random.Random(1)
        self.policy = LoadPolicy(step_tokens=step_tokens, engine="simulated")
        self.memory, self.disk = 50e9, 2e9

    def take(self, seconds: float) -> None:
        self.clock.now += seconds * (1 + self.random.uniform(0, self.noise))

    def prefill(self, tokens: int, local: int = 0, decoding: int = 0) -> float:
        """Compute a prompt in chunks; gives the seconds it took."""
        begin = self.clock.now
        while local < tokens:
            count = min(self.policy.prefill.step_tokens, tokens - local)
            self.policy.clock.planned(step([("r", local, count)], decoding))
            self.take(self.compute(count, count * (local + count / 2), decoding))
            self.policy.step_ended()
            local += count
        return self.clock.now - begin

    def load(self, memory: int = 0, disk: int = 0, *, latency: float = 3e-3) -> None:
        """Load so many chunks by tier."""
        ident, size = next(numbers), CHUNK * TOKEN_BYTES
        self.policy.load_started(ident, memory * size, disk * size)
        self.take(latency + memory * size / self.memory + disk * size / self.disk)
        self.policy.load_ended(ident, good=True)

    def load_in_step(self, tokens: int, chunks: int) -> None:
        """Load so many chunks from memory within the step that computes a prompt's last token."""
        size = chunks * CHUNK * TOKEN_BYTES
        self.policy.load_started(next(numbers), size, 0, same_step=True)
        self.policy.clock.planned(step([("r", tokens - 1, 1)], has_sync_kv_loads=True))
        self.take(self.compute(1, tokens, 0) + size / self.memory)
        self.policy.step_ended()

    def overlap(self, steps: list[tuple[Any, float]], launch: float) -> float:
        """Plan and launch each step while the one before runs, as vLLM does with asynchronous
        scheduling; each with the seconds that the GPU needs for it. Gives the seconds of all.
        """
        begin = free = self.clock.now
        running: list[float] = []

        def wait() -> None:
            self.clock.now = max(self.clock.now, running.pop(0))
            self.policy.step_ended()

        for output, computing in steps:
            self.policy.clock.planned(output)
            free = max(self.clock.now, free)
            if output.total_num_scheduled_tokens:
                free += max(computing, launch)
                self.clock.now += launch
            running.append(free)
            if len(running) == 2:
                wait()
        while running:
            wait()
        return self.clock.now - begin

    def learn(self) -> None:
        for tokens in (512, 8192, 32768, 2048) * 3:
            self.prefill(tokens)
        for chunks in (1, 8, 32) * 2:
            self.load(memory=chunks)
            self.load(disk=chunks)

    def chunks(
        self, tokens: int, memory: int, disk: int = 0, local: int = 0, *, same_step: bool = False
    ) -> int:
        """Ask for a prompt of which so many chunks are in memory and on disk."""
        return self.policy.choose(
            None, tokens=tokens, local=local, present=memory + disk, in_memory=memory,
            leading=memory, chunk=CHUNK, chunk_bytes=CHUNK * TOKEN_BYTES, same_step=same_step,
        ).taken  # fmt: skip


def step(
    prefills: list[tuple[str, int, int]], decoding: int = 0, drafts: int = 0, **more: Any
) -> Any:
    """A SchedulerOutput: (request, context, tokens) of each prefill, and decoding requests."""
    scheduled = {name: count for name, _, count in prefills}
    decoders = [f"d{number}" for number in range(decoding)]
    scheduled.update(dict.fromkeys(decoders, 1 + drafts))
    new, *old = [(name, context) for name, context, _ in prefills] or [None]
    values: dict[str, Any] = {
        "num_scheduled_tokens": scheduled,
        "total_num_scheduled_tokens": sum(scheduled.values()),
        "scheduled_new_reqs": [SimpleNamespace(req_id=new[0], num_computed_tokens=new[1])]
        if new
        else [],
        "scheduled_cached_reqs": SimpleNamespace(
            req_ids=[*(name for name, _ in old), *decoders],
            num_computed_tokens=[*(context for _, context in old), *[500] * decoding],
        ),
        "scheduled_spec_decode_tokens": dict.fromkeys(decoders, [0] * drafts) if drafts else {},
        "scheduled_encoder_inputs": {},
        "has_sync_kv_loads": False,
    }
    return SimpleNamespace(**{**values, **more})
