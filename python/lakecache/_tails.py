"""Which bytes of a page hold its first tokens: a tail stores no others.

Backends lay their pages out as they like: heads outside or inside, K and V side by side or apart,
on CPUs K transposed or in tiles, by instruction set. So the backend is asked. It writes tokens into
a page of our own, and the bytes that it changes are theirs.

What a restored tail leaves alone has to be finite, because kernels multiply it with zeros: vLLM
clears new blocks for that. Where it does not, or a backend cannot be asked, pages stay whole.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lakecache._pages import layer_specs

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from lakecache._pages import Groups

__all__ = ["Run", "Runs", "tail_runs"]

log = logging.getLogger("vllm.lakecache")

# First byte within a page, and number of bytes.
Run = tuple[int, int]
# By layer; one that is missing has its whole page stored.
Runs = dict[str, list[Run]]

# Tokens scattered over more runs than this are copied faster with all between them.
RUNS_MAX = 2048


def tail_runs(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    groups: Groups,
    sizes: Sequence[int],
) -> list[Runs]:
    """Give for each of the `sizes`, in tokens, the runs of so many first tokens of a page, in all
    attention layers that tell.
    """
    layers = vllm_config.compilation_config.static_forward_context
    found: list[Runs] = [{} for _ in sizes]
    answers: dict[Any, list[list[Run]] | None] = {}
    for group in groups.attention if sizes else ():
        for name, spec in layer_specs(kv_cache_config, (group,)):
            layer, view = layers.get(name), kv_caches[name]
            if layer is None or not _cleared(kv_cache_config, group, view):
                continue
            alike = type(layer.impl), str(spec), view.shape, view.stride()
            if alike not in answers:
                pages = len(view) // kv_cache_config.num_blocks
                dtype = vllm_config.model_config.dtype
                try:
                    answers[alike] = _ask(layer, spec, view, pages, dtype, sizes)
                except Exception as error:  # whatever it is, whole pages are right
                    log.info("LakeCache stores whole pages of layers like %s: %r", name, error)
                    answers[alike] = None
            for runs, first in zip(found, answers[alike] or (), strict=False):
                runs[name] = first
    return found


def _cleared(kv_cache_config: KVCacheConfig, group: int, view: torch.Tensor) -> bool:
    """Whether vLLM clears each new block of this group before anything is copied to it."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return (
        kv_cache_config.needs_kv_cache_zeroing
        and isinstance(kv_cache_config.kv_cache_groups[group].kv_cache_spec, FullAttentionSpec)
        # On a CPU it takes a block's number for a place in the view.
        and (view.device.type != "cpu" or len(view) == kv_cache_config.num_blocks)
    )


def _ask(
    layer: Any, spec: Any, view: torch.Tensor, pages: int, dtype: torch.dtype, sizes: Sequence[int]
) -> list[list[Run]]:
    """Have the layer write so many first tokens of a page, for each size, and see where they lie.

    `view` is the layer's cache, of which only shape, strides and type are used; `pages` is how many
    of its kernel blocks, one after the other, make a page; `dtype` is that of K and V. Raises
    whatever a backend does that cannot be asked so, and ValueError where tokens do not explain the
    page.
    """
    import numpy as np
    import torch

    shape, stride = (pages, *view.shape[1:]), view.stride()

    def written(tokens: int) -> Any:
        """Give for each byte of the page whether the first tokens are written to it."""
        key = torch.zeros(
            (tokens, layer.num_kv_heads, layer.head_size), dtype=dtype, device=view.device
        )
        value = key.new_zeros((tokens, layer.num_kv_heads, layer.head_size_v))
        slots = torch.arange(tokens, dtype=torch.int64, device=view.device)
        changed = np.zeros(spec.page_size_bytes, dtype=bool)
        # Whatever a byte becomes, it was something else before in one of the two.
        for before in (0, 255):
            page = torch.full(changed.shape, before, dtype=torch.uint8, device=view.device)
            cache = page.view(view.dtype).as_strided(shape, stride)
            _apart(layer.impl).do_kv_cache_update(layer, key, value, cache, slots)
            changed |= (page != before).cpu().numpy()
        return changed

    with torch.inference_mode():
        if not written(spec.block_size).all():
            raise ValueError("a page has bytes that come with no token")
        found = [_runs(written(tokens)) for tokens in sizes]
    if (pieces := max(map(len, found))) > RUNS_MAX:
        raise ValueError(f"tokens lie in {pieces} pieces, more than {RUNS_MAX}")
    return found


def _apart(backend: Any) -> Any:
    """Copy a backend, with those that it hands on to: each may keep views of the cache that it is
    first called with, which the engine and the next page must not get.
    """
    found = copy.copy(backend)
    for name, part in vars(backend).items():
        if hasattr(part, "do_kv_cache_update"):
            setattr(found, name, _apart(part))
    return found


def _runs(mask: Any) -> list[Run]:
    import numpy as np

    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return [(int(begin), int(end - begin)) for begin, end in edges.reshape(-1, 2)]
