"""Which engines the chunk connector serves. Anything else is declined in one sentence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lakecache._pages import LAYOUTS, layer_specs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["KIND_CHUNK", "chunk_geometry", "declined_reason", "platform_declined"]

# What an object holds; part of its key and of its file's header.
KIND_CHUNK = 0

# Speculative methods that keep no KV of their own in the cache.
PLAIN_SPECULATION = {"ngram", "ngram_gpu", "suffix"}


def platform_declined() -> str | None:
    """Say why there are no transfers for this platform, or None."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() or current_platform.is_cuda():
        return None
    return f"platform {current_platform.device_name} is not supported; CUDA and CPU are"


def declined_reason(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Say why this engine is not served, or None. Both halves come to the same answer."""
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism is not supported"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism is not supported"
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in PLAIN_SPECULATION:
        return f"speculative decoding with {speculative.method} is not supported"
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return (
            f"the model has {len(groups)} KV cache groups (a hybrid or sliding-window model); only "
            "models with full attention in every layer are supported"
        )
    if kv_cache_config.kv_cache_layout not in LAYOUTS:
        return (
            f"KV cache layout {kv_cache_config.kv_cache_layout} is not supported; "
            f"supported are {', '.join(sorted(LAYOUTS))}"
        )
    return _group_declined(kv_cache_config) or platform_declined()


def _group_declined(kv_cache_config: KVCacheConfig) -> str | None:
    from vllm.v1.kv_cache_interface import KVCacheSpecKind, get_kv_cache_spec_kind

    group = kv_cache_config.kv_cache_groups[0]
    if group.is_eagle_group or group.host_resident or not group.enable_kv_transfer:
        return "the KV cache group holds draft layers, lies in host memory or is not transferable"
    for name, spec in layer_specs(kv_cache_config):
        kind = get_kv_cache_spec_kind(spec)
        if kind not in {KVCacheSpecKind.FULL_ATTENTION, KVCacheSpecKind.MLA_ATTENTION}:
            return f"layer {name} has {kind.value}, and only full attention is supported"
        if getattr(spec, "non_causal", False):
            return f"layer {name} is not causal, so its KV depends on later tokens"
        if not spec.prefix_cacheable or not getattr(spec, "has_layer_views", True):
            return f"layer {name} has a KV cache that cannot be addressed by prefix"
    return None


def chunk_geometry(kv_cache_config: KVCacheConfig, chunk_size: int) -> tuple[int, int, int]:
    """Return (tokens per chunk, tokens per block, tokens per hash).

    A chunk is the smallest multiple of the block that holds `chunk_size` tokens.
    """
    block: int = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    unit: Any = kv_cache_config.hash_block_size or block
    step = math.lcm(block, unit)
    return -(-chunk_size // step) * step, block, unit
