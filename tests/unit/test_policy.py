"""Loading against computing, with simulated engines and tiers."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes.engines import (
    CHUNK,
    TOKEN_BYTES,
    Clock,
    Engine,
    fast_gpu,
    launched,
    slow_cpu,
    step,
)
from lakecache import _estimates_file, _policy
from lakecache._fit import Fit
from lakecache._policy import Choice, Hit, LoadPolicy


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


# Decisions


def test_nothing_known_is_tried(clock: Clock) -> None:
    engine = Engine(clock)
    assert engine.chunks(8192, memory=32) == 32
    for _ in range(3):
        engine.prefill(8192)
    # The engine is known, the tiers are not.
    assert engine.chunks(8192, memory=0, disk=32) == 32
    assert engine.chunks(8192, memory=16, disk=16) == 32


def test_a_fast_gpu_declines_a_slow_disk_and_takes_memory(clock: Clock) -> None:
    engine = Engine(clock)
    engine.learn()
    assert engine.chunks(8192, memory=0, disk=32) == 0
    assert engine.chunks(8192, memory=32) == 32
    engine.disk = 20e9
    for _ in range(4):
        for chunks in (1, 8, 32):
            engine.load(disk=chunks)
    assert engine.chunks(32768, memory=0, disk=128) == 128


def test_a_slow_engine_takes_everything(clock: Clock) -> None:
    engine = Engine(clock, slow_cpu)
    engine.learn()
    for memory, disk in itertools.product((0, 1, 7), (0, 1, 7)):
        if memory + disk:
            assert engine.chunks(2048, memory, disk) == memory + disk


def test_a_hit_is_shortened_to_what_memory_holds(clock: Clock) -> None:
    engine = Engine(clock)
    engine.learn()
    assert engine.chunks(8192, memory=24, disk=8) == 24
    assert engine.policy.explain()["last"]["chosen"] == 1


def test_what_is_under_way_counts(clock: Clock) -> None:
    engine = Engine(clock)
    engine.learn()
    assert engine.chunks(8192, memory=32) == 32
    for ident in range(-4, 0):
        engine.policy.load_started(ident, 32 * CHUNK * TOKEN_BYTES, 0)
    assert engine.chunks(8192, memory=32) == 0
    for ident in range(-4, 0):
        engine.policy.load_ended(ident, good=False)
    assert engine.chunks(8192, memory=32) == 32


def test_a_load_need_not_wait_for_what_is_computed(clock: Clock) -> None:
    engine = Engine(clock)
    engine.disk = 12e9
    engine.learn()
    alone = engine.policy.prefill.seconds(0, 8192)
    assert alone is not None
    assert engine.chunks(8192, memory=0, disk=32) == 0
    # Two prompts are being computed: what is loaded meanwhile is there when they are done.
    engine.policy.clock.planned(step([("r", 0, 8192)]))
    engine.policy.clock.planned(step([("r", 0, 8192)]))
    assert engine.policy.clock.remaining() == pytest.approx(2 * alone, rel=0.1)
    assert engine.chunks(8192, memory=0, disk=32) == 32
    # The first has ended, and the second nearly so.
    clock.now += alone
    engine.policy.clock.ended()
    clock.now += 0.9 * alone
    assert engine.policy.clock.remaining() == pytest.approx(0.1 * alone, rel=0.5)
    assert engine.chunks(8192, memory=0, disk=32) == 0
    # A step that does not come back is not waited for.
    clock.now += 100 * alone
    assert engine.policy.clock.remaining() == 0


def test_what_the_gpu_holds_is_no_reason_to_load(clock: Clock) -> None:
    engine = Engine(clock)
    engine.disk = 4e9
    engine.learn()
    # The end of a long prompt costs more to compute than the beginning of a short one.
    assert engine.chunks(1024, memory=0, disk=4) == 0
    engine.policy.prefill.fit.clear()
    engine.compute = lambda tokens, pairs, _: 1e-3 + 2e-6 * tokens + 2e-9 * pairs  # type: ignore[misc]
    engine.learn()
    assert engine.chunks(32768, memory=0, disk=4, local=31744) == 4
    assert engine.chunks(1024, memory=0, disk=4) == 0


def test_candidates_of_any_size(clock: Clock) -> None:
    """A state of fixed size comes on top at each end, as hybrid models have it."""
    engine = Engine(clock)
    engine.learn()
    ends, state = [1056, 8448, 16896], 64_000_000
    memory = [end * 20_480 + state for end in ends]
    hit = Hit(17000, 0, ends, memory, [0, 0, 0])
    assert engine.policy.decide(hit) == 3
    assert engine.policy.decide(hit._replace(memory=[0] * 3, disk=[b * 20 for b in memory])) == 0
    # Only the first is cheap.
    assert engine.policy.decide(hit._replace(disk=[0, 10**10, 10**10])) == 1


def test_no_decision_is_predictably_worse(clock: Clock) -> None:
    """Over many cases the chosen answer is within noise of the best of all ends."""
    engine = Engine(clock, noise=0.05)
    engine.learn()
    size = CHUNK * TOKEN_BYTES

    def cost(count: int, memory: int, tokens: int) -> float:
        load = (min(count, memory) / 50e9 + max(count - memory, 0) / 2e9) * size
        end, seconds = min(count * CHUNK, tokens - 1), 0.0
        while end < tokens:
            part = min(8192, tokens - end)
            seconds += fast_gpu(part, part * (end + part / 2))
            end += part
        return seconds + (load + 3e-3 if count else 0)

    dice = random.Random(7)
    for _ in range(200):
        tokens = dice.choice([300, 1000, 4000, 8192, 20000, 32768])
        present = dice.randint(1, tokens // CHUNK)
        memory = dice.randint(0, present)
        chosen = cost(engine.chunks(tokens, memory, present - memory), memory, tokens)
        best = min(cost(count, memory, tokens) for count in range(present + 1))
        assert chosen <= 1.08 * best + 1e-3


@pytest.mark.parametrize("seed", range(5))
def test_small_prompts_whose_steps_are_launched_one_by_one_are_taken(
    clock: Clock, seed: int
) -> None:
    """No sum of costs holds where a step of 512 tokens takes nearly as long as one of 8192."""
    dice = random.Random(seed)

    def compute(tokens: float, _: float, __: int) -> float:
        if tokens <= 16:
            return dice.uniform(13e-3, 17e-3)
        if tokens <= 512:
            return dice.uniform(22e-3, 40e-3)
        return dice.uniform(0.95, 1.05) * (38e-3 if tokens <= 8192 else 130e-3)

    engine = Engine(clock, compute, step_tokens=16384)
    engine.memory = 68e9
    for round_ in range(8):
        for tokens in (512, 8192, 32768):
            engine.prefill(tokens)
            engine.prefill(tokens, local=tokens - 16)  # the GPU holds the rest
            present = tokens // CHUNK
            taken = engine.chunks(tokens, memory=present, same_step=True)
            # Two measurements that vary that much are not enough.
            assert taken == present or (tokens, round_) == (512, 1)
            if taken:
                engine.load_in_step(tokens, present)
            else:
                engine.prefill(tokens)


def losses(clock: Clock, compute: Callable[..., float], noise: float) -> tuple[int, float]:
    """Count choices that take over 2 % longer than the best, where steps vary by so much; and sum
    up the seconds that are lost to them.
    """
    worse, lost, size = 0, 0.0, CHUNK * TOKEN_BYTES
    # Where loading is about as fast as computing.
    breakeven = 8192 * TOKEN_BYTES / compute(8192, 8192 * 4096, 0)
    for seed in range(150):
        dice = random.Random(seed)
        engine = Engine(
            clock,
            lambda *done, dice=dice: compute(*done) * (1 + dice.uniform(-noise, noise)),  # type: ignore[misc]
        )
        engine.memory = breakeven * 2 ** dice.uniform(-1, 2)
        prompts = [int(2 ** dice.uniform(8, 15)) for _ in range(4)]
        for chunks in (1, 8, 32) * 2:
            engine.load(memory=chunks)
        for number in range(60):
            tokens = dice.choice(prompts)
            kind = dice.random()
            if number < 6 or kind < 0.3:
                engine.prefill(tokens, decoding=dice.choice([0, 8]))
            elif kind < 0.5:
                engine.prefill(tokens, local=tokens - 16)
            else:
                present = dice.randint(1, tokens // CHUNK)
                taken = engine.chunks(tokens, memory=present)
                times = []
                for count in (present, 0):
                    end = min(count * CHUNK, tokens - 1)
                    seconds = count and 3e-3 + count * size / engine.memory
                    while end < tokens:
                        part = min(8192, tokens - end)
                        seconds += compute(part, part * (end + part / 2), 0)
                        end += part
                    times.append(seconds)
                worse += times[0 if taken else 1] > 1.02 * min(times)
                lost += times[0 if taken else 1] - min(times)
                if taken:
                    engine.load(memory=taken)
                engine.prefill(tokens, local=min(taken * CHUNK, tokens - 1))
    return worse, lost


@pytest.mark.parametrize(
    ("compute", "noise", "share"),
    [(fast_gpu, 0.5, 1.01), (slow_cpu, 0.5, 1.01), (launched, 0.5, 1.01), (launched, 0.1, 0.75)],
)
def test_bounds_help_where_costs_do_not_add_up_and_do_no_harm_elsewhere(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, compute: Callable[..., float], noise: float,
    share: float,
) -> None:  # fmt: skip
    worse, lost = losses(clock, compute, noise)
    monkeypatch.setattr(Fit, "near", Fit.seconds)
    worse_by_costs, lost_by_costs = losses(clock, compute, noise)
    assert worse_by_costs > 50
    assert lost <= share * lost_by_costs
    assert worse <= worse_by_costs * (1.05 if compute is launched else 1.01)


def test_a_decision_holds_while_it_is_asked_again(clock: Clock) -> None:
    engine = Engine(clock)
    engine.learn()
    ask = {"tokens": 8192, "local": 0, "present": 32, "in_memory": 0,
           "leading": 0, "chunk": CHUNK, "chunk_bytes": CHUNK * TOKEN_BYTES}  # fmt: skip
    first = engine.policy.choose(None, **ask)
    assert first.taken == 0
    engine.policy.disk.fit.clear()
    assert engine.policy.choose(first, **ask) is first
    assert engine.policy.choose(first, **{**ask, "local": 512, "present": 30}).taken == 30


def test_outcomes_are_counted_once_and_only_if_they_come_true() -> None:
    assert Choice(0, 4, 4).counters(64, loads=True) == {"hits_taken": 1}
    assert Choice(0, 4, 0).counters(64, loads=False) == {"hits_declined": 1, "tokens_declined": 256}
    assert Choice(0, 4, 1).counters(64, loads=True) == {
        "hits_shortened": 1, "tokens_declined": 192,
    }  # fmt: skip
    assert Choice(0, 4, 4).counters(64, loads=False) == {}


# Healing


def test_a_tier_unused_for_long_is_tried_if_that_costs_little(clock: Clock) -> None:
    engine = Engine(clock)
    engine.learn()
    policy = engine.policy
    compute = policy.prefill.seconds(0, 2048) or 0
    rest = policy.prefill.seconds(1024, 2048) or 0

    def hit(loss: float) -> Hit:
        """A hit from disk whose load is slower than computing by this share."""
        latency, per_byte = policy.disk.costs() or (0, 1)
        num_bytes = int(((1 + loss) * compute - rest - latency) / per_byte)
        return Hit(2048, 0, [1024], [0], [num_bytes])

    assert policy.decide(hit(-0.01)) == 1
    assert policy.decide(hit(0.01)) == 0
    clock.now += _policy.RETRY_SECONDS + 1
    assert policy.decide(hit(0.05)) == 0
    assert policy.decide(hit(0.01)) == 1
    assert policy.decide(hit(0.01)) == 0  # once


def test_memory_that_was_slow_for_a_while_is_found_out(clock: Clock) -> None:
    engine = Engine(clock)
    engine.memory = 2e9
    for tokens in (512, 8192, 32768, 2048) * 3:
        engine.prefill(tokens)
    for chunks in (1, 8, 32) * 2:
        engine.load(memory=chunks)
    engine.memory = 50e9
    tried = []
    for minute in range(24 * 60):
        clock.now += 61
        if engine.chunks(8192, memory=32):
            tried.append(minute)
            engine.load(memory=32)
    # Many hits were taken, the first of them long after.
    assert tried[0] > 60
    assert len(tried) > 100
    size = 32 * CHUNK * TOKEN_BYTES
    assert engine.policy.load_seconds(size, 0) == pytest.approx(3e-3 + size / 50e9, rel=0.2)


def test_memory_that_is_slow_is_hardly_ever_tried(clock: Clock) -> None:
    engine = Engine(clock)
    engine.memory = 2e9
    for tokens in (512, 8192, 32768, 2048) * 3:
        engine.prefill(tokens)
    for chunks in (1, 8, 32) * 2:
        engine.load(memory=chunks)
    lost = 0.0
    for _ in range(24 * 60):
        clock.now += 61
        if engine.chunks(8192, memory=32):
            began = clock.now
            engine.load(memory=32)
            lost += clock.now - began - 0.036
    assert lost < 0.03 * 24 * 60 * 0.036


@pytest.mark.parametrize("slower", [10, 100, 1000])
def test_a_disk_that_becomes_slow_is_refused_whatever_is_loaded(clock: Clock, slower: int) -> None:
    engine = Engine(clock)
    engine.disk = 20e9
    engine.learn()
    engine.disk /= slower
    # No load was that large while the disk was fast.
    loads = 0
    while engine.chunks(32768, memory=0, disk=128):
        engine.load(disk=128)
        loads += 1
        assert loads < 6
    engine.disk *= slower
    for _ in range(6):
        engine.load(disk=8)
    assert engine.chunks(32768, memory=0, disk=128) == 128


def test_a_disk_that_hangs_is_refused(clock: Clock) -> None:
    engine = Engine(clock)
    engine.disk = 20e9
    engine.learn()
    assert engine.chunks(32768, memory=0, disk=128) == 128
    size = 128 * CHUNK * TOKEN_BYTES
    for _ in range(20):
        # What fails at once, as a damaged file does, says nothing.
        engine.policy.load_started(1, 0, size)
        clock.now += 0.001
        engine.policy.load_ended(1, good=False)
    assert engine.chunks(32768, memory=0, disk=128) == 128
    for _ in range(3):
        engine.policy.load_started(1, 0, size)
        clock.now += 20
        engine.policy.load_ended(1, good=False)
    assert engine.chunks(32768, memory=0, disk=128) == 0


def test_a_refused_disk_is_read_again_in_the_background(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = [2e9, 2e9, 40e9]
    monkeypatch.setattr(_estimates_file, "probe_disk", lambda _: speeds.pop(0))
    engine = Engine(clock)
    engine.policy.file.keep_in(tmp_path, "ns")
    engine.policy.file.wait(10)
    assert engine.policy.disk.probed == 2e9
    engine.learn()
    for left in (1, 0):
        assert engine.chunks(8192, memory=0, disk=32) == 0
        clock.now += 2 * _estimates_file.PROBE_AGAIN_SECONDS + 1
        engine.prefill(8192)
        engine.policy.file.wait(10)
        assert len(speeds) == left
    assert engine.chunks(8192, memory=0, disk=32) == 32


# Keeping


def keep(directory: Path, clock: Clock, engine: Engine | None = None) -> LoadPolicy:
    policy = LoadPolicy(step_tokens=8192, engine="simulated") if engine is None else engine.policy
    policy.file.keep_in(directory.parent, directory.name)
    policy.file.wait(10)
    return policy


def test_estimates_are_kept_and_found_again(clock: Clock, tmp_path: Path) -> None:
    engine = Engine(clock)
    keep(tmp_path, clock, engine)
    engine.learn()
    engine.policy.file.close()
    again = keep(tmp_path, clock)
    assert again.prefill.seconds(0, 8192) == pytest.approx(0.036, rel=0.1)
    assert again.memory.costs() == pytest.approx(engine.policy.memory.costs(), rel=0.05)
    assert again.disk.costs() == pytest.approx(engine.policy.disk.costs(), rel=0.05)
    assert json.loads((tmp_path / "estimates.json").read_text())["estimates"]["disk"]["measured"]
    assert [path.name for path in tmp_path.iterdir()] == ["estimates.json"]


def test_estimates_are_kept_while_the_engine_runs(clock: Clock, tmp_path: Path) -> None:
    engine = Engine(clock)
    keep(tmp_path, clock, engine)
    engine.prefill(8192)
    clock.now += _estimates_file.SAVE_SECONDS
    engine.prefill(8192)
    engine.policy.file.wait(10)
    assert keep(tmp_path, clock).prefill.fit.count > 0


def test_estimates_of_another_engine_are_not_used(clock: Clock, tmp_path: Path) -> None:
    engine = Engine(clock)
    keep(tmp_path, clock, engine)
    engine.learn()
    engine.policy.file.close()
    other = LoadPolicy(step_tokens=8192, engine="another")
    other.file.keep_in(tmp_path.parent, tmp_path.name)
    other.file.wait(10)
    assert other.prefill.fit.count == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"version": 1', '"version": "1"'),
        lambda text: json.dumps({**json.loads(text), "prefill": [[[1, 2], 3]]}),
        lambda text: json.dumps({**json.loads(text), "disk": [[[1, -5], 3]]}),
        lambda text: json.dumps({**json.loads(text), "prefill": [[[0, 0, 0, 0], 1]]}),
        lambda text: json.dumps({**json.loads(text), "disk": [[[1, 1e308], 1e-300]] * 9}),
        lambda text: json.dumps({**json.loads(text), "probed": 0}),
        lambda text: json.dumps({**json.loads(text), "probed": -1e9}),
        lambda text: text.replace('"estimates": {', '"estimates": {"x": ' + "[" * 100_000),
        lambda text: text + " " * _estimates_file.FILE_BYTES_MAX,
        lambda text: "\0\xff",
    ],
)
def test_a_damaged_file_is_no_file(
    clock: Clock, tmp_path: Path, damage: Callable[[str], str]
) -> None:
    engine = Engine(clock)
    keep(tmp_path, clock, engine)
    engine.learn()
    engine.policy.file.close()
    file = tmp_path / "estimates.json"
    file.write_text(damage(file.read_text()))
    again = keep(tmp_path, clock)
    assert again.prefill.fit.count == 0 or again.disk.fit.count == 0
    assert again.decide(Hit(8192, 0, [8191], [0], [10**9])) == 1


@pytest.mark.parametrize("in_its_place", [os.mkfifo, Path.mkdir, lambda at: at.symlink_to(at)])
def test_what_is_no_file_is_not_waited_for(
    clock: Clock, tmp_path: Path, in_its_place: Callable[[Path], None]
) -> None:
    in_its_place(tmp_path / "estimates.json")
    policy = keep(tmp_path, clock)
    assert policy.file._thread is not None
    assert not policy.file._thread.is_alive()
    policy.file.close()


def test_an_unfinished_file_of_estimates_is_swept_like_others(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(clock)
    keep(tmp_path, clock, engine)
    engine.learn()
    monkeypatch.setattr(Path, "replace", lambda *_: None)  # killed before
    engine.policy.file.close()
    left = [path.name for path in tmp_path.iterdir()]
    assert len(left) == 1
    # What the core takes for a temporary.
    assert left[0].startswith(".")
    assert left[0].endswith(".tmp")


def test_a_directory_that_is_not_there_is_no_error(clock: Clock, tmp_path: Path) -> None:
    engine = Engine(clock)
    keep(tmp_path / "missing" / "namespace", clock, engine)
    engine.learn()
    engine.policy.file.close()


# In the scheduler half


class Half:
    """A scheduler half over the stand-in cache, with the estimates of a simulated engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock) -> None:
        pytest.importorskip("vllm")
        from fakes import core, scheduler
        from lakecache._objects import KIND_CHUNK

        core.pools.clear()
        self.bench = scheduler.Bench(monkeypatch, tmp_path)
        self.request = scheduler.Request
        self.engine = Engine(clock)
        self.engine.learn()
        self.half = self.bench.half
        self.half.policy = self.engine.policy
        # As large as those of the model that was simulated, for chunks of 64 tokens.
        self.half.part_bytes = {KIND_CHUNK: 64 * TOKEN_BYTES}
        self.bench.store(1024)
        self.half.stats()

    def ask(self, tokens: int = 1024) -> tuple[Any, int]:
        request = self.request(tokens)
        answer = self.half.matched(request, 0)
        assert self.half.matched(request, 0) == answer
        tokens = answer[0] or 0
        self.bench.allocate(request, tokens)
        return request, tokens

    def end(self, request: Any) -> None:
        self.bench.step()
        self.half.stats()
        self.half.report(None, [request.request_id], ())
        self.half.finished(request.request_id)
        assert self.bench.leaks() == []


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock) -> Half:
    return Half(monkeypatch, tmp_path, clock)


def test_a_declined_hit_opens_nothing_and_is_counted(half: Half) -> None:
    half.bench.cache.clear_memory()
    half.bench.cache.pool.polls_pending = 1_000_000
    request, tokens = half.ask()
    assert tokens == 0
    assert half.half.total("hits_declined") == 1
    assert half.half.total("tokens_declined") == 1024
    half.end(request)


def test_memory_behind_a_slow_disk_is_no_reason_to_read_that(half: Half) -> None:
    prefill, disk = half.engine.policy.prefill.fit, half.engine.policy.disk.fit
    for fit, done in ((prefill, (1, 1024, 0, 0)), (disk, (1, 1 << 20))):
        fit.clear()
        fit.restore([(done, 0.1)] * 3)
    for entry in list(half.bench.cache.pool.slots)[:8]:
        half.bench.cache.pool.drop(entry)
    assert half.ask()[1] == 0


def test_a_hit_in_memory_is_taken_and_measured(half: Half) -> None:
    count = half.engine.policy.memory.fit.count
    half.engine.memory = 50e9
    half.engine.policy.prefill.fit.clear()
    half.engine.compute = lambda tokens, pairs, _: 1e-2 + 1e-4 * tokens  # type: ignore[misc]
    half.engine.prefill(4096)
    request, tokens = half.ask()
    assert tokens == 1023
    assert half.half.total("hits_taken") == 1
    assert half.half.explain()["last"]["chosen"] == 1
    assert half.engine.policy.memory.under_way == 16 * 64 * TOKEN_BYTES
    half.end(request)
    assert half.engine.policy.memory.under_way == 0
    assert half.engine.policy.memory.fit.count == count + 1


def test_files_that_do_not_open_in_time_are_decided_upon_again(
    half: Half, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lakecache import _scheduler

    engine = half.engine
    engine.policy.prefill.fit.clear()
    engine.compute = lambda tokens, pairs, _: 1e-3 + 1e-4 * tokens  # type: ignore[misc]
    engine.prefill(4096)
    # Two chunks stay in memory, and are too few.
    engine.policy.memory.fit.clear()
    for chunks in (1, 2, 4):
        engine.load(memory=chunks, latency=0.02)
    pool = half.bench.cache.pool
    for entry in list(pool.slots)[2:]:
        pool.drop(entry)
    pool.polls_pending = 1_000_000
    request = half.request(1024)
    assert half.half.matched(request, 0) == (None, False)
    monkeypatch.setattr(_scheduler, "OPEN_SECONDS", -1.0)
    assert half.half.matched(request, 0) == (0, False)
    half.half.finished(request.request_id)
    assert half.bench.leaks() == []
