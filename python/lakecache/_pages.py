"""Where the KV pages of one rank lie, and how an object's bytes map onto them.

vLLM gives each worker one allocation. Layer `l` of block `b` starts at
`base + offset + l * layer_stride + b * block_stride`; its page is one contiguous run of bytes in
the layouts accepted here. Nothing inside a page is looked at: pages are opaque, except that
`lakecache._tails` finds out which of their bytes hold the first tokens.

One rank's part of an object is described by an `ObjectShape`: a table of rows, each of which is a
run of bytes in the part and, for a given block, in the allocation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lakecache.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from lakecache._tails import Runs

__all__ = ["LAYOUTS", "Fragments", "Groups", "Layer", "ObjectShape", "PageTable", "layer_specs"]

# The layouts whose pages are contiguous: layer and block are the two outer dimensions.
LAYOUTS = frozenset({"LBNHC", "LBHNC", "BLNHC", "BLHNC"})


class Groups(NamedTuple):
    """The KV cache groups that are stored: those of attention, and those of recurrent state."""

    attention: tuple[int, ...]
    states: tuple[int, ...] = ()


class Layer(NamedTuple):
    """One layer's pages: `address + block * stride`, of which `page_bytes` have a meaning."""

    name: str
    address: int
    stride: int
    page_bytes: int
    group: int


class Fragments(NamedTuple):
    """A contiguous run of object bytes and the equal pieces of memory it maps to."""

    offset: int
    addresses: Any
    fragment_bytes: int


class Row(NamedTuple):
    """A run of `size` bytes: at `offset` of the part, and at `base + ids[slot] * stride`."""

    base: int
    stride: int
    size: int
    offset: int
    slot: int


class ObjectShape:
    """How one rank's part of an object maps onto pages, given a vector of block ids.

    `bases`, `strides`, `sizes` and `offsets` (uint64) and `slots` (int64) are arrays with one
    element per row. Rows follow each other in the part without gaps. Block id 0 is vLLM's null
    block; rows of such a slot are left out.
    """

    def __init__(self, rows: list[Row], *, slot_count: int, num_blocks: int) -> None:
        """Make the table; neighbours that are contiguous in both places become one row."""
        import numpy as np

        rows = _merged(rows)
        self.slot_count = slot_count
        self.num_blocks = num_blocks
        self.part_bytes = sum(row.size for row in rows)
        self.bases, self.strides, self.sizes, self.offsets = (
            np.array([row[field] for row in rows], dtype=np.uint64) for field in range(4)
        )
        self.slots = np.array([row.slot for row in rows], dtype=np.int64)
        ends = self.offsets + self.sizes
        # Whether the next row goes on where this one ends, with pieces of the same size.
        self._joined = (ends[:-1] == self.offsets[1:]) & (self.sizes[:-1] == self.sizes[1:])

    def check(self, ids: bytes, *, whole: bool) -> Any:
        """Give the packed 32-bit block ids as an array.

        Raises:
            ValueError: they are too many, too few, outside the cache, or (for a `whole` object)
                one of them is the null block.
        """
        import numpy as np

        blocks = np.frombuffer(ids, dtype=np.int32)
        if len(blocks) != self.slot_count:
            raise ValueError(f"{len(blocks)} blocks for an object of {self.slot_count}")
        # Of some ten numbers Python finds the ends in a quarter of the time that numpy takes.
        view = memoryview(ids).cast("i")
        low, high = min(view), max(view)
        if low < 0 or high >= self.num_blocks or high == 0:
            raise ValueError("a block id lies outside the KV cache")
        if whole and low == 0:
            raise ValueError("a block of an object to be stored is the null block")
        return blocks

    def fragments(self, blocks: Any) -> Iterator[Fragments]:
        """Map the object to memory: the longest runs of equal pieces, without null blocks."""
        import numpy as np

        ids = blocks.astype(np.uint64)[self.slots]
        addresses = self.bases + ids * self.strides
        there = ids != 0
        together = self._joined & (there[:-1] == there[1:])
        begin = 0
        for end in [*(np.flatnonzero(~together) + 1).tolist(), len(ids)]:
            if there[begin]:
                yield Fragments(
                    int(self.offsets[begin]), addresses[begin:end], int(self.sizes[begin])
                )
            begin = end


def _merged(rows: list[Row]) -> list[Row]:
    merged: list[Row] = []
    for row in rows:
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.slot, last.stride) == (row.slot, row.stride)
            and last.base + last.size == row.base
            and last.offset + last.size == row.offset
        ):
            merged[-1] = last._replace(size=last.size + row.size)
        else:
            merged.append(row)
    return merged


def layer_specs(
    kv_cache_config: KVCacheConfig, groups: Sequence[int] = (0,)
) -> list[tuple[str, Any]]:
    """Name and spec of each layer of these groups, in the order of the allocation."""
    specs = {}
    for group in (kv_cache_config.kv_cache_groups[at] for at in groups):
        inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            specs[name] = group.kv_cache_spec if inner is None else inner[name]
    return [
        (name, specs[name])
        for tensor in kv_cache_config.kv_cache_tensors
        for name in tensor.layers
        if name in specs
    ]


class PageTable:
    """Addresses of every layer's pages, computed once when vLLM registers its caches."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        kv_caches: Mapping[str, torch.Tensor],
        groups: Groups,
    ) -> None:
        """Compute the table; ConfigError says in one sentence why a layout is refused."""
        layout = kv_cache_config.kv_cache_layout
        if layout not in LAYOUTS:
            raise ConfigError(
                f"KV cache layout {layout} has pages that are not contiguous; "
                f"LakeCache works with {', '.join(sorted(LAYOUTS))}"
            )
        stored = (*groups.attention, *groups.states)
        specs = dict(layer_specs(kv_cache_config, stored))
        group_of = {
            name: at for at in stored for name in kv_cache_config.kv_cache_groups[at].layer_names
        }
        self.groups = groups
        self.num_blocks = kv_cache_config.num_blocks
        self.block_outside = layout.startswith("B")
        self.layers: list[Layer] = []
        for placed in kv_cache_config.kv_cache_tensors:
            for position, name in enumerate(placed.layers):
                if name not in specs:
                    continue
                storage = kv_caches[name].untyped_storage()
                group, page_bytes = group_of[name], specs[name].page_size_bytes
                if group in groups.states:
                    # A page of state is padded to the size of a page of attention.
                    page_bytes = specs[name].real_page_size_bytes
                start = placed.offset + position * placed.layer_stride
                end = start + (self.num_blocks - 1) * placed.block_stride + page_bytes
                if end > storage.nbytes() or page_bytes > placed.block_stride:
                    raise ConfigError(
                        f"layer {name} would end at byte {end} of an allocation of "
                        f"{storage.nbytes()} bytes, so its pages are not laid out as expected"
                    )
                self.layers.append(
                    Layer(name, storage.data_ptr() + start, placed.block_stride, page_bytes, group)
                )
        if {layer.name for layer in self.layers} != set(specs) or not self.layers:
            raise ConfigError("not every layer of the KV cache group has a place in the allocation")

    def chunk_shape(self, blocks_per_chunk: int) -> ObjectShape:
        """The shape of a chunk: the attention layers of `blocks_per_chunk` blocks, in the layout's
        order. The slots are the blocks of the first group, then those of the next.

        With the block outside, all layers of a block lie together, in memory as in the object.
        """
        places = self._places(self.groups.attention, blocks_per_chunk)
        return self._shape(places, len(self.groups.attention) * blocks_per_chunk)

    def state_shape(self, runs: Runs | None) -> ObjectShape:
        """The shape of a state: that of all layers, one slot per group, without padding.

        With `runs` also the attention layers' pages of one block, one more slot per group: only
        those runs of them, or the whole page of a layer that is not named.
        """
        places = self._places(self.groups.states, 1)
        slots = len(self.groups.states)
        if runs is not None:
            pages = self._places(self.groups.attention, 1)
            places += [(layer, slots + slot) for layer, slot in pages]
            slots += len(self.groups.attention)
        return self._shape(places, slots, runs)

    def _places(self, groups: Sequence[int], blocks: int) -> list[tuple[Layer, int]]:
        """Give each layer and slot in the layout's order."""
        layers = [layer for layer in self.layers if layer.group in groups]
        first = {group: number * blocks for number, group in enumerate(groups)}
        if self.block_outside:
            return [
                (layer, first[group] + block)
                for group in groups
                for block in range(blocks)
                for layer in layers
                if layer.group == group
            ]
        return [(layer, first[layer.group] + block) for layer in layers for block in range(blocks)]

    def _shape(
        self, places: list[tuple[Layer, int]], slot_count: int, runs: Runs | None = None
    ) -> ObjectShape:
        rows, offset = [], 0
        for layer, slot in places:
            for begin, size in (runs or {}).get(layer.name, [(0, layer.page_bytes)]):
                rows.append(Row(layer.address + begin, layer.stride, size, offset, slot))
                offset += size
        return ObjectShape(rows, slot_count=slot_count, num_blocks=self.num_blocks)
