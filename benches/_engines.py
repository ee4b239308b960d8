"""What the engine benches share: model shapes, arms, engines in process groups, tables, records."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import itertools
import json
import math
import mmap
import os
import platform
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BENCHES = ROOT / "benches"
GIB = 1 << 30
START_SECONDS = 420.0
CALL_SECONDS = 240.0
LOG_BYTES = 100_000
LMCACHE_PORT = 6555
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_HYBRID_LAYERS = ["linear_attention"] * 3 + ["full_attention"]

# The shapes of the published models; the weights are made up by vLLM (load_format=dummy).
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    },
    "qwen3-tiny": _QWEN3
    | {
        "hidden_size": 128,
        "intermediate_size": 256,
        "head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "vocab_size": 512,
        "eos_token_id": 256,
        "bos_token_id": 257,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "qwen3.5-35b-a3b": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "attention_bias": False,
        "eos_token_id": 248044,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "layer_types": _HYBRID_LAYERS * 10,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 248320,
    },
}
MODELS["qwen3.5-tiny"] = MODELS["qwen3.5-35b-a3b"] | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "layer_types": _HYBRID_LAYERS,
    "max_position_embeddings": 4096,
    "vocab_size": 512,
    "eos_token_id": 256,
}

ARMS = ("none", "null", "offloading", "tiering", "lmcache", "lakecache", "lakecache-always")


def kv_bytes_per_token(model: str) -> int:
    """Bytes of attention KV that one token takes in all layers, in two-byte numbers."""
    shape = MODELS[model]
    layers = shape.get("layer_types", ["full_attention"] * shape["num_hidden_layers"])
    full = sum(kind == "full_attention" for kind in layers)
    return full * 2 * shape["num_key_value_heads"] * shape["head_dim"] * 2


def state_bytes(model: str) -> int:
    """Bytes of one recurrent state of all linear-attention layers (conv bf16, recurrent fp32)."""
    shape = MODELS[model]
    layers = shape.get("layer_types", []).count("linear_attention")
    if not layers:
        return 0
    keys = shape["linear_num_key_heads"] * shape["linear_key_head_dim"]
    values = shape["linear_num_value_heads"] * shape["linear_value_head_dim"]
    conv = (shape["linear_conv_kernel_dim"] - 1) * (2 * keys + values) * 2
    return layers * (conv + values * shape["linear_key_head_dim"] * 4)


def write_model(model: str, folder: Path) -> Path:
    """Make a model folder that holds nothing but its shape."""
    place = folder / model
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(MODELS[model], indent=1))
    return place


class Workplace:
    """Where a run keeps what it writes: a scratch folder, removed at the end, and a record."""

    def __init__(self, output: Path | None, scratch: Path | None) -> None:
        self.scratch = Path(tempfile.mkdtemp(prefix="lakecache-bench-", dir=scratch))
        self.ram = Path(tempfile.mkdtemp(prefix="lakecache-bench-", dir="/dev/shm"))
        self.output = output
        atexit.register(self.remove)

    def remove(self) -> None:
        """Delete everything but the record."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        shutil.rmtree(self.ram, ignore_errors=True)

    def save(self, record: dict[str, Any]) -> None:
        """Write the record as far as it goes, so that a run cut short leaves its results."""
        if self.output is None:
            return
        self.output.parent.mkdir(parents=True, exist_ok=True)
        partial = self.output.with_suffix(".partial")
        partial.write_text(json.dumps(record, indent=1) + "\n")
        partial.replace(self.output)


def transfer_config(arm: str, place: Workplace, options: Any) -> dict[str, Any] | None:
    """The KVTransferConfig of an arm, or None."""
    if arm == "none":
        return None
    base = {"kv_role": "kv_both"}
    cpu, disk = int(options.cpu_gib * GIB), int(options.disk_gib * GIB)
    if arm == "null":
        return base | {"kv_connector": "NullConnector", "kv_connector_module_path": "_engine_hooks"}
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


class Host:
    """An engine in a process group of its own, with one arm or several to switch between."""

    def __init__(
        self, arms: Sequence[str], model: str, place: Workplace, options: Any,
        lengths: Iterable[int], *, name: str | None = None, engine: dict[str, Any] | None = None,
        configs: dict[str, dict[str, Any]] | None = None, folder: Path | None = None,
    ) -> None:  # fmt: skip
        self.name = name or "+".join(arms)
        self.arms = list(arms)
        self.switched = len(arms) > 1
        self.process: subprocess.Popen | None = None
        configs = configs or {}
        settings = engine_settings(model, options, lengths) | (engine or {})
        settings["model"] = str(folder or write_model(model, place.scratch / "models"))
        wanted = {arm: configs.get(arm) or transfer_config(arm, place, options) for arm in arms}
        connected = {arm: config for arm, config in wanted.items() if config is not None}
        if self.switched:
            settings["kv_transfer_config"] = {
                "kv_connector": "SwitchConnector",
                "kv_connector_module_path": "_engine_hooks",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"arms": connected},
            }
        elif connected:
            settings["kv_transfer_config"] = connected[arms[0]]
        self.engine_id = f"bench-{os.getpid()}-{next(_numbers)}"
        if "kv_transfer_config" in settings:
            settings["kv_transfer_config"] = settings["kv_transfer_config"] | {
                "engine_id": self.engine_id
            }
        key = (lambda arm: arm) if self.switched else (lambda arm: "")
        self.spec = {
            "engine": settings,
            "vocabulary": MODELS[model]["vocab_size"] if model in MODELS else 500,
            "switched": self.switched,
            "watched": {key(arm): watched_folder(arm, place) for arm in arms},
            "dropped": {key(arm): [str(place.scratch / arm)] for arm in arms},
        }
        self.log = place.scratch / f"{self.name.replace('/', '_')}.log"
        self._specification = place.scratch / f"{self.name.replace('/', '_')}.json"
        self._options = options
        self.started: dict[str, Any] = {}
        self.spawned_at = time.perf_counter()
        self.ready_s = 0.0

    def spawn(self) -> Host:
        """Start the process; `wait` for it later."""
        self._specification.write_text(json.dumps(self.spec))
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT / 'python'}:{BENCHES}:{os.environ.get('PYTHONPATH', '')}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
        }
        if self._options.device == "cpu":
            environment |= {
                "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
            }  # fmt: skip
        else:
            environment.pop("TORCHDYNAMO_DISABLE", None)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(BENCHES / "_engine_host.py"), str(self._specification),
                 str(commands), str(answers)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                pass_fds=(commands, answers), start_new_session=True,
            )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self._buffer = b""
        self.spawned_at = time.perf_counter()
        _running.append(self)
        return self

    def wait(self) -> Host:
        """Wait until the engine is ready."""
        self.started = self._answer(START_SECONDS)
        self.ready_s = time.perf_counter() - self.spawned_at
        if not self.switched:
            self.call("settle", flush=False)
        for arm, reason in self.started["declined"].items():
            if reason:
                print(f"!! {arm or self.name} does nothing: {reason}", flush=True)
        return self

    def call(self, method: str, limit: float = CALL_SECONDS, **arguments: Any) -> Any:
        """Have the engine's process do something and return what it answers."""
        os.write(self._commands, json.dumps({"method": method, "with": arguments}).encode() + b"\n")
        return self._answer(limit)

    def activate(self, arm: str) -> None:
        """Switch to an arm, where there is a choice."""
        if self.switched:
            self.call("activate", name=None if arm == "none" else arm)

    def _answer(self, limit: float) -> Any:
        deadline = time.perf_counter() + limit
        while b"\n" not in self._buffer:
            left = deadline - time.perf_counter()
            if left <= 0 or not select.select([self._answers], [], [], min(left, 5.0))[0]:
                if left <= 0:
                    raise EngineError(self, f"no answer within {limit:.0f} s")
                continue
            data = os.read(self._answers, 1 << 20)
            if not data:
                raise EngineError(self, "the engine's process ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        said = json.loads(line)
        if "error" in said:
            raise EngineError(self, said["error"], usable=True)
        return said["ok"]

    def stop(self) -> None:
        """Ask the engine to end; then end whatever is left of its process group."""
        if self.process is None:
            return
        with contextlib.suppress(EngineError, OSError):
            self.call("quit", limit=30.0)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        self.kill()

    def kill(self) -> None:
        """End the process group, also where its leader has gone already."""
        process, self.process = self.process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # The memory that OffloadingConnector leaves behind when it is killed.
        for left in Path("/dev/shm").glob(f"vllm_offload_{self.engine_id}*"):
            left.unlink(missing_ok=True)
        for descriptor in (self._commands, self._answers):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        _running.remove(self)


class EngineError(RuntimeError):
    """An engine failed; the end of its log is part of the message.

    `usable` says whether it was one command that failed, and the engine takes the next.
    """

    def __init__(self, host: Host, what: str, *, usable: bool = False) -> None:
        self.usable = usable
        lines = host.log.read_text(errors="replace").splitlines() if host.log.exists() else []
        telling = [line for line in lines if "Error" in line or "error" in line][-8:]
        tail = "\n".join([*telling, "...", *lines[-25:]])
        super().__init__(f"{host.name}: {what}\n{tail}")


_running: list[Host] = []
_numbers = itertools.count(1)


def stop_all() -> None:
    """End every engine that is still there."""
    for host in list(_running):
        host.kill()


atexit.register(stop_all)


def stop_on_signals() -> None:
    """Let a time limit's SIGTERM end the engines too."""

    def leave(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


def start_hosts(hosts: Sequence[Host], *, one_by_one: bool = False) -> None:
    """Start engines. The first fills the compile cache alone, the rest then start together."""
    for number, host in enumerate(hosts):
        host.spawn()
        if one_by_one or number == 0:
            host.wait()
            progress(f"{host.name}: ready after {host.ready_s:.1f} s")
    if not one_by_one:
        for host in hosts[1:]:
            host.wait()
            progress(f"{host.name}: ready after {host.ready_s:.1f} s")


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


def disk_bandwidth(folder: Path, nbytes: int, threads: int = 8, block: int = 4 << 20) -> dict:
    """O_DIRECT bandwidth of a folder's disk, GB/s, several threads, fresh random bytes."""
    path = folder / "bandwidth"
    nbytes -= nbytes % (threads * block)
    flags = getattr(os, "O_DIRECT", 0)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
    except OSError:
        flags = 0
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    rates: dict[str, Any] = {"bytes": nbytes, "threads": threads, "direct": bool(flags)}

    def run(index: int, write: bool) -> None:
        buffer = mmap.mmap(-1, block)
        if write:
            buffer.write(os.urandom(block))
        for offset in range(index * block, nbytes, threads * block):
            if write:
                os.pwrite(descriptor, buffer, offset)
            else:
                os.preadv(descriptor, [buffer], offset)

    try:
        for name, write in (("write", True), ("read", False)):
            if not flags and not write:
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            workers = [threading.Thread(target=run, args=(i, write)) for i in range(threads)]
            started = time.perf_counter()
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            rates[name] = nbytes / (time.perf_counter() - started) / 1e9
    finally:
        os.close(descriptor)
        path.unlink()
    return rates


def describe_machine() -> dict[str, Any]:
    """What a record has to say about where it was made."""
    versions: dict[str, Any] = {}
    from importlib import metadata

    for name in ("vllm", "torch", "triton", "lmcache"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    gpu = None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        gpu = subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.strip()
    commit = None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.strip()
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or None,
        "gpu": gpu or None,
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
        "shm_bytes": shutil.disk_usage("/dev/shm").total,
    }


def progress(text: str) -> None:
    """Say what happens now, with the seconds since the start."""
    print(f"[{time.perf_counter() - _BEGIN:6.1f}] {text}", flush=True)


_BEGIN = time.perf_counter()


# Statistics and tables


def median(samples: Sequence[float]) -> float:
    """The median, or NaN of nothing."""
    return statistics.median(samples) if samples else math.nan


def interval(samples: Sequence[float], repeats: int = 2000) -> tuple[float, float]:
    """95 % interval of the median, by resampling with a fixed seed."""
    if len(samples) < 2:
        return math.nan, math.nan
    chance = random.Random(1)
    seen = sorted(
        statistics.median(chance.choices(samples, k=len(samples))) for _ in range(repeats)
    )
    return seen[int(0.025 * repeats)], seen[int(0.975 * repeats)]


def quantile(samples: Sequence[float], share: float) -> float:
    """A quantile by nearest rank, or NaN of nothing."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


def summary(samples: Sequence[float]) -> str:
    """Median and range."""
    if not samples:
        return "-"
    return f"{median(samples):.2f} [{min(samples):.2f}-{max(samples):.2f}]"


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Largest difference of two answers' log-probabilities; infinite where their tokens differ."""
    if one["tokens"] != other["tokens"]:
        return math.inf
    return max(
        abs(a[token] - b[token])
        for a, b in zip(one["logprobs"], other["logprobs"], strict=True)
        for token in a
        if token in b
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns of equal width, for a terminal."""
    lines = [[str(cell) for cell in line] for line in [header, *rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


# Options


def add_options(parser: Any, *, models: Sequence[str], arms: Sequence[str]) -> None:
    """Options that every engine bench has."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--models", default=",".join(models))
    parser.add_argument("--arms", default=",".join(arms))
    parser.add_argument("--output", type=Path, help="JSON record, written as the run goes")
    parser.add_argument("--scratch", type=Path, help="where the disk tiers lie (default: TMPDIR)")
    parser.add_argument("--cpu-gib", type=float, default=24.0, help="memory tier of each arm")
    parser.add_argument("--disk-gib", type=float, default=24.0, help="disk tier of each arm")
    parser.add_argument("--kv-gib", type=float, help="KV cache on the GPU (default: by model)")
    parser.add_argument("--gpu-share", type=float, default=0.1, help="gpu_memory_utilization")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--rival-block", type=int, help="tokens per chunk of OffloadingConnector")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--keep-logs", type=Path, help="file to append the engines' logs to")
    parser.add_argument(
        "--lakecache", type=json.loads, default={}, help="further LakeCache settings, JSON"
    )
    parser.add_argument("--engine", type=json.loads, default={}, help="further vllm.LLM settings")


def keep_logs(place: Workplace, path: Path | None) -> None:
    """Append the beginnings and ends of the engines' logs to one file."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as kept:
        for log in sorted(place.scratch.glob("*.log")):
            data = log.read_bytes()
            kept.write(f"\n===== {log.name}\n".encode())
            if len(data) > 2 * LOG_BYTES:
                data = data[:LOG_BYTES] + b"\n[...]\n" + data[-LOG_BYTES:]
            kept.write(data)


def split(text: str, convert: Any = str) -> list[Any]:
    """Values of a comma-separated option."""
    return [convert(part) for part in text.split(",") if part]
