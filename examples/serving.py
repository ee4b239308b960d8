"""Real vLLM with LakeCache in this process, for the examples; what each answer was made from."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# In one process, without compilation and without the network; one thread adds up in one order.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TQDM_DISABLE": "1",
}
COUNTERS = ("memory_hits", "disk_hits", "disk_payload_reads", "promotions", "stores")
WAIT_SECONDS = 60
# One chunk of the prompt is stored, and the last token is always computed.
SHORTEST_PROMPT = 257


def model(name: str) -> str:
    """Read a model's folder, or its name in Hugging Face's cache, for argparse."""
    if name.startswith(("/", ".", "~")) and not (Path(name) / "config.json").is_file():
        raise argparse.ArgumentTypeError(
            f"{name} is no model's folder; `make models` makes some in {ROOT / '.models'}"
        )
    return name


def add_model(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--model",
        type=model,
        default=str(ROOT / ".models" / default),
        help=f"a folder, or a name in Hugging Face's cache (HF_HUB_OFFLINE=0 downloads it there); "
        f"default: .models/{default}",
    )


def require_device(wanted: str | None) -> None:
    """End where vLLM was built for another kind of device than was asked for."""
    if wanted is None:
        return
    from vllm.platforms import current_platform

    if current_platform.device_type != wanted:
        raise SystemExit(
            f"--device {wanted}: this vLLM runs on {current_platform.device_type}; use the Python "
            f"of an environment whose vLLM is for {wanted}, or leave --device out"
        )


def prompt_tokens(text: str) -> int:
    """Read the length of a prompt that is stored, for argparse."""
    tokens = int(text)
    if tokens < SHORTEST_PROMPT:
        raise argparse.ArgumentTypeError(
            f"{tokens} tokens are less than a chunk of 256 and one more; nothing would be restored"
        )
    return tokens


class Server:
    """One vLLM engine. `extra` is kv_connector_extra_config; None runs without LakeCache."""

    def __init__(self, model: str, extra: dict[str, Any] | None, **settings: Any) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from vllm import LLM

        if extra is not None:
            settings["kv_transfer_config"] = {
                "kv_connector": "LakeCacheConnector",
                "kv_connector_module_path": "lakecache.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                # Examples show loads, also where computing would be faster.
                "kv_connector_extra_config": {"load_policy": "always", **extra},
            }
        settings = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 4} | settings
        self.llm = LLM(model=model, **settings)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        connector = self.core.scheduler.connector
        self.half = getattr(connector, "scheduler", None)
        if self.half is not None:
            # The fingerprint of the weights is taken in the background; misses until it is known.
            self.half.wait_ready(WAIT_SECONDS)

    @property
    def cache(self) -> Any:
        """The scheduler's store, for its counters."""
        return None if self.half is None else self.half._cache

    def prompt(self, tokens: int, text: str | None = None) -> list[int]:
        """A prompt of so many tokens, from the project's own pages."""
        names = ("README.md", "ARCHITECTURE.md", "docs/semantics.md", "docs/operations.md")
        text = text or "\n".join((ROOT / name).read_text() for name in names)
        found = self.llm.get_tokenizer().encode(text)
        return (found * (tokens // len(found) + 1))[:tokens]

    def answer(self, prompt: list[int], tokens: int, *, logprobs: int = 1) -> dict[str, Any]:
        """One request: its output, time to the first token, and the counters' growth."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=logprobs
        )
        before = self.counters()
        first = None
        started = time.perf_counter()
        self.engine.add_request(f"request {started}", {"prompt_token_ids": prompt}, sampling)
        while self.engine.has_unfinished_requests():
            for done in self.engine.step():
                if first is None and done.outputs and done.outputs[0].token_ids:
                    first = time.perf_counter() - started
        output = done.outputs[0]
        grown = {name: value - before[name] for name, value in self.counters().items()}
        self.settle()
        return {
            "token_ids": list(output.token_ids),
            "logprobs": [{str(t): v.logprob for t, v in s.items()} for s in output.logprobs],
            "text": output.text,
            "prompt_tokens": len(prompt),
            "restored_tokens": done.num_cached_tokens or 0,
            "ttft_seconds": first,
            "source": source_of(grown),
            "counters": grown,
        }

    def counters(self) -> dict[str, int]:
        found = {} if self.cache is None else self.cache.stats()
        return {name: int(found.get(name, 0)) for name in COUNTERS}

    def events(self) -> list[dict[str, Any]]:
        """What the store has done since the last call."""
        return [] if self.cache is None else list(self.cache.events())

    def settle(self) -> None:
        """Step until all saves are acknowledged, then wait until they are on disk."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self.core.scheduler.has_requests() and time.monotonic() < deadline:
            self.core.step()
        if self.cache is not None:
            self.cache.flush(WAIT_SECONDS)

    def forget_pages(self) -> None:
        """Empty vLLM's own prefix cache; it refuses while pages are being saved."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not self.llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise SystemExit("vLLM did not empty its prefix cache")
            self.settle()

    def close(self) -> None:
        self.engine.engine_core.shutdown()


def source_of(grown: dict[str, int]) -> str:
    """Where the restored tokens came from, by what was counted."""
    if grown["disk_payload_reads"]:
        return "disk" if not grown["memory_hits"] else "memory and disk"
    return "memory" if grown["memory_hits"] else "computed"
