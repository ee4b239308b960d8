"""GPU kernels that pack the pages of many objects into one buffer, and unpack them.

A shape of object is a table of rows. Row `r` of an object with block ids `ids` is `sizes[r]` bytes
at address `bases[r] + ids[slots[r]] * strides[r]` of the KV cache, and lies at `offsets[r]` of the
object's bytes. A block id of 0 (vLLM's null block) leaves its rows out: they are neither read nor
written, on either side.

One launch moves a batch of objects, all layers at once. Importing this module imports Triton, so
only the transfer of a GPU worker does it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["MAX_COUNT", "RowTable", "compare", "gather", "scatter"]

# Objects of one launch: the second dimension of a CUDA grid.
MAX_COUNT = 65535
# Bytes that one program moves: four 16-byte accesses in flight for each of 256 threads.
TILE_BYTES = 16384
WARPS = 8

# Nothing about an argument's value may lead to another compilation, least of all in a request.
UNSPECIALIZED = ("tiles", "ids", "staging", "flag", "slot_count", "part_elements")


@triton.jit  # type: ignore[untyped-decorator]
def _locate(
    tiles: tl.tensor,
    ids: tl.tensor,
    staging: tl.tensor,
    slot_count: tl.tensor,
    part_elements: tl.tensor,
    TILE: tl.constexpr,
    ELEMENT: tl.constexpr,
    VECTOR: tl.constexpr,
) -> tl.tuple:
    """Give the block id, pointers into pages and staging, and the mask of this program's tile."""
    tile = tiles + tl.program_id(0) * 5
    address = tl.load(tile)
    stride = tl.load(tile + 1)
    offset = tl.load(tile + 2)
    size = tl.load(tile + 3)
    slot = tl.load(tile + 4)
    item = tl.program_id(1).to(tl.int64)
    block = tl.load(ids + item * slot_count + slot)
    # Without these hints every access would be one element wide; on an address, which becomes a
    # pointer, the compiler forgets them.
    element_bytes: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    page = (address + block.to(tl.int64) * stride).to(tl.pointer_type(ELEMENT))
    page = tl.multiple_of(page, VECTOR * element_bytes)
    buffer = tl.multiple_of(staging.to(tl.pointer_type(ELEMENT)), VECTOR * element_bytes)
    start = tl.multiple_of(item * part_elements + offset, VECTOR)
    lanes = tl.arange(0, TILE)
    return block, page + lanes, buffer + start + lanes, lanes < tl.multiple_of(size, VECTOR)


@triton.jit(do_not_specialize=UNSPECIALIZED)  # type: ignore[untyped-decorator]
def _gather(
    tiles: tl.tensor,
    ids: tl.tensor,
    staging: tl.tensor,
    slot_count: tl.tensor,
    part_elements: tl.int64,
    TILE: tl.constexpr,
    ELEMENT: tl.constexpr,
    VECTOR: tl.constexpr,
) -> None:
    block, pages, staged, mask = _locate(
        tiles, ids, staging, slot_count, part_elements, TILE, ELEMENT, VECTOR
    )
    if block != 0:
        tl.store(staged, tl.load(pages, mask=mask, eviction_policy="evict_first"), mask=mask)


@triton.jit(do_not_specialize=UNSPECIALIZED)  # type: ignore[untyped-decorator]
def _scatter(
    tiles: tl.tensor,
    ids: tl.tensor,
    staging: tl.tensor,
    slot_count: tl.tensor,
    part_elements: tl.int64,
    TILE: tl.constexpr,
    ELEMENT: tl.constexpr,
    VECTOR: tl.constexpr,
) -> None:
    block, pages, staged, mask = _locate(
        tiles, ids, staging, slot_count, part_elements, TILE, ELEMENT, VECTOR
    )
    if block != 0:
        tl.store(pages, tl.load(staged, mask=mask, eviction_policy="evict_first"), mask=mask)


@triton.jit(do_not_specialize=UNSPECIALIZED)  # type: ignore[untyped-decorator]
def _compare(
    tiles: tl.tensor,
    ids: tl.tensor,
    staging: tl.tensor,
    flag: tl.tensor,
    slot_count: tl.tensor,
    part_elements: tl.int64,
    TILE: tl.constexpr,
    ELEMENT: tl.constexpr,
    VECTOR: tl.constexpr,
) -> None:
    block, pages, staged, mask = _locate(
        tiles, ids, staging, slot_count, part_elements, TILE, ELEMENT, VECTOR
    )
    if block != 0:
        page = tl.load(pages, mask=mask, other=0, eviction_policy="evict_first")
        want = tl.load(staged, mask=mask, other=0, eviction_policy="evict_first")
        if tl.max((page != want).to(tl.int32), axis=0) != 0:
            tl.store(flag, 1)


KERNELS = {"gather": _gather, "scatter": _scatter, "compare": _compare}


class RowTable:
    """One shape of object on the device, with what a launch needs to know about it.

    The table is split into tiles of equal length, one program each, so that rows of any mix of
    sizes load the GPU evenly. `vector_bytes` is the width of an access: the largest of 16, 8, 4, 2
    and 1 that divides every base, stride, size, offset and `part_bytes`; staging buffers have to
    be aligned to it.
    """

    def __init__(
        self,
        bases: Sequence[int],
        strides: Sequence[int],
        sizes: Sequence[int],
        offsets: Sequence[int],
        slots: Sequence[int],
        *,
        part_bytes: int,
        slot_count: int,
        device: torch.device | str,
        tile_bytes: int = TILE_BYTES,
    ) -> None:
        """Check the rows and copy them to the device; ValueError names a row that cannot be.

        Columns may be numpy arrays of any integers. Bases are addresses; bases, strides, sizes and
        offsets are in bytes. `part_bytes` is one object's length, `slot_count` that of its vector
        of block ids. `tile_bytes`, a power of two, is what one program moves at most.
        """
        # numpy's integers would reach the kernels, which know only Python's.
        columns = ([int(n) for n in column] for column in (bases, strides, sizes, offsets, slots))
        rows = list(zip(*columns, strict=True))
        if not rows:
            raise ValueError("a table without rows moves nothing")
        for row, (base, stride, size, offset, slot) in enumerate(rows):
            if size <= 0 or base <= 0 or stride < 0 or offset < 0 or offset + size > part_bytes:
                raise ValueError(
                    f"row {row} (base {base}, stride {stride}, {size} bytes at {offset}) does not "
                    f"lie within an object of {part_bytes} bytes"
                )
            if not 0 <= slot < slot_count:
                raise ValueError(f"row {row} has slot {slot} of {slot_count}")
        self.part_bytes = part_bytes
        self.slot_count = slot_count
        self.vector_bytes = math.gcd(16, part_bytes, *(n for row in rows for n in row[:4]))
        element_bytes = min(self.vector_bytes, 4)
        element = {1: tl.int8, 2: tl.int16, 4: tl.int32}[element_bytes]
        longest = triton.next_power_of_2(max(row[2] for row in rows))
        # Narrow accesses get shorter tiles: it is their number that keeps a thread busy.
        tile = min(longest, tile_bytes * element_bytes // 4) // element_bytes
        step = tile * element_bytes
        self._tiles = torch.tensor(
            [
                (base + at, stride, (offset + at) // element_bytes, left, slot)
                for base, stride, size, offset, slot in rows
                for at in range(0, size, step)
                for left in (min(step, size - at) // element_bytes,)
            ],
            dtype=torch.int64,
        ).to(device)
        self._grid_tiles = len(self._tiles)
        self._scalars = (slot_count, part_bytes // element_bytes)
        self._fixed = (tile, element, self.vector_bytes // element_bytes)
        self._compiled: dict[str, Any] = {}

    def warm_up(self) -> None:
        """Compile and load the kernels for this table: the first time on a machine, seconds.

        Otherwise the first launch does it. Each kernel runs once on the current stream, with
        every row left out, so that it touches no memory but the table.
        """
        device = self._tiles.device
        ids = torch.zeros((1, self.slot_count), dtype=torch.int32, device=device)
        staging = torch.zeros(16, dtype=torch.uint8, device=device)
        flag = torch.zeros(1, dtype=torch.int32, device=device)
        for name, kernel in KERNELS.items():
            tensors = (ids, staging, flag) if name == "compare" else (ids, staging)
            # The interpreter returns None, a compiler the kernel, which then launches without
            # looking at its arguments again.
            self._compiled[name] = kernel[(self._grid_tiles, 1, 1)](
                self._tiles, *tensors, *self._scalars, *self._fixed, num_warps=WARPS
            )

    def _launch(self, name: str, count: int, stream: int | None, *tensors: torch.Tensor) -> None:
        ids, staging = tensors[:2]
        if not 0 < count <= MAX_COUNT:
            raise ValueError(
                f"{count} objects in one launch; between 1 and {MAX_COUNT} are allowed"
            )
        if ids.dtype != torch.int32 or ids.numel() < count * self.slot_count:
            raise ValueError(
                f"{ids.numel()} block ids of {ids.dtype} for {count} objects of {self.slot_count} "
                "slots; int32 is needed"
            )
        if staging.nbytes < count * self.part_bytes:
            raise ValueError(
                f"{staging.nbytes} bytes of staging for {count} objects of {self.part_bytes}"
            )
        if staging.data_ptr() % self.vector_bytes:
            raise ValueError(f"staging is not aligned to {self.vector_bytes} bytes")
        if not self._compiled:
            self.warm_up()
        grid = (self._grid_tiles, count, 1)
        arguments = (self._tiles, *tensors, *self._scalars, *self._fixed)
        compiled = self._compiled[name]
        if compiled is None:
            KERNELS[name][grid](*arguments)
        else:
            compiled[grid](*arguments, stream=stream)


def gather(
    table: RowTable,
    ids: torch.Tensor,
    staging: torch.Tensor,
    count: int,
    stream: int | None = None,
) -> None:
    """Copy the pages of `count` objects to `staging`, object `i` at `i * table.part_bytes`.

    `ids` is int32, [count, slot_count], contiguous, `staging` contiguous bytes; both on the
    table's device, which has to be the calling thread's current one. Asynchronous: runs on
    `stream` (a CUDA stream's handle, `torch.cuda.Stream.cuda_stream`), by default torch's current
    one. Block ids are trusted. ValueError: a tensor is too small, or `count` out of range.
    """
    table._launch("gather", count, stream, ids, staging)


def scatter(
    table: RowTable,
    ids: torch.Tensor,
    staging: torch.Tensor,
    count: int,
    stream: int | None = None,
) -> None:
    """Copy `staging` to the pages of `count` objects: `gather` the other way round."""
    table._launch("scatter", count, stream, ids, staging)


def compare(
    table: RowTable,
    ids: torch.Tensor,
    staging: torch.Tensor,
    count: int,
    flag: torch.Tensor,
    stream: int | None = None,
) -> None:
    """Set `flag` (int32, one element) to 1 if a page differs from its bytes in `staging`.

    Arguments as for `gather`. A flag that is set stays set: clear it before.
    """
    table._launch("compare", count, stream, ids, staging, flag)
