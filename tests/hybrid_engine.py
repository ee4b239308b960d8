"""Tiny hybrid models for the tests in `vllm/`, and what is known of their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from vllm_engine import MODEL, Engine, Result, engine

DENSE, MOE = (MODEL.parent / name for name in ("qwen35-tiny", "qwen35-moe-tiny"))
UNIT = 16
HEADER_BYTES = 4096


def hybrid(extra: dict[str, Any] | None, model: Path = DENSE, **settings: Any) -> Any:
    """Run an engine whose steps take at most 100 tokens, and which hashes every 16."""
    if not (model / "config.json").exists():
        pytest.skip(f"{model} is missing: make prepares it")
    wanted = {
        "model": str(model), "dtype": "bfloat16", "prefix_match_unit": UNIT,
        "max_num_batched_tokens": 100,
    }  # fmt: skip
    return engine(extra, **{**wanted, **settings})


def deepest(length: int) -> int:
    return (length - 1) // UNIT * UNIT


def one(cached: Engine, tokens: list[int], answer: int = 6) -> Result:
    return cached.generate([tokens], tokens=answer)[0]


class Tiers(NamedTuple):
    """One prompt's answers: computed, then found by vLLM itself, in memory, and on disk."""

    cold: Result
    native: Result
    memory: Result
    disk: Result

    def found(self) -> set[int]:
        """The lengths of the three hits."""
        return {hit[2] for hit in self[1:]}


def from_each_tier(cached: Engine, tokens: list[int]) -> Tiers:
    cold, native = one(cached, tokens), one(cached, tokens)
    cached.forget_gpu()
    memory = one(cached, tokens)
    cached.forget_gpu()
    cached.forget_memory()
    return Tiers(cold, native, memory, one(cached, tokens))


def files(cached: Engine) -> set[Path]:
    return set(Path(cached.half._config.cache_dir).rglob("*.kv"))


def forget_since(cached: Engine, before: set[Path]) -> None:
    """Empty both memories, and remove what was stored after `before`."""
    cached.forget_gpu()
    cached.forget_memory()
    for file in files(cached) - before:
        file.unlink()


def poison(cached: Engine) -> None:
    """Make every number in all pages and states a NaN; nothing may be cached on the GPU."""
    import torch

    runner = cached.core.model_executor.driver_worker.model_runner
    for layer in runner.compilation_config.static_forward_context.values():
        caches = layer.kv_cache if isinstance(layer.kv_cache, list | tuple) else [layer.kv_cache]
        for cache in caches:
            storage = cache.untyped_storage()
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)


def flip(file: Path, part_bytes: dict[int, int]) -> bool:
    """Change the exponents of a state's numbers; False for files of other objects."""
    data = bytearray(file.read_bytes())
    if len(data) - HEADER_BYTES < part_bytes[1]:
        return False
    for at in range(HEADER_BYTES + 3, HEADER_BYTES + part_bytes[1], 4):
        data[at] ^= 0x40
    file.write_bytes(data)
    return True
