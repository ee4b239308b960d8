"""MLA pages, as vLLM itself lays them out: vLLM's CPU build keeps no MLA prefix to try it on.

The specs, the allocation and the views are vLLM's; the copies are the compiled half's.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("lakecache._core")

import torch

from lakecache import identity
from lakecache._pages import Groups, PageTable, layer_specs
from lakecache._support import _group_declined

BLOCK, BLOCKS, BLOCKS_PER_CHUNK = 16, 12, 2
# DeepSeek's latent vector has 512 numbers and 64 rotary ones; its sparse indexer keeps 132 bytes.
LATENT, INDEXER = 576, 132
PAGE = BLOCK * LATENT * 2
INDEXER_PAGE = BLOCK * INDEXER
LAYOUTS = ["LBNHC", "LBHNC", "BLNHC", "BLHNC"]


def latent_spec() -> Any:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return MLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, max_tp_shards=1, head_size=LATENT,
        dtype=torch.bfloat16, cache_dtype_str="auto",
    )  # fmt: skip


def indexer_spec() -> Any:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return MLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=INDEXER, dtype=torch.uint8,
        cache_dtype_str="auto",
    )  # fmt: skip


def built(specs: dict[str, Any], layout: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """The configuration that vLLM makes of these layers, and the tensors that it allocates."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    cache: Any = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
        num_gpu_blocks_override=None,
        prefix_cache_retention_interval=None,
    )
    vllm_config: Any = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None), cache_config=cache
    )
    spec = next(iter(specs.values()))
    if len(set(specs.values())) > 1:
        spec = UniformTypeKVCacheSpecs.from_specs(specs)
    group = KVCacheGroupSpec(list(specs), spec)
    room = BLOCKS * sum(one.page_size_bytes for one in specs.values())
    config = kv_cache_utils.get_kv_cache_config_from_groups(vllm_config, [group], room)
    config.kv_cache_layout, config.hash_block_size = layout, BLOCK
    assert config.num_blocks == BLOCKS
    tensors = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[layout])
    return config, tensors


def plain(layout: str) -> tuple[Any, dict[str, torch.Tensor]]:
    return built({f"layer.{i}": latent_spec() for i in range(3)}, layout)


def sparse(layout: str) -> tuple[Any, dict[str, torch.Tensor]]:
    specs = {}
    for i in range(2):
        specs[f"layer.{i}"] = latent_spec()
        specs[f"layer.{i}.indexer"] = indexer_spec()
    return built(specs, layout)


def page_of(tensors: dict[str, torch.Tensor], name: str, block: int) -> torch.Tensor:
    """One layer's block, through vLLM's own view of it."""
    return tensors[name][block]


def fill(tensors: dict[str, torch.Tensor]) -> None:
    for layer, tensor in enumerate(tensors.values()):
        for block in range(BLOCKS):
            values = torch.arange(tensor[block].numel()) * 7 + layer * 31 + block * 5
            tensor[block] = (values % 120).to(tensor.dtype).reshape(tensor[block].shape)


@pytest.fixture
def cache(tmp_path: Path, ram_folder: Path) -> Iterator[Any]:
    from lakecache import _core

    made = _core.Cache(
        cache_dir=None, ram_dir=str(ram_folder), cpu_bytes=16 << 20, disk_capacity_bytes=None
    )
    yield made
    made.close()


def reserved(cache: Any, number: int, size: int) -> tuple[int, int]:
    """A slot; the pool's memory is reserved in the background, so at first there may be none."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        slot = cache.reserve(number, b"k" * 32, 0, None, 0, 31, 1, size)
        if slot is not None:
            return slot
        time.sleep(0.01)
    raise AssertionError("no room in an empty pool")


def copied(copier: Any, jobs: int) -> None:
    done: list[tuple[int, int]] = []
    deadline = time.monotonic() + 30
    while len(done) < jobs and time.monotonic() < deadline:
        done += copier.poll()
        time.sleep(0.001)
    assert [status for _, status in done] == [0] * jobs


def covered(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The bytes in these (address, length) pieces, as the fewest (begin, end) pairs."""
    merged: list[tuple[int, int]] = []
    for begin, length in sorted(pieces):
        if merged and merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], begin + length)
        else:
            merged.append((begin, begin + length))
    return merged


def runs(shape: Any, *blocks: int, whole: bool = True) -> list[Any]:
    ids = array("I", blocks).tobytes()
    return list(shape.fragments(shape.check(ids, whole=whole)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", [plain, sparse])
def test_sizes_and_addresses(layout: str, model: Any) -> None:
    config, tensors = model(layout)
    assert _group_declined(config, 0) is None
    shape = PageTable(config, tensors, Groups((0,))).chunk_shape(BLOCKS_PER_CHUNK)
    # One latent vector per token: no heads, and no V beside K.
    pages = {name: INDEXER_PAGE if "indexer" in name else PAGE for name in tensors}
    assert shape.part_bytes == BLOCKS_PER_CHUNK * sum(pages.values())
    found = covered(
        (int(address), run.fragment_bytes) for run in runs(shape, 3, 7) for address in run.addresses
    )
    assert found == covered(
        (page_of(tensors, name, block).data_ptr(), page)
        for name, page in pages.items()
        for block in (3, 7)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", [plain, sparse])
def test_round_trip_into_other_blocks(cache: Any, layout: str, model: Any) -> None:
    config, tensors = model(layout)
    fill(tensors)
    want = {name: tensor.clone() for name, tensor in tensors.items()}
    shape = PageTable(config, tensors, Groups((0,))).chunk_shape(BLOCKS_PER_CHUNK)
    number = cache.namespace(b"n" * 32, "{}", wait=20.0)
    slot = reserved(cache, number, shape.part_bytes)
    copier = cache.copier(1)

    def load(*blocks: int) -> None:
        for tensor in tensors.values():
            tensor.zero_()
        there = runs(shape, *blocks, whole=False)
        for job, run in enumerate(there):
            copier.load(job, *slot, run.offset, run.addresses, run.fragment_bytes, 10.0)
        copied(copier, len(there))

    there = runs(shape, 3, 7)
    for job, run in enumerate(there):
        copier.store(job, *slot, run.offset, run.addresses, run.fragment_bytes)
    copied(copier, len(there))
    cache.commit(*slot)
    lease = cache.lease(b"k" * 32)
    load(1, 2)
    for name, tensor in tensors.items():
        assert torch.equal(tensor[[1, 2]], want[name][[3, 7]]), name
    # The GPU holds the first block by itself: only the second is loaded, into 9.
    load(0, 9)
    for name, tensor in tensors.items():
        assert torch.equal(tensor[9], want[name][7]), name
        assert not tensor[[block for block in range(BLOCKS) if block != 9]].any(), name
    lease.close()
    copier.close()


def test_identity_tells_layouts_and_specs_apart() -> None:
    context = SimpleNamespace(static_forward_context={})
    vllm_config: Any = SimpleNamespace(
        compilation_config=context, cache_config=SimpleNamespace(cache_dtype="auto")
    )

    def said(config: Any, tensors: dict[str, torch.Tensor]) -> str:
        return identity.rank_identity(vllm_config, config, tensors, layer_specs(config))

    all_of_them = [said(*model(layout)) for model in (plain, sparse) for layout in LAYOUTS]
    assert len(set(all_of_them)) == len(all_of_them)
    assert said(*plain("LBNHC")) == all_of_them[0]
    assert "MLAAttentionSpec" in all_of_them[0]
