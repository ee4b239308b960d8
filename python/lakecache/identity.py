"""The namespace: a digest of all that changes the bytes of the KV cache, besides the tokens.

vLLM's block hashes cover tokens, LoRA names, multimodal inputs and cache_salt. All the rest is
collected here. A difference is another namespace: never an error, and never a reuse.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import logging
import os
import pickle
import platform
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from lakecache._tails import Runs

__all__ = [
    "Fingerprint",
    "LoraDigest",
    "canonical_json",
    "engine_identity",
    "file_ranges",
    "model_files",
    "rank_identity",
    "unstable_reason",
]

log = logging.getLogger("vllm.lakecache")

FORMAT_VERSION = 1
# Files below this are hashed whole; larger safetensors files by header and samples.
WHOLE_FILE_BYTES = 256 << 20
SAMPLE_BYTES = 4096
# A sample of each so many bytes of a tensor, and of each expert, filter or the like: fine-tunes may
# change only some of those that lie in one tensor.
SAMPLE_EVERY_BYTES = 8 << 20
LARGEST_HEADER_BYTES = 256 << 20
FINGERPRINT_THREADS = 4
# Large tensors that fine-tunes change first, under the names of the common families.
WHOLE_TENSORS = ("embed", "lm_head", "wte.", "output.weight")
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz"}
# Formats whose weights are files in the model's directory.
LOCAL_LOAD_FORMATS = {
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt",
    "sharded_state", "gguf", "bitsandbytes",
}  # fmt: skip
TOKENIZER_FILES = ("tokenizer", "vocab", "special_tokens", "added_tokens", "generation_config")


def canonical(value: Any) -> Any:
    """Reduce a value to JSON that is the same in every process: no addresses, no paths' order."""
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): canonical(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((canonical(item) for item in value), key=repr)
    if isinstance(value, Iterable):
        return [canonical(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            "type": type(value).__name__,
            **{f.name: canonical(getattr(value, f.name)) for f in dataclasses.fields(value)},
        }
    text = str(value)
    # torch.dtype and the like print as themselves; the default text of an object has its address.
    return type(value).__qualname__ if " at 0x" in text else text


def canonical_json(value: Any) -> bytes:
    """Encode with sorted keys and no spaces."""
    return json.dumps(canonical(value), sort_keys=True, separators=(",", ":")).encode()


def unstable_reason(vllm_config: VllmConfig) -> str | None:
    """Say why nothing may outlive or leave this process, or None where it may."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if "xxhash" in algorithm and os.getenv("PYTHONHASHSEED") is None:
        return (
            f"prefix_caching_hash_algo is {algorithm} with a random seed, so block hashes differ "
            "in every process; use sha256, or set PYTHONHASHSEED"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "calculate_kv_scales takes the KV scales from whatever request comes first"
    load_format = str(vllm_config.load_config.load_format)
    if load_format == "dummy":
        return None
    if load_format not in LOCAL_LOAD_FORMATS:
        return f"load_format is {load_format}, whose weights are not files that can be compared"
    if model_files(vllm_config) is None:
        return f"the weights of {vllm_config.model_config.model} are not in a local directory"
    return None


def model_files(vllm_config: VllmConfig) -> list[Path] | None:
    """List the files that make the weights, or None where they are not local."""
    model = vllm_config.model_config
    if getattr(model, "model_weights", None):
        return None
    path = Path(model.model)
    if not path.exists():
        found = _downloaded(model.model, getattr(model, "revision", None))
        if found is None:
            return None
        path = found
    if path.is_file():
        return [path]
    files = [
        entry
        for entry in path.iterdir()
        if entry.is_file()
        and (
            entry.suffix in WEIGHT_SUFFIXES
            or (entry.suffix == ".json" and not entry.name.startswith(TOKENIZER_FILES))
        )
    ]
    if not any(entry.suffix in WEIGHT_SUFFIXES for entry in files):
        return None
    return sorted(files)


def _downloaded(name: str, revision: str | None) -> Path | None:
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:  # any failure to find the files means the same: they are not here
        return None


def file_ranges(path: Path) -> list[tuple[int, int]] | None:
    """Choose the (offset, length) pairs to hash of a file; None means all of it."""
    size = path.stat().st_size
    if size < WHOLE_FILE_BYTES or path.suffix != ".safetensors":
        return None
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > min(size - 8, LARGEST_HEADER_BYTES):
            return None
        header = json.loads(file.read(header_bytes))
    data = 8 + header_bytes
    ranges = [(0, data)]
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        begin, end = tensor["data_offsets"]
        every = SAMPLE_EVERY_BYTES
        if len(tensor["shape"]) > 2:
            every = max(SAMPLE_BYTES, min(every, (end - begin) // max(tensor["shape"][0], 1)))
        if any(part in name for part in WHOLE_TENSORS) or every == SAMPLE_BYTES:
            ranges.append((data + begin, end - begin))
            continue
        ranges += [(data + at, min(SAMPLE_BYTES, end - at)) for at in range(begin, end, every)]
    return sorted(each for each in ranges if each[1])


class Fingerprint:
    """The weights' digest, computed on threads of its own. Until it is known, all is a miss."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Start. Dummy weights need no thread: configuration and seed make them."""
        self._done = threading.Event()
        self._digest: str | None = None
        if str(vllm_config.load_config.load_format) == "dummy":
            self._digest = f"dummy seed {vllm_config.model_config.seed}"
            self._done.set()
            return
        self._config = vllm_config
        threading.Thread(target=self._run, name="lakecache-weights", daemon=True).start()

    def poll(self) -> str | None:
        """Give the digest, or None while it is not known or cannot be had."""
        return self._digest

    def wait(self, timeout: float) -> bool:
        """Wait for the answer; for tests and tools only."""
        return self._done.wait(timeout)

    def _run(self) -> None:
        try:
            files = model_files(self._config)
            if files:
                self._digest = files_digest(files)
        except Exception:
            log.warning("LakeCache could not read the weights, so it caches nothing", exc_info=True)
        finally:
            self._done.set()


class LoraDigest:
    """The digest of an adapter's files: vLLM's block hashes cover only its name and path."""

    def __init__(self, path: str) -> None:
        """Start reading."""
        self._digest: str | None = None
        self._path = Path(path)
        threading.Thread(target=self._run, name="lakecache-lora", daemon=True).start()

    def poll(self) -> str | None:
        """Give the digest, or None while it is not known or cannot be had."""
        return self._digest

    def _run(self) -> None:
        try:
            files = sorted(file for file in self._path.iterdir() if file.is_file())
            if files:
                self._digest = files_digest(files)
        except OSError:
            log.warning("LakeCache cannot read LoRA adapter %s, so it skips it", self._path)


def files_digest(files: list[Path]) -> str:
    """Digest the content of files: never their names, places or times."""
    from lakecache import _core

    def one(path: Path) -> tuple[int, str]:
        digest = _core.blake3_file(str(path), file_ranges(path))
        return path.stat().st_size, digest.hex()

    with ThreadPoolExecutor(FINGERPRINT_THREADS) as threads:
        parts = sorted(threads.map(one, files))
    return _core.blake3(canonical_json(parts)).hex()


def engine_identity(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, chunk_tokens: int
) -> dict[str, Any]:
    """Collect what the scheduler's process knows. The hash seed must be initialised by now."""
    from vllm.v1.core.kv_cache_utils import get_none_hash_seed

    import vllm

    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    hf_config = dict(model.hf_config.to_dict())
    for unrelated in ("_name_or_path", "transformers_version", "torch_dtype"):
        hf_config.pop(unrelated, None)
    hashing: dict[str, Any] = {
        "algorithm": cache.prefix_caching_hash_algo,
        "seed": get_none_hash_seed(),
    }
    if not cache.prefix_caching_hash_algo.endswith("cbor"):
        # These hash a pickle, whose bytes belong to a Python version.
        hashing["pickle"] = pickle.HIGHEST_PROTOCOL
        hashing["python"] = list(sys.version_info[:2])
    rope = json.dumps(canonical(hf_config))
    return {
        "format": FORMAT_VERSION,
        "vllm": vllm.__version__,
        "chunk_tokens": chunk_tokens,
        "model": {
            "config": hf_config,
            "dtype": str(model.dtype),
            "quantization": model.quantization,
            # LongRoPE picks its factors by the longest length served.
            "max_model_len": model.max_model_len if "longrope" in rope else None,
        },
        "cache": {
            "dtype": cache.cache_dtype,
            "groups": [
                {"block_size": group.kv_cache_spec.block_size, "layers": group.layer_names}
                for group in kv_cache_config.kv_cache_groups
            ],
            "hash_block_size": kv_cache_config.hash_block_size,
            "skip_layers": getattr(cache, "kv_cache_dtype_skip_layers", None),
        },
        "hash": hashing,
        "parallel": {
            "tensor": parallel.tensor_parallel_size,
            "pipeline": parallel.pipeline_parallel_size,
            "decode_context": parallel.decode_context_parallel_size,
            "prefill_context": parallel.prefill_context_parallel_size,
        },
        "speculative": getattr(vllm_config.speculative_config, "method", None),
    }


def rank_identity(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, Any],
    specs: list[tuple[str, Any]],
    tails: Sequence[Runs] = (),
) -> str:
    """Collect what only a worker knows about its pages, as canonical JSON.

    `tails` says which bytes of a page the tails of each size hold.
    """
    context = vllm_config.compilation_config.static_forward_context
    layers = []
    backends = set()
    for name, spec in specs:
        tensor = kv_caches[name]
        backend = _backend(context.get(name))
        backends.add(backend)
        layers.append(
            {
                "name": name,
                "spec": canonical(spec),
                "page_bytes": spec.page_size_bytes,
                "shape": list(tensor.shape[1:]),
                "stride": list(tensor.stride()[1:]),
                "dtype": str(tensor.dtype),
                "backend": backend,
            }
        )
    identity: dict[str, Any] = {
        "layers": layers,
        "layout": kv_cache_config.kv_cache_layout,
        "device": _device_identity(vllm_config, specs, next(iter(kv_caches.values())).device.type),
    }
    if tails:
        identity["tails"] = hashlib.sha256(canonical_json(tails)).hexdigest()
    return canonical_json(identity).decode()


def _backend(layer: Any) -> str:
    try:
        return str(layer.get_attn_backend().get_name())
    except Exception:  # a layer without a backend is told apart by its class
        return type(layer).__qualname__


def _device_identity(
    vllm_config: VllmConfig, specs: list[tuple[str, Any]], device: str
) -> dict[str, Any]:
    found: dict[str, Any] = {"type": device, "machine": platform.machine()}
    if device != "cpu":
        from vllm.platforms import current_platform

        found["capability"] = str(current_platform.get_device_capability())
        return found
    import torch

    found["capability"] = torch.backends.cpu.get_cpu_capability()
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        found["isa"] = sorted(
            {
                _get_attn_isa(
                    spec.dtype,
                    spec.block_size,
                    spec.head_size,
                    vllm_config.cache_config.cache_dtype,
                )
                for _, spec in specs
                if hasattr(spec, "head_size")
            }
        )
    except Exception as error:  # then the capability alone tells machines apart
        found["isa"] = type(error).__name__
    return found
