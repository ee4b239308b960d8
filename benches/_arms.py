"""Arms: vLLM with one connector or none, and what each is configured with."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

from _models import MODELS
from _workplace import GIB, Workplace

LMCACHE_PORT = 6555
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
ARMS = ("none", "null", "offloading", "tiering", "lmcache", "lakecache", "lakecache-always")


def transfer_config(arm: str, place: Workplace, options: Any) -> dict[str, Any] | None:
    """The KVTransferConfig of an arm, or None."""
    if arm == "none":
        return None
    base = {"kv_role": "kv_both"}
    cpu, disk = int(options.cpu_gib * GIB), int(options.disk_gib * GIB)
    if arm == "null":
        return base | {"kv_connector": "NullConnector", "kv_connector_module_path": "_connectors"}
    if arm in {"offloading", "tiering"}:
        extra: dict[str, Any] = {"cpu_bytes_to_use": cpu}
        if options.rival_block:
            extra["block_size"] = options.rival_block
        if arm == "tiering":
            extra["spec_name"] = "TieringOffloadingSpec"
            extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(place.scratch / "tiering")}]
        return base | {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    if arm == "lmcache":
        return base | {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://localhost",
                "lmcache.mp.port": LMCACHE_PORT,
            },
        }
    extra = {
        "cpu_bytes": cpu,
        "cache_dir": str(place.scratch / arm),
        "ram_dir": str(place.ram / arm),
        "disk_capacity_bytes": disk,
        "load_policy": "always" if arm == "lakecache-always" else "auto",
        **options.lakecache,
    }
    return base | {
        "kv_connector": "LakeCacheConnector",
        "kv_connector_module_path": "lakecache.connector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def watched_folder(arm: str, place: Workplace) -> str | None:
    """The folder whose growth says that a rival still writes; LakeCache can be asked."""
    return str(place.scratch / arm) if arm in {"tiering", "lmcache"} else None


def engine_settings(model: str, options: Any, lengths: Iterable[int]) -> dict[str, Any]:
    """Arguments of `vllm.LLM`, the same for every arm."""
    longest = max(lengths)
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": longest + 512,
        "max_num_seqs": options.max_num_seqs,
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": int(options.kv_gib * GIB),
        "seed": 0,
    }
    if options.device == "cpu":
        settings |= {"dtype": "bfloat16", "enforce_eager": True, "block_size": 32}
        # By name, because vLLM's CPU platform replaces "uni" where the core has its own process.
        settings["distributed_executor_backend"] = UNIPROC
        most = MODELS[model]["max_position_embeddings"] if model in MODELS else longest + 512
        settings["max_model_len"] = min(longest + 512, most)
    else:
        settings |= {"dtype": "bfloat16", "gpu_memory_utilization": options.gpu_share}
        settings["distributed_executor_backend"] = "uni"
    if options.enforce_eager:
        settings["enforce_eager"] = True
    return settings | options.engine


class LmcacheServer:
    """LMCache's own server, in a process group of its own."""

    def __init__(self, place: Workplace, cpu_gib: float) -> None:
        self._log = place.scratch / "lmcache-server.log"
        folder = place.scratch / "lmcache"
        folder.mkdir(exist_ok=True)
        adapter = json.dumps({"type": "fs_native", "base_path": str(folder), "num_workers": 8})
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lmcache.cli.main", "server", "--port", str(LMCACHE_PORT),
                 "--http-port", "8099", "--l1-size-gb", f"{cpu_gib:.0f}",
                 "--eviction-policy", "LRU", "--chunk-size", "256", "--l2-adapter", adapter],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        atexit.register(self.stop)
        deadline = time.monotonic() + 120
        while "startup complete" not in self._log.read_text(errors="replace"):
            if time.monotonic() > deadline or self._process.poll() is not None:
                tail = self._log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"LMCache's server did not start:\n{tail}")
            time.sleep(0.2)

    def stop(self) -> None:
        """End it, and everything it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
