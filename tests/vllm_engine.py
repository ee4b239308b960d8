"""Real vLLM on a CPU, with or without LakeCache, for the tests in `vllm/`."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_environment import ENVIRONMENT

os.environ.update(ENVIRONMENT)

ROOT = Path(__file__).parents[1]
MODEL = Path(os.environ.get("LAKECACHE_MODELS", ROOT / ".models")) / "qwen3-tiny"
BLOCK = 32
CHUNK = 64

Result = tuple[list[int], list[dict[int, float]], int]


class Engine:
    """One vLLM in this process."""

    def __init__(self, extra: dict[str, Any] | None, **settings: Any) -> None:
        from vllm import LLM

        late = settings.pop("late", False)
        connector = settings.pop("connector", "LakeCacheConnector")
        module = "hybrid" if connector.startswith("Hybrid") else "connector"
        # None: the name alone, which vLLM knows from the plugin.
        path = settings.pop("module_path", f"lakecache.{module}")
        if extra is not None:
            settings["kv_transfer_config"] = {
                "kv_connector": connector,
                "kv_connector_module_path": path,
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                # What is in the store is loaded, also where this tiny model computes faster.
                "kv_connector_extra_config": {
                    "chunk_size": CHUNK,
                    "load_policy": "always",
                    **extra,
                },
            }
        settings.setdefault("model", str(MODEL))
        settings.setdefault("dtype", "float32")
        settings.setdefault("block_size", BLOCK)
        settings.setdefault("max_num_seqs", 16)
        self.llm = LLM(
            enforce_eager=True, max_model_len=settings.pop("max_model_len", 2048),
            kv_cache_memory_bytes=settings.pop("kv_bytes", 64 << 20), **settings,
        )  # fmt: skip
        self.core = self.llm.llm_engine.engine_core.engine_core
        whole = self.core.scheduler.connector
        children = getattr(whole, "sub_connectors", [whole])
        self.connector = next((one for one in children if hasattr(one, "declined")), whole)
        self.half = getattr(self.connector, "scheduler", None)
        if late:
            # What the workers say comes with the report of the first step.
            self.generate([[1, 2]], tokens=1)
        if self.half is not None and self.half.declined is None:
            assert self.half.wait_ready(30)

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int = 8, lora_request: Any = None,
        params: Any = None,
    ) -> list[Result]:  # fmt: skip
        """Answer prompts; `params` are the requests' kv_transfer_params."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=5,
            extra_args=None if params is None else {"kv_transfer_params": params},
        )  # fmt: skip
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts], sampling,
            use_tqdm=False, lora_request=lora_request,
        )  # fmt: skip
        self.settle()
        return [
            (
                list(output.outputs[0].token_ids),
                [{k: v.logprob for k, v in step.items()} for step in output.outputs[0].logprobs],
                output.num_cached_tokens,
            )
            for output in outputs
        ]

    def wait_adapter(self, lora: Any, timeout: float = 20) -> bool:
        """Wait until the adapter's files are read; before that its requests are misses."""
        deadline = time.monotonic() + timeout
        while self.half.spaces.of(lora) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.half.spaces.of(lora) is not None

    def settle(self, timeout: float = 10) -> None:
        """Step until the workers have acknowledged all saves, and they are written back."""
        deadline = time.monotonic() + timeout
        while self.core.scheduler.has_requests():
            self.core.step_fn()
            assert time.monotonic() < deadline, "saves do not end"
        if self.half is not None:
            assert self.half._cache.flush(timeout)

    def forget_gpu(self) -> None:
        """Empty vLLM's own prefix cache; it refuses while blocks are pinned by saves."""
        for _ in range(100):
            if self.llm.reset_prefix_cache():
                return
            self.settle()
        raise AssertionError("reset_prefix_cache never succeeded")

    def forget_memory(self) -> None:
        """Empty the memory tier, so that only files are left."""
        deadline = time.monotonic() + 10
        while self.half._cache.clear_memory():
            assert time.monotonic() < deadline

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.core, self.connector, self.half
        cleanup_dist_env_and_memory()
        gc.collect()


@contextlib.contextmanager
def engine(extra: dict[str, Any] | None, **settings: Any) -> Iterator[Engine]:
    """Run an engine and always close it."""
    try:
        made = Engine(extra, **settings)
    except BaseException:
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        # What an engine that was refused leaves behind would be taken for the next one's.
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
        raise
    try:
        yield made
    finally:
        made.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    """Make a prompt of byte tokens that differs from other seeds' from its first token on."""
    return [(seed * 31 + i * 7 + i // 13 + seed) % 250 for i in range(length)]


def difference(one: Result, other: Result) -> float:
    """Largest difference of log-probabilities; infinite where the tokens differ."""
    if one[0] != other[0]:
        return float("inf")
    return max(abs(a[k] - b[k]) for a, b in zip(one[1], other[1], strict=True) for k in a if k in b)
