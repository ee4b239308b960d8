"""Hybrid models: which groups are served, and what a checkpoint's objects hold."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)

from lakecache import _support
from lakecache._pages import Groups, PageTable
from lakecache._support import cache_groups, chunk_geometry, declined_reason, is_hybrid

BLOCK, BLOCKS = 1056, 8
PAGE = BLOCK * 2 * (256 + 256) * 2
STATE = 3 * 8192 * 2 + 32 * 128 * 128 * 4
BASE = 1 << 40


def attention(**more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=256, dtype=torch.bfloat16, **more
    )


def state(**more: Any) -> MambaSpec:
    values = {
        "shapes": ((3, 8192), (32, 128, 128)),
        "dtypes": (torch.bfloat16, torch.float32),
        "page_size_padded": PAGE,
        "mamba_type": MambaAttentionBackendEnum.GDN_ATTN,
        "mamba_cache_mode": "align",
    }
    return MambaSpec(block_size=BLOCK, **{**values, **more})


def layers(count: int = 40) -> dict[str, Any]:
    """Every fourth layer has attention, as in Qwen3.5-35B-A3B."""
    return {f"layers.{i}": attention() if i % 4 == 3 else state() for i in range(count)}


def model(specs: dict[str, Any], layout: str = "LBNHC", *, swap: bool = False) -> KVCacheConfig:
    """As vLLM groups and places them: all groups share the same bytes."""
    groups = _get_kv_cache_groups_uniform_page_size(specs)
    if swap:
        groups.reverse()
    most = max(len(group.layer_names) for group in groups)
    outer = layout.startswith("B")
    tensors = [
        KVCacheTensor(
            size=PAGE * most * BLOCKS,
            layers=group.layer_names,
            layer_stride=PAGE if outer else PAGE * BLOCKS,
            block_stride=PAGE * most if outer else PAGE,
        )
        for group in groups
    ]
    return KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=groups,
        kv_cache_layout=layout, hash_block_size=BLOCK,
    )  # fmt: skip


def table(config: KVCacheConfig) -> PageTable:
    size = config.kv_cache_tensors[0].size
    storage = SimpleNamespace(data_ptr=lambda: BASE, nbytes=lambda: size)
    tensor: Any = SimpleNamespace(untyped_storage=lambda: storage)
    names = [name for placed in config.kv_cache_tensors for name in placed.layers]
    return PageTable(config, dict.fromkeys(names, tensor), cache_groups(config, hybrid=True))


def engine(**more: Any) -> Any:
    values: dict[str, Any] = {
        "parallel_config": SimpleNamespace(
            pipeline_parallel_size=1, decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        "speculative_config": None,
        "cache_config": SimpleNamespace(mamba_cache_mode="align"),
        "model_config": SimpleNamespace(model="/models/hybrid"),
    }  # fmt: skip
    return SimpleNamespace(**{**values, **more})


@pytest.fixture(autouse=True)
def any_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_support, "platform_declined", lambda: None)


def test_a_checkpoint_of_the_35b_has_86_016_000_bytes() -> None:
    pages = table(model(layers()))
    chunk, whole = pages.chunk_shape(1), pages.state_shape(None)
    assert chunk.part_bytes == 21_626_880 == 20_480 * BLOCK
    assert whole.part_bytes == 64_389_120 == 30 * STATE
    assert chunk.part_bytes + whole.part_bytes == 86_016_000
    # Inside of a block the page travels with the state: whole, as many bytes in one object.
    assert pages.state_shape({}).part_bytes == 86_016_000


@pytest.mark.parametrize("layout", ["LBNHC", "BLNHC"])
@pytest.mark.parametrize("swap", [False, True])
def test_each_layer_goes_to_the_block_of_its_group(layout: str, swap: bool) -> None:
    config = model(layers(), layout, swap=swap)
    groups = cache_groups(config, hybrid=True)
    assert groups == (Groups((0,), (1, 2, 3)) if swap else Groups((3,), (0, 1, 2)))
    pages = table(config)
    shape = pages.state_shape({})
    blocks = {group: number for number, group in enumerate((*groups.states, *groups.attention), 2)}
    ids = array("i", blocks.values()).tobytes()
    found = {
        (int(address), run.fragment_bytes)
        for run in shape.fragments(shape.check(ids, whole=True))
        for address in run.addresses
    }
    want = set()
    for group, placed in enumerate(config.kv_cache_tensors):
        for position in range(len(placed.layers)):
            address = BASE + position * placed.layer_stride + blocks[group] * placed.block_stride
            want.add((address, PAGE if group in groups.attention else STATE))
    if layout == "BLNHC":
        # The ten layers of attention lie together.
        first = BASE + blocks[groups.attention[0]] * 10 * PAGE
        want = {(at, size) for at, size in want if size == STATE} | {(first, 10 * PAGE)}
    assert found == want


def test_the_chunk_is_the_block() -> None:
    config = model(layers())
    config.hash_block_size = 32
    groups = cache_groups(config, hybrid=True)
    assert chunk_geometry(config, groups, 256) == (BLOCK, BLOCK, 32)


def test_an_mtp_head_among_the_attention_layers_travels_along() -> None:
    specs = {**layers(), "mtp.layers.0": attention()}
    config = model(specs)
    drafter = next(g for g in config.kv_cache_groups if "mtp.layers.0" in g.layer_names)
    drafter.is_eagle_group = True
    speculative = SimpleNamespace(method="mtp", model="/models/hybrid")
    assert declined_reason(engine(speculative_config=speculative), config, hybrid=True) is None
    pages = table(config)
    assert pages.chunk_shape(1).part_bytes == 11 * PAGE
    assert pages.state_shape(None).part_bytes == 30 * STATE


def test_a_drafter_of_another_kind_is_left_out() -> None:
    window = SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=256, dtype=torch.bfloat16, sliding_window=128
    )
    config = model({**layers(4), "draft": window})
    drafter = next(at for at, g in enumerate(config.kv_cache_groups) if "draft" in g.layer_names)
    reason = declined_reason(engine(), config, hybrid=True)
    assert reason is not None
    assert "sliding_window" in reason
    config.kv_cache_groups[drafter].is_eagle_group = True
    assert declined_reason(engine(), config, hybrid=True) is None
    groups = cache_groups(config, hybrid=True)
    assert drafter not in (*groups.attention, *groups.states)
    assert table(config).chunk_shape(1).part_bytes == PAGE


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"cache_config": SimpleNamespace(mamba_cache_mode="none")}, "prefix-caching"),
        ({"speculative_config": SimpleNamespace(method="eagle3", model="x")}, "eagle3"),
        ({"speculative_config": SimpleNamespace(method="mtp", model="/other")}, "MTP head"),
    ],
)
def test_what_is_not_served_is_said(change: dict[str, Any], word: str) -> None:
    reason = declined_reason(engine(**change), model(layers(4)), hybrid=True)
    assert reason is not None
    assert word in reason
    assert "\n" not in reason


def test_other_states_are_declined() -> None:
    specs = layers(4)
    specs["layers.0"] = state(mamba_type=MambaAttentionBackendEnum.MAMBA2)
    reason = declined_reason(engine(), model(specs), hybrid=True)
    assert reason is not None
    assert "MAMBA2" in reason


def test_each_connector_names_the_other() -> None:
    hybrid, plain = model(layers(4)), model({f"layers.{i}": attention() for i in range(4)})
    assert is_hybrid(hybrid)
    assert not is_hybrid(plain)
    assert declined_reason(engine(), plain, hybrid=False) is None
    assert declined_reason(engine(), hybrid, hybrid=True) is None
    wrong = declined_reason(engine(), plain, hybrid=True)
    assert wrong is not None
    assert "LakeCacheConnector" in wrong
    wrong = declined_reason(engine(), hybrid, hybrid=False)
    assert wrong is not None
    assert "4 KV cache groups" in wrong
