"""Which engines the connectors serve, and how their KV cache is grouped.

Anything else is declined in one sentence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lakecache._objects import Geometry
from lakecache._pages import LAYOUTS, Groups, layer_specs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = [
    "cache_groups",
    "chunk_geometry",
    "declined_reason",
    "is_hybrid",
    "platform_declined",
]

# Speculative methods that keep no KV of their own in the cache.
PLAIN_SPECULATION = {"ngram", "ngram_gpu", "suffix"}


def platform_declined() -> str | None:
    """Say why there are no transfers for this platform, or None."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() or current_platform.is_cuda():
        return None
    return f"platform {current_platform.device_name} is not supported; CUDA and CPU are"


def is_hybrid(kv_cache_config: KVCacheConfig) -> bool:
    """Whether a group holds recurrent state."""
    from vllm.v1.kv_cache_interface import KVCacheSpecKind

    return any(_kind(group) == KVCacheSpecKind.MAMBA for group in kv_cache_config.kv_cache_groups)


def cache_groups(kv_cache_config: KVCacheConfig, *, hybrid: bool) -> Groups:
    """Which groups' layers are stored, by the groups' specs.

    In a hybrid the group of a drafter that cannot be stored with the others is left out: its
    layers find no KV after a load, and guess worse for a while.
    """
    if not hybrid:
        return Groups((0,))
    from vllm.v1.kv_cache_interface import KVCacheSpecKind

    groups = list(enumerate(kv_cache_config.kv_cache_groups))
    states = [index for index, group in groups if _kind(group) == KVCacheSpecKind.MAMBA]
    rest = [index for index, _ in groups if index not in states]
    blocks = _block_sizes(kv_cache_config, states)
    attention = [
        index
        for index in rest
        if not (
            kv_cache_config.kv_cache_groups[index].is_eagle_group
            and (
                _group_declined(kv_cache_config, index)
                or kv_cache_config.kv_cache_groups[index].kv_cache_spec.block_size not in blocks
            )
        )
    ]
    return Groups(tuple(attention), tuple(states))


def chunk_geometry(kv_cache_config: KVCacheConfig, groups: Groups, chunk_size: int) -> Geometry:
    """A chunk is the smallest multiple of the block that holds `chunk_size` tokens; with recurrent
    state it is the engine's block, where the states are.
    """
    group = kv_cache_config.kv_cache_groups[groups.attention[0]]
    block: int = group.kv_cache_spec.block_size
    unit: Any = kv_cache_config.hash_block_size or block
    if groups.states:
        return Geometry(block, block, unit)
    step = math.lcm(block, unit)
    return Geometry(-(-chunk_size // step) * step, block, unit)


def declined_reason(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, hybrid: bool
) -> str | None:
    """Say why this engine is not served, or None. Both halves come to the same answer."""
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism is not supported"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism is not supported"
    if kv_cache_config.kv_cache_layout not in LAYOUTS:
        return (
            f"KV cache layout {kv_cache_config.kv_cache_layout} is not supported; "
            f"supported are {', '.join(sorted(LAYOUTS))}"
        )
    declined = _hybrid_declined if hybrid else _attention_declined
    return declined(vllm_config, kv_cache_config) or platform_declined()


def _attention_declined(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in PLAIN_SPECULATION:
        return f"speculative decoding with {speculative.method} is not supported"
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return (
            f"the model has {len(groups)} KV cache groups (a hybrid or sliding-window model); only "
            "models with full attention in every layer are supported"
        )
    if groups[0].is_eagle_group:
        return "the KV cache group holds draft layers"
    return _group_declined(kv_cache_config, 0)


def _hybrid_declined(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    if not is_hybrid(kv_cache_config):
        return (
            "no layer of the model keeps a recurrent state; use LakeCacheConnector, which serves "
            "models with full attention too"
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in PLAIN_SPECULATION:
        # An MTP head is part of the model's own files, so the weights' digest covers it.
        if speculative.method != "mtp":
            return f"speculative decoding with {speculative.method} is not supported in a hybrid"
        if speculative.model not in {None, vllm_config.model_config.model}:
            return "the MTP head is in another folder than the model, whose weights alone are read"
    mode = vllm_config.cache_config.mamba_cache_mode
    if mode != "align":
        return (
            f"mamba_cache_mode is {mode}, so vLLM keeps no state at block boundaries; "
            "start it with --enable-prefix-caching"
        )
    groups = cache_groups(kv_cache_config, hybrid=True)
    if not groups.attention:
        return "no layer of the model has full attention, so no prefix can be continued"
    for declined, stored in (
        (_state_declined, groups.states),
        (_group_declined, groups.attention),
    ):
        for at in stored:
            if reason := declined(kv_cache_config, at):
                return reason
    sizes = _block_sizes(kv_cache_config, (*groups.states, *groups.attention))
    if len(sizes) != 1:
        return (
            f"the KV cache groups have blocks of {', '.join(map(str, sorted(sizes)))} tokens; "
            "only equal ones are supported"
        )
    return None


def _block_sizes(kv_cache_config: KVCacheConfig, groups: Sequence[int]) -> set[int]:
    return {kv_cache_config.kv_cache_groups[at].kv_cache_spec.block_size for at in groups}


def _kind(group: Any) -> Any:
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    return get_kv_cache_spec_kind(group.kv_cache_spec)


def _place_declined(group: Any) -> str | None:
    if group.host_resident or not group.enable_kv_transfer:
        return "a KV cache group lies in host memory or is not transferable"
    return None


def _state_declined(kv_cache_config: KVCacheConfig, at: int) -> str | None:
    group = kv_cache_config.kv_cache_groups[at]
    for name, spec in layer_specs(kv_cache_config, (at,)):
        if spec.mamba_type.name != "GDN_ATTN":
            return (
                f"layer {name} keeps a {spec.mamba_type.name} state, only Gated DeltaNet is known"
            )
        if not spec.prefix_cacheable:
            return f"layer {name} keeps a state that cannot be addressed by prefix"
    return _place_declined(group)


def _group_declined(kv_cache_config: KVCacheConfig, at: int) -> str | None:
    from vllm.v1.kv_cache_interface import KVCacheSpecKind, get_kv_cache_spec_kind

    for name, spec in layer_specs(kv_cache_config, (at,)):
        kind = get_kv_cache_spec_kind(spec)
        if kind not in {KVCacheSpecKind.FULL_ATTENTION, KVCacheSpecKind.MLA_ATTENTION}:
            return f"layer {name} has {kind.value}, and only full attention is supported"
        if getattr(spec, "non_causal", False):
            return f"layer {name} is not causal, so its KV depends on later tokens"
        if not spec.prefix_cacheable or not getattr(spec, "has_layer_views", True):
            return f"layer {name} has a KV cache that cannot be addressed by prefix"
    return _place_declined(kv_cache_config.kv_cache_groups[at])
