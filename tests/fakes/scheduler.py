"""A scheduler half with its surroundings replaced: the cache, vLLM's requests and its blocks."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from fakes import core as fake
from lakecache import identity
from lakecache._metadata import Handshake, StepPlan, WorkerReport
from lakecache._objects import KIND_CHUNK, Geometry
from lakecache._pages import Groups
from lakecache._scheduler import SchedulerHalf
from lakecache.config import CacheConfig

BLOCK, CHUNK = 32, 64
numbers = itertools.count()


class Block:
    def __init__(self, block_id: int) -> None:
        self.block_id, self.ref_cnt = block_id, 0


class BlockPool:
    def __init__(self) -> None:
        self.blocks = [Block(i) for i in range(256)]

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1

    def pinned(self) -> int:
        return sum(block.ref_cnt for block in self.blocks)


class Request(SimpleNamespace):
    def __init__(self, tokens: int, **more: Any) -> None:
        values: dict[str, Any] = {
            "request_id": f"r{next(numbers)}", "num_tokens": tokens, "num_prompt_tokens": tokens,
            "block_hashes": [bytes([i]) * 32 for i in range(tokens // BLOCK)],
            "num_computed_tokens": 0, "num_output_placeholders": 0, "lora_request": None,
            "skip_reading_prefix_cache": False, "resumable": False, "kv_transfer_params": None,
        }  # fmt: skip
        super().__init__(**{**values, **more})


class Bench:
    """A scheduler half with one rank, as the connector would build it."""

    half_type: type[SchedulerHalf] = SchedulerHalf
    groups = Groups((0,))
    geometry = Geometry(CHUNK, BLOCK, BLOCK)
    part_bytes: ClassVar[dict[int, int]] = {KIND_CHUNK: 4096}

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, **extra: Any) -> None:
        import lakecache

        monkeypatch.setitem(__import__("sys").modules, "lakecache._core", fake)
        monkeypatch.setattr(lakecache, "_core", fake, raising=False)
        monkeypatch.setattr(identity, "engine_identity", lambda *a, **k: {"engine": 1})
        self.ranks = extra.pop("ranks", 1)
        group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK))
        kv = SimpleNamespace(kv_cache_groups=[group], hash_block_size=BLOCK, num_blocks=256)
        vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(
                tensor_parallel_size=self.ranks, pipeline_parallel_size=1
            ),
            load_config=SimpleNamespace(load_format="dummy"),
            model_config=SimpleNamespace(seed=0),
            scheduler_config=SimpleNamespace(
                max_num_batched_tokens=8192, long_prefill_token_threshold=0
            ),
            speculative_config=None,
        )
        self.cache = fake.Cache(cache_dir=str(tmp_path / "kv"), ram_dir="ram")
        config = CacheConfig.from_extra_config(
            {"cache_dir": str(tmp_path), "chunk_size": CHUNK, **extra}
        )
        self.half = self.half_type(
            vllm_config,  # type: ignore[arg-type]
            kv,  # type: ignore[arg-type]
            config,
            self.cache,
            groups=self.groups,
            geometry=self.geometry,
            unstable=None,
        )
        told = Handshake(self.cache.pool_id, self.part_bytes, "{}")
        self.half.handshake({(0, rank): told for rank in range(self.ranks)})
        self.pool = BlockPool()
        self.half.saves.bind(self.pool)  # type: ignore[arg-type]
        self.copies = fake.Copier(self.cache.pool)

    def step(self, request: Request | None = None, tokens: int = 0) -> Any:
        scheduled = {} if request is None else {request.request_id: tokens}
        ids = ([*range(1, 100)],)
        state = SimpleNamespace(get_block_ids=lambda _: ids)
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled, total_num_scheduled_tokens=self.total(scheduled),
            kv_connector_block_state=state,
        )  # fmt: skip
        plan = self.half.plan_step(output)  # type: ignore[arg-type]
        if request is not None:
            request.num_computed_tokens += tokens
        return plan

    def total(self, scheduled: dict[str, int]) -> int:
        """Tokens of a step: one per request, so that the load policy takes no measure of it."""
        return len(scheduled)

    def compute(self, request: Request, tokens: int, **more: Any) -> Any:
        """Compute tokens in one step, and go on until all is on its way: in one plan."""
        whole = StepPlan()
        plan = self.step(request, tokens, **more)
        for _ in range(10):
            whole.loads += plan.loads
            whole.chunks += plan.chunks
            whole.failed += plan.failed
            whole.stores += plan.stores
            plan = self.step()
            # As vLLM does when the step has come back.
            self.half.stats()
        return whole

    def allocate(self, request: Request, external: int) -> None:
        blocks = SimpleNamespace(get_block_ids=lambda: ([*range(1, 100)],))
        self.half.allocated(request, blocks, external)  # type: ignore[arg-type]

    def acknowledge(self, plan: Any, *, good: bool = True) -> None:
        one = (1, 0) if good else (0, 1)
        self.half.report(WorkerReport({store[0]: one for store in plan.stores}), (), ())

    def store(self, tokens: int) -> None:
        """Run a request of this length to its end, with all its chunks saved."""
        request = Request(tokens)
        assert self.half.matched(request, 0)[0] == 0
        self.allocate(request, 0)
        plan = self.compute(request, tokens)
        # Only so many are queued before the first ones are through.
        while plan.stores:
            for _ in range(self.ranks):
                self.acknowledge(plan)
            plan = self.step()
            self.half.stats()
        self.half.finished(request.request_id)

    def leaks(self) -> list[str]:
        slots = self.cache.pool.slots.values()
        return [
            *(["pinned slots"] if any(slot.pins for slot in slots) else []),
            *(["pinned blocks"] if self.pool.pinned() else []),
            *(["tracked"] if self.half._tracked else []),
            *(["under way"] if self.half.loads._by_ident or self.half.pending_stores() else []),
        ]
