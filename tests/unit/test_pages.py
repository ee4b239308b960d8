"""Object bytes and KV pages: every layout's addresses, and what is refused."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from lakecache._pages import Fragments, Groups, ObjectShape, PageTable
from lakecache.errors import ConfigError

pytest.importorskip("numpy")

BASE, BLOCKS, PAGE = 1 << 20, 8, 128


def table(layout: str, pages: tuple[int, ...] = (PAGE, PAGE), size: int | None = None) -> PageTable:
    total = sum(pages)
    size = size or BLOCKS * total
    outer = layout.startswith("B")
    tensors, offset = [], 0
    for index, page in enumerate(pages):
        stride = total if outer else page
        tensors.append(
            SimpleNamespace(
                layers=[f"l{index}"], layer_stride=0, block_stride=stride, offset=offset
            )
        )
        offset += page if outer else page * BLOCKS
    spec = SimpleNamespace(
        kv_cache_specs={f"l{i}": SimpleNamespace(page_size_bytes=p) for i, p in enumerate(pages)}
    )
    group = SimpleNamespace(layer_names=list(spec.kv_cache_specs), kv_cache_spec=spec)
    config: Any = SimpleNamespace(
        kv_cache_layout=layout, kv_cache_groups=[group], kv_cache_tensors=tensors, num_blocks=BLOCKS
    )
    storage = SimpleNamespace(data_ptr=lambda: BASE, nbytes=lambda: size)
    tensor: Any = SimpleNamespace(untyped_storage=lambda: storage)
    return PageTable(config, dict.fromkeys(group.layer_names, tensor), Groups((0,)))


def shape(layout: str, pages: tuple[int, ...] = (PAGE, PAGE)) -> ObjectShape:
    return table(layout, pages).chunk_shape(2)


def runs(of: ObjectShape, *blocks: int) -> list[Fragments]:
    return list(of.fragments(of.check(ids(*blocks), whole=False)))


def ids(*blocks: int) -> bytes:
    return array("i", blocks).tobytes()


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
def test_layer_outside(layout: str) -> None:
    (run,) = runs(shape(layout), 3, 5)
    assert (run.offset, run.fragment_bytes) == (0, PAGE)
    second = BLOCKS * PAGE
    assert [int(a) - BASE for a in run.addresses] == [
        3 * PAGE, 5 * PAGE, second + 3 * PAGE, second + 5 * PAGE,
    ]  # fmt: skip


@pytest.mark.parametrize("layout", ["BLNHC", "BLHNC"])
def test_block_outside_makes_whole_blocks(layout: str) -> None:
    (run,) = runs(shape(layout), 3, 5)
    assert (run.offset, run.fragment_bytes) == (0, 2 * PAGE)
    assert [int(a) - BASE for a in run.addresses] == [6 * PAGE, 10 * PAGE]


def test_blocks_left_out_and_unequal_pages() -> None:
    one, two = runs(shape("LBNHC"), 0, 5)
    assert (one.offset, two.offset) == (PAGE, 3 * PAGE)
    mixed = shape("LBNHC", (PAGE, 2 * PAGE))
    assert [(run.offset, run.fragment_bytes) for run in runs(mixed, 1, 2)] == [
        (0, PAGE), (2 * PAGE, 2 * PAGE),
    ]  # fmt: skip
    assert mixed.part_bytes == 6 * PAGE


@pytest.mark.parametrize("blocks", [(1,), (1, 2, 3), (0, 0), (1, BLOCKS), (-1, 1)])
def test_wrong_blocks(blocks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="block"):
        shape("LBNHC").check(ids(*blocks), whole=False)


def test_an_object_to_be_stored_has_all_its_blocks() -> None:
    with pytest.raises(ValueError, match="null block"):
        shape("LBNHC").check(ids(0, 1), whole=True)


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_other_layouts_are_refused_by_name(layout: str) -> None:
    with pytest.raises(ConfigError, match=layout):
        table(layout)


def test_addresses_outside_the_allocation_are_refused() -> None:
    with pytest.raises(ConfigError, match="allocation"):
        table("LBNHC", size=BLOCKS * PAGE)
