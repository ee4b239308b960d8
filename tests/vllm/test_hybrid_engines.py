"""Hybrid models in engines of their own: restarts, experts, little memory, two ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest

from hybrid_engine import MOE, deepest, files, flip, from_each_tier, hybrid, one
from lakecache import _worker
from lakecache.transfer import HostTransfer
from vllm_engine import difference, prompt


class FollowedTransfer(HostTransfer):
    """Host copies that the engine's work can be made to wait for: it is done by waiting at once."""

    same_step = True

    def follow_loads(self) -> None:
        """Wait for all copies."""
        deadline = time.monotonic() + 20
        while self._owners:
            assert time.monotonic() < deadline
            over = self.poll()
            self._over += over
            time.sleep(0.0005)


def test_checkpoints_that_are_reported_early(
    places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_worker, "HostTransfer", FollowedTransfer)
    with hybrid(places) as cached:
        early = 0
        for length in (17, 65, 80, 333):
            tiers = from_each_tier(cached, prompt(length, length))
            assert tiers.found() == {deepest(length)}
            # The one from memory; the one from disk is waited for.
            early += 1
            assert cached.half.total("loads_early") == early
            for restored in (tiers.memory, tiers.disk):
                assert difference(tiers.native, restored) == 0
        # Neither is the one of several requests.
        cached.forget_gpu()
        cached.generate([prompt(length, length) for length in (65, 80)], tokens=3)
        assert cached.half.total("loads_early") == early
        assert cached.connector.errors == 0
        assert not cached.half._tracked


def test_restart_and_damage_without_checksums(places: dict[str, str]) -> None:
    tokens = prompt(333, 1)
    with hybrid(places, connector="HybridCheckpointConnector") as first:
        cold = one(first, tokens)
        native = one(first, tokens)
    with hybrid({**places, "checksum": "off"}) as second:
        restored = one(second, tokens)
        assert restored[2] == native[2] == deepest(333)
        assert difference(native, restored) == 0
        assert difference(cold, restored) == 0
        sizes = second.half.part_bytes
        assert sum(flip(file, sizes) for file in files(second)) == 1
        second.forget_gpu()
        second.forget_memory()
        damaged = one(second, tokens)
        assert damaged[2] == deepest(333)
        assert difference(native, damaged) > 0.1


def test_experts_and_whole_blocks_only(places: dict[str, str]) -> None:
    """Without `prefix_match_unit` there are states at the ends of blocks alone; here vLLM keeps
    them all, and of those in between the ones at least 100 tokens apart are wanted.
    """
    settings = {"prefix_match_unit": None, "prefix_cache_retention_interval": None}
    with hybrid({**places, "checkpoint_tokens": 100}, MOE, **settings) as cached:
        block = cached.half.block
        for length in (block, block + 1, 333):
            tokens = prompt(length, length)
            tiers = from_each_tier(cached, tokens)
            assert tiers.found() == {(length - 1) // block * block}
            for restored in (tiers.memory, tiers.disk):
                assert difference(tiers.native, restored) == 0
        found = {}
        for length in (333, 270, 200, 150, 100):
            cached.forget_gpu()
            found[length] = one(cached, tokens[:length], 1)[2]
        assert found == {100: 0, 150: 128, 200: 128, 270: 256, 333: 320}
        assert cached.connector.errors == 0


def test_preemption(places: dict[str, str]) -> None:
    prompts = [prompt(100, seed) for seed in range(50, 58)]
    # Room for the beginning of about four of the eight requests, and not for their ends.
    with hybrid(places, num_gpu_blocks_override=44, max_model_len=512) as tight:
        preemptions: list[str] = []
        preempt = tight.core.scheduler._preempt_request

        def note(request: Any, *rest: Any, **more: Any) -> None:
            preemptions.append(request.request_id)
            preempt(request, *rest, **more)

        tight.core.scheduler._preempt_request = note
        tight.generate(prompts, tokens=220)
        assert preemptions
        assert tight.connector.errors == 0
        assert not tight.half._tracked
        assert not tight.half.state_saver
        for tokens in prompts:
            tight.forget_gpu()
            got = one(tight, tokens)
            native = one(tight, tokens)
            assert got[2] == native[2] == deepest(100)
            assert difference(native, got) == 0


@pytest.mark.multiprocess
def test_two_ranks(places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    tokens = prompt(300, 6)
    with hybrid(places, tensor_parallel_size=2) as pair:
        assert pair.connector.declined is None
        tiers = from_each_tier(pair, tokens)
        assert tiers.found() == {deepest(300)}
        for restored in (tiers.memory, tiers.disk):
            assert difference(tiers.native, restored) == 0
