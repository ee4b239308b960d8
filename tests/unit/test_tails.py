"""Which bytes of a page tails hold: backends are asked that lay their pages out in many ways."""

from __future__ import annotations

import platform
import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import numpy as np
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, _get_attn_isa
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
)

from lakecache._objects import KIND_STATE, KIND_TAIL, Geometry
from lakecache._pages import ObjectShape, PageTable
from lakecache._support import cache_groups
from lakecache._tails import Runs, tail_runs
from lakecache._worker import _fill_scales
from lakecache.identity import rank_identity

BLOCKS = 5


class Plain:
    """As on GPUs: in the content of each token and head K, then V. Kernel blocks may be smaller."""

    padding = 0

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
    ) -> None:
        page, offset = slot_mapping // kv_cache.shape[2], slot_mapping % kv_cache.shape[2]
        kv_cache[page, :, offset] = torch.cat([key, value], dim=-1)


class Transposed(Plain):
    """K of a head with the tokens innermost, then V."""

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
    ) -> None:
        blocks, heads, tokens, content = kv_cache.shape
        k, v = kv_cache.view(blocks, heads, 2, tokens * content // 2).unbind(2)
        k.view(blocks, heads, -1, tokens)[0][:, :, slot_mapping] = key.permute(1, 2, 0)
        v.view(blocks, heads, tokens, -1)[0][:, slot_mapping] = value.transpose(0, 1)


class Silent(Plain):
    """Like one that writes its cache elsewhere, or only a part of it."""

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
    ) -> None:
        super().do_kv_cache_update(layer, key[1:], value[1:], kv_cache, slot_mapping[1:])


class Latent:
    """Takes other arguments, as MLA does."""

    def do_kv_cache_update(self, kv_c_normed: Any, k_pe: Any, kv_cache: Any) -> None:
        raise AssertionError("never called")


class Model:
    """A hybrid with so many layers of attention, and one layer of state, in real memory."""

    def __init__(
        self, impl: Any, *, block: int, unit: int, heads: int, width: int, layout: str = "LBNHC",
        layers: int = 2, pages: int = 1, dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        self.geometry = Geometry(block, block, unit)
        self.spec = FullAttentionSpec(
            block_size=block, num_kv_heads=heads, head_size=width, dtype=dtype
        )
        page = self.page = self.spec.page_size_bytes
        state = MambaSpec(
            block_size=block, shapes=((page // 2,),), dtypes=(torch.int8,), page_size_padded=page,
            mamba_type=MambaAttentionBackendEnum.GDN_ATTN, mamba_cache_mode="align",
        )  # fmt: skip
        self.names = [f"attention.{number}" for number in range(layers)]
        outer = layout.startswith("B")
        strides = {
            "layer_stride": page if outer else page * BLOCKS,
            "block_stride": page * layers if outer else page,
        }
        size = page * layers * BLOCKS
        self.config = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[
                KVCacheTensor(size=size, layers=self.names, **strides),
                KVCacheTensor(size=size, layers=["state"], **strides),
            ],
            kv_cache_groups=[
                KVCacheGroupSpec(self.names, self.spec), KVCacheGroupSpec(["state"], state)
            ],
            kv_cache_layout=layout, hash_block_size=unit,
        )  # fmt: skip
        self.memory = torch.empty(size, dtype=torch.uint8)
        tokens, content = block // pages, 2 * width
        of_head, of_token = content, heads * content
        if layout.endswith("HNC"):
            of_head, of_token = tokens * content, content
        item = dtype.itemsize
        self.views = {"state": self.memory.view(torch.int8)} | {
            name: self.memory.view(dtype).as_strided(
                (BLOCKS * pages, heads, tokens, content),
                (strides["block_stride"] // item // pages, of_head, of_token, 1),
                number * strides["layer_stride"] // item,
            )
            for number, name in enumerate(self.names)
        }
        self.impl = impl
        layer = SimpleNamespace(
            impl=impl, num_kv_heads=heads, head_size=width, head_size_v=width, isa="vec",
            _k_scale_float=1.0, _v_scale_float=1.0,
        )  # fmt: skip
        self.layer = layer
        self.vllm_config: Any = SimpleNamespace(
            compilation_config=SimpleNamespace(
                static_forward_context=dict.fromkeys(self.names, layer)
            ),
            model_config=SimpleNamespace(dtype=torch.bfloat16),
        )
        self.groups = cache_groups(self.config, hybrid=True)

    def runs(self) -> list[Runs]:
        return tail_runs(
            self.vllm_config, self.config, self.views, self.groups, self.geometry.tails()
        )

    def shapes(self) -> list[ObjectShape]:
        table = PageTable(self.config, self.views, self.groups)
        return [table.state_shape(runs) for runs in self.runs()]

    def write(self, name: str, block: int, tokens: int, seed: int) -> None:
        """Have the backend write the first tokens of a block."""
        made = torch.Generator().manual_seed(seed)
        shape = (tokens, self.spec.num_kv_heads, self.spec.head_size)
        key, value = (torch.randn(shape, generator=made).to(self.spec.dtype) for _ in range(2))
        pages = len(self.views[name]) // BLOCKS
        view = self.views[name][block * pages : (block + 1) * pages]
        self.impl.do_kv_cache_update(self.layer, key, value, view, torch.arange(tokens))

    def gather(self, shape: ObjectShape, blocks: list[int]) -> Any:
        part = np.zeros(shape.part_bytes, dtype=np.uint8)
        for page, stored in self.pieces(shape, blocks):
            part[stored] = self.memory.numpy()[page]
        return part

    def scatter(self, shape: ObjectShape, blocks: list[int], part: Any) -> None:
        for page, stored in self.pieces(shape, blocks):
            self.memory.numpy()[page] = part[stored]

    def pieces(self, shape: ObjectShape, blocks: list[int]) -> Any:
        ids = shape.check(array("i", blocks).tobytes(), whole=True)
        for run in shape.fragments(ids):
            for number, address in enumerate(run.addresses):
                size = run.fragment_bytes
                at, to = int(address) - self.memory.data_ptr(), run.offset + number * size
                yield slice(at, at + size), slice(to, to + size)


class Cpu(Plain):
    """vLLM's own kernels, in the layouts of the instruction sets of this machine."""

    kv_cache_dtype = "auto"
    attn_type = "decoder"

    def __init__(self, isa: str) -> None:
        self.isa = isa

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
    ) -> None:
        here = SimpleNamespace(**{**vars(layer), "isa": self.isa})
        update: Any = CPUAttentionBackendImpl.do_kv_cache_update
        update(self, here, key, value, kv_cache, slot_mapping)


def ways() -> list[tuple[str, Any, str]]:
    """A backend and a layout that it works with; of the CPU's those that this machine can run."""
    from vllm.platforms import current_platform

    found: list[tuple[str, Any, str]] = []
    for layout in ("LBNHC", "BLNHC", "LBHNC", "BLHNC"):
        found.append((f"plain {layout}", Plain(), layout))
    for layout in ("LBHNC", "BLHNC"):
        found.append((f"transposed {layout}", Transposed(), layout))
    if current_platform.is_cpu():
        isas = ["vec", "amx"] if torch.cpu._is_amx_tile_supported() else ["vec"]
        if platform.machine() != "x86_64":
            isas = [_get_attn_isa(torch.bfloat16, 32, 32)]
        found += [(f"cpu {isa}", Cpu(isa), "LBHNC") for isa in isas]
    return found


def test_sizes_of_tails() -> None:
    whole = Geometry(1056, 1056, 32)
    assert whole.tails() == [160, 320, 480, 640, 800, 960, 1056]
    assert whole.state_shape(2112) == KIND_STATE
    assert whole.state_shape(2 * 1056 + 768) == KIND_TAIL + 4
    assert Geometry(64, 64, 16).tails() == [16, 32, 48]
    # Without states inside of blocks there are no tails.
    assert Geometry(1056, 1056, 1056).tails() == []


@pytest.mark.parametrize("seed", range(200))
def test_a_tail_has_room_for_its_tokens_and_little_more(seed: int) -> None:
    chance = random.Random(seed)
    unit = chance.randint(1, 64)
    block = unit * chance.randint(1, 200)
    geometry, sizes = Geometry(block, block, unit), Geometry(block, block, unit).tails()
    assert len(sizes) <= 8
    step = -(-block // (8 * unit)) * unit
    for inside in range(unit, block, unit):
        size = sizes[geometry.state_shape(7 * block + inside) - KIND_TAIL]
        assert inside <= size <= min(inside + step - unit, block)


def test_tails_of_the_35b() -> None:
    """Ten layers of attention, of 2048 bytes per token, and 64,389,120 bytes of state."""
    model = Model(Plain(), block=1056, unit=32, heads=2, width=256, layers=10)
    state = model.page // 2
    tokens = [160, 320, 480, 640, 800, 960, 1056]
    sizes = [shape.part_bytes - state for shape in model.shapes()]
    assert sizes == [20_480 * size for size in tokens]
    # Checkpoints at so many tokens of a block; before, all had as many bytes as the last.
    for inside, size in ((32, 67_665_920), (768, 80_773_120), (1024, 86_016_000)):
        assert 64_389_120 + sizes[model.geometry.state_shape(inside) - KIND_TAIL] == size


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("name", "impl", "layout"), ways())
def test_the_first_tokens_are_restored_and_nothing_else_is_touched(
    name: str, impl: Any, layout: str, seed: int
) -> None:
    chance = random.Random(f"{name} {seed}")
    cpu = isinstance(impl, Cpu)
    unit = 16 if cpu else chance.choice([1, 3, 16])
    model = Model(
        impl, layout=layout, unit=unit, block=(32 if cpu else unit) * chance.randint(2, 30),
        heads=chance.randint(1, 4), width=chance.choice([32, 64] if cpu else [5, 8, 32]),
        layers=chance.randint(1, 3),
    )  # fmt: skip
    shapes, sizes = model.shapes(), model.geometry.tails()
    for shape, tokens in zip(shapes, sizes, strict=True):
        whole = model.page // 2 + len(model.names) * model.page
        unused = (model.geometry.block - tokens) * model.page // model.geometry.block
        assert shape.part_bytes == whole - len(model.names) * unused
        model.memory.random_(0, 256)
        for number, name in enumerate(model.names):
            model.write(name, 2, tokens, number)
        part = model.gather(shape, [1, 2])
        # Elsewhere it is what the tokens left behind, and not one byte more.
        model.memory.random_(0, 256)
        want = model.memory.clone()
        model.scatter(shape, [3, 4], part)
        found = model.memory.clone()
        model.memory.copy_(want)
        for number, name in enumerate(model.names):
            model.write(name, 4, tokens, number)
        state = model.config.kv_cache_tensors[1].block_stride * 3
        model.memory[state : state + model.page // 2] = torch.from_numpy(part[: model.page // 2])
        assert torch.equal(found, model.memory)


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
def test_kernel_blocks_that_are_smaller(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    model = Model(Plain(), block=96, unit=16, heads=2, width=8, pages=3, layout=layout)
    # On a CPU vLLM would clear other blocks than those.
    assert model.runs() == [{}] * 5
    monkeypatch.setattr("lakecache._tails._cleared", lambda *_: True)
    content = 2 * 8 * 2
    for runs, tokens in zip(model.runs(), model.geometry.tails(), strict=True):
        full, rest = divmod(tokens, 32)
        want = [(0, full * 2 * 32 * content)] if full else []
        if layout == "LBNHC":
            want = [(0, tokens * 2 * content)]
        elif rest:
            begin = full * 2 * 32 * content
            want = [(0, begin + rest * content)]
            want.append((begin + 32 * content, rest * content))
        assert runs == dict.fromkeys(model.names, want)


@pytest.mark.parametrize("impl", [Silent(), Latent(), object()])
def test_who_cannot_be_asked_keeps_whole_pages(impl: Any) -> None:
    model = Model(impl, block=64, unit=16, heads=2, width=8)
    assert model.runs() == [{}] * 3
    assert [shape.part_bytes for shape in model.shapes()] == [5 * model.page // 2] * 3


def test_pages_with_more_than_tokens_stay_whole() -> None:
    model = Model(Plain(), block=64, unit=16, heads=2, width=8)
    for group in model.config.kv_cache_groups[:1]:
        object.__setattr__(group.kv_cache_spec, "page_size_padded", model.page + 64)
    assert model.runs() == [{}] * 3


def test_a_group_that_vllm_does_not_clear_keeps_whole_pages() -> None:
    model = Model(Plain(), block=64, unit=16, heads=2, width=8)
    assert all(model.runs())
    model.config.kv_cache_groups.pop()
    assert not model.config.needs_kv_cache_zeroing
    assert model.runs() == [{}] * 3


def test_the_backend_keeps_nothing_of_the_page_that_it_was_asked_with() -> None:
    class Keeps(Plain):
        cache: Any = None

        def do_kv_cache_update(
            self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
        ) -> None:
            self.cache = kv_cache
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    model = Model(Keeps(), block=64, unit=16, heads=2, width=8)
    assert all(model.runs())
    assert model.impl.cache is None


class Scales(Plain):
    """With a scale at the end of each token's and head's content, in a view that is kept."""

    scales: Any = None

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
    ) -> None:
        if self.scales is None:
            self.scales = kv_cache[..., -1]
            self.scales.fill_(1.0)
        page, offset = slot_mapping // kv_cache.shape[2], slot_mapping % kv_cache.shape[2]
        kv_cache[page, :, offset, :-1] = torch.cat([key, value], dim=-1)[..., :-1]
        # No byte of it is zero, as of the least scale.
        self.scales[page, :, offset] = torch.finfo(kv_cache.dtype).eps + 1.0


class HandsOn:
    def __init__(self, impl: Any) -> None:
        self.impl = impl

    def do_kv_cache_update(self, *arguments: Any) -> None:
        self.impl.do_kv_cache_update(*arguments)


@pytest.mark.parametrize("handed_on", [False, True])
def test_scales_are_stored_though_the_backend_keeps_a_view_of_them(handed_on: bool) -> None:
    scales = Scales()
    impl = HandsOn(scales) if handed_on else scales
    model = Model(impl, block=64, unit=16, heads=2, width=8)
    found = model.runs()
    # Not the engine's: it would write its scales to a page that nobody reads.
    assert scales.scales is None
    token = model.page // 64
    for runs, tokens in zip(found, model.geometry.tails(), strict=True):
        for name in model.names:
            held = {at for begin, size in runs[name] for at in range(begin, begin + size)}
            assert held >= set(range(tokens * token))


def test_the_first_forward_leaves_loaded_scales_alone() -> None:
    """vLLM's Triton backend fills the scales of all pages when it is first called."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
    from vllm.v1.kv_cache_interface import KVQuantMode

    impl: Any = object.__new__(TritonAttentionImpl)
    impl._kv_quant_mode = KVQuantMode.INT8_PER_TOKEN_HEAD
    impl._is_per_token_head_quant = False
    memory = torch.zeros(3 * 2 * 16 * 24, dtype=torch.int8)
    view = memory.view(3, 2, 16, 24)
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context={"attention": SimpleNamespace(impl=impl), "state": object()}
        )
    )
    caches = {"attention": view, "state": memory}
    _fill_scales(config, caches)
    assert not memory.any()
    impl._is_per_token_head_quant = True
    _fill_scales(config, caches)
    assert memory.any()
    # A load, and then the first forward.
    loaded = memory.random_(-128, 128).clone()
    impl._pth_key_value_caches(view)
    assert torch.equal(memory, loaded)


def test_another_way_to_cut_is_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(Plain(), block=64, unit=16, heads=2, width=8)
    monkeypatch.setattr("lakecache.identity._device_identity", lambda *_: {})

    def identity(tails: list[Runs]) -> str:
        specs = [(name, model.spec) for name in model.names]
        return rank_identity(model.vllm_config, model.config, model.views, specs, tails)

    cut = model.runs()
    other = [{**runs, model.names[0]: [(0, model.page)]} for runs in cut]
    found = [identity(tails) for tails in ([], [{}] * 3, [{}] * 2, cut, cut[:2], other)]
    assert len(set(found)) == len(found)
    assert identity(model.runs()) == identity(cut)
