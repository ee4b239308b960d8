"""Where the KV pages of one rank lie, and how an object's bytes map onto them.

vLLM gives each worker one allocation. Layer `l` of block `b` starts at
`base + offset + l * layer_stride + b * block_stride`; its page is one contiguous run of bytes in
the layouts accepted here. Nothing inside a page is looked at: pages are opaque.

One rank's part of an object is: for each layer, for each block of the chunk, the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from lakecache.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["LAYOUTS", "Fragments", "PageTable", "layer_specs"]

# The layouts whose pages are contiguous: layer and block are the two outer dimensions.
LAYOUTS = frozenset({"LBNHC", "LBHNC", "BLNHC", "BLHNC"})


class Layer(NamedTuple):
    """One layer's pages: `address + block * stride`, `page_bytes` long."""

    name: str
    address: int
    stride: int
    page_bytes: int


class Fragments(NamedTuple):
    """A contiguous run of object bytes and the equal pieces of memory it maps to."""

    offset: int
    addresses: Any
    fragment_bytes: int


def layer_specs(kv_cache_config: KVCacheConfig) -> list[tuple[str, Any]]:
    """Name and spec of each layer of the only group, in the order of the allocation."""
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    inner = getattr(spec, "kv_cache_specs", None)
    names = set(group.layer_names)
    return [
        (name, spec if inner is None else inner[name])
        for tensor in kv_cache_config.kv_cache_tensors
        for name in tensor.layers
        if name in names
    ]


class PageTable:
    """Addresses of every layer's pages, computed once when vLLM registers its caches."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        kv_caches: Mapping[str, torch.Tensor],
        blocks_per_chunk: int,
    ) -> None:
        """Compute the table; ConfigError says in one sentence why a layout is refused."""
        layout = kv_cache_config.kv_cache_layout
        if layout not in LAYOUTS:
            raise ConfigError(
                f"KV cache layout {layout} has pages that are not contiguous; "
                f"LakeCache works with {', '.join(sorted(LAYOUTS))}"
            )
        specs = dict(layer_specs(kv_cache_config))
        self.blocks_per_chunk = blocks_per_chunk
        self.num_blocks = kv_cache_config.num_blocks
        self.layers: list[Layer] = []
        for placed in kv_cache_config.kv_cache_tensors:
            for position, name in enumerate(placed.layers):
                if name not in specs:
                    continue
                storage = kv_caches[name].untyped_storage()
                page_bytes = specs[name].page_size_bytes
                start = placed.offset + position * placed.layer_stride
                end = start + (self.num_blocks - 1) * placed.block_stride + page_bytes
                if end > storage.nbytes() or page_bytes > placed.block_stride:
                    raise ConfigError(
                        f"layer {name} would end at byte {end} of an allocation of "
                        f"{storage.nbytes()} bytes, so its pages are not laid out as expected"
                    )
                self.layers.append(
                    Layer(name, storage.data_ptr() + start, placed.block_stride, page_bytes)
                )
        if {layer.name for layer in self.layers} != set(specs) or not self.layers:
            raise ConfigError("not every layer of the KV cache group has a place in the allocation")

    @property
    def part_bytes(self) -> int:
        """Bytes of this rank in one object."""
        return sum(layer.page_bytes for layer in self.layers) * self.blocks_per_chunk

    def fragments(self, block_ids: bytes, *, skip: int = 0) -> Iterator[Fragments]:
        """Map a chunk, less its first `skip` blocks, to memory.

        Without `skip`, neighbouring layers with equal pages make one run. With it, each layer is
        a run of its own, because the bytes left out lie between them.
        """
        import numpy as np

        blocks = np.frombuffer(block_ids, dtype=np.uint32).astype(np.uint64)
        if len(blocks) != self.blocks_per_chunk - skip or not len(blocks):
            raise ValueError(f"{len(blocks)} blocks for a chunk of {self.blocks_per_chunk}")
        if int(blocks.max()) >= self.num_blocks or int(blocks.min()) == 0:
            raise ValueError("a block id lies outside the KV cache")
        offset = 0
        run: list[Any] = []
        run_start = 0
        for position, layer in enumerate(self.layers):
            pages = np.uint64(layer.address) + blocks * np.uint64(layer.stride)
            if not run:
                run_start = offset + skip * layer.page_bytes
            run.append(pages)
            offset += layer.page_bytes * self.blocks_per_chunk
            last = position + 1 == len(self.layers)
            if skip or last or self.layers[position + 1].page_bytes != layer.page_bytes:
                yield Fragments(run_start, np.concatenate(run), layer.page_bytes)
                run = []
