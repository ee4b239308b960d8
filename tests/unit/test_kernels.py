"""Gather, scatter and compare against a plain reference.

Triton is kept out of the environment's own packages, because vLLM behaves differently where it
finds it. So without a GPU the cases run in a child that finds Triton and has its interpreter on;
there pages are host memory.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
TRITON = Path(sys.prefix) / "triton"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FOUND = importlib.util.find_spec("triton") is not None

if INTERPRETED:
    DEVICES = ["cpu"]
else:
    DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu)]


# Prints the memory accesses of each kernel as an H100 or H200 gets it. No GPU is needed for that.
COMPILE = """
import json, re
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lakecache._kernels import KERNELS, WARPS

types = {"tiles": "*i64", "ids": "*i32", "staging": "*u8", "flag": "*i32",
         "slot_count": "i32", "part_elements": "i64"}
fixed = {"TILE": 4096, "ELEMENT": tl.int32, "VECTOR": 4}
found = {}
for name, kernel in KERNELS.items():
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, fixed, {})
    target = GPUTarget("cuda", 90, 32)
    ptx = triton.compile(source, target=target, options={"num_warps": WARPS}).asm["ptx"]
    found[name] = re.findall(r"(?:ld|st)[.]global[.:\\w]*", ptx)
print(json.dumps(found))
"""


def run_with_triton(*arguments: str, limit_s: float, **env: str) -> str:
    """Run a child that finds Triton; give what it printed."""
    if INTERPRETED:
        pytest.skip("this is the child")
    if not FOUND and not TRITON.exists():
        pytest.skip(f"no Triton, and no {TRITON}: run `make setup`")
    path = os.pathsep.join([str(ROOT / "python"), *([] if FOUND else [str(TRITON)])])
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_cases_under_the_interpreter() -> None:
    pytest_run = ("-m", "pytest", "-q", "-p", "no:cacheprovider", __file__)
    assert "passed" in run_with_triton(*pytest_run, limit_s=280, TRITON_INTERPRET="1")


def test_the_compiler_keeps_the_width_of_an_access(tmp_path: Path) -> None:
    """Bytes move in 16-byte accesses; all others are the table's five numbers and a block id."""
    found = json.loads(run_with_triton("-c", COMPILE, limit_s=200, TRITON_CACHE_DIR=str(tmp_path)))
    for name, wide in (("gather", 8), ("scatter", 8), ("compare", 8)):
        accesses = found[name]
        assert sum(access.endswith("v4.b32") for access in accesses) == wide
        assert sum(access == "ld.global.b64" for access in accesses) == 5
        # The block id, and compare's flag.
        assert len(accesses) - wide - 5 == (2 if name == "compare" else 1)


class Case(NamedTuple):
    """Rows as (base relative to the pool, stride, size, offset, slot), and their objects' blocks.

    The pool starts `shift` bytes behind an aligned address, so does staging.
    """

    rows: list[tuple[int, int, int, int, int]]
    ids: list[list[int]]
    part_bytes: int
    vector_bytes: int
    shift: int = 0


def layered(layers: int, page: int, stride: int, blocks: int, slots: int) -> Any:
    """Rows of a layout with the layer outside: for each layer, for each block, the page."""
    return [
        (layer * stride * blocks, stride, page, (layer * slots + slot) * page, slot)
        for layer in range(layers)
        for slot in range(slots)
    ]


CASES = {
    "one page": Case([(0, 64, 64, 0, 0)], [[3]], 64, 16),
    "one byte": Case([(0, 3, 1, 0, 0)], [[5]], 1, 1, shift=1),
    "many pages": Case(layered(5, 512, 512, 9, 4), [[1, 8, 3, 2], [7, 4, 6, 5]], 10240, 16),
    "padded strides": Case(layered(3, 96, 112, 9, 2), [[4, 2]], 576, 16),
    "odd sizes": Case(layered(3, 37, 41, 9, 3), [[4, 2, 8], [1, 3, 5]], 333, 1),
    "two-byte alignment": Case(layered(2, 38, 42, 9, 2), [[4, 2], [1, 3]], 152, 2, shift=2),
    "four-byte alignment": Case(layered(2, 36, 44, 9, 2), [[4, 2], [1, 3]], 144, 4),
    "eight-byte alignment": Case(layered(2, 40, 56, 9, 2), [[4, 2], [1, 3]], 160, 8, shift=8),
    "block outside": Case(
        [(0, 4 * 160, 4 * 160, slot * 640, slot) for slot in range(3)],
        [[2, 5, 1], [7, 4, 3]],
        1920,
        16,
    ),
    "more than a tile": Case(layered(1, 40000, 40960, 4, 2), [[1, 3]], 80000, 16),
    "bytes, more than a tile": Case(layered(1, 9001, 9003, 4, 2), [[3, 1]], 18002, 1, shift=3),
    # Attention pages of slots 0 and 1, and two states that have blocks of their own.
    "several sizes and groups": Case(
        [
            (0, 256, 256, 0, 0),
            (0, 256, 256, 256, 1),
            (4096, 20480, 20000, 512, 2),
            (4096 + 20480 * 4, 1040, 1024, 20512, 3),
        ],
        [[1, 2, 3, 1], [5, 6, 0, 2], [0, 0, 2, 0]],
        21536,
        16,
    ),
    # A state, and of two layers' pages what the first tokens of two heads fill.
    "beginnings of pages": Case(
        [
            (0, 1040, 1024, 0, 0),
            *((8192 + 320 * run, 1280, 208, 1024 + 208 * run, 1) for run in range(4)),
            *((20480 + 320 * run, 1280, 208, 1856 + 208 * run, 1) for run in range(4)),
        ],
        [[1, 5], [3, 2], [0, 4], [2, 0]],
        2688,
        16,
    ),
    "beginnings of odd pages": Case(
        [
            (0, 103, 91, 0, 0),
            *((1024 + 35 * run, 105, 21, 91 + 21 * run, 1) for run in range(3)),
        ],
        [[2, 1], [1, 3]],
        154,
        1,
        shift=1,
    ),
    "left out": Case(layered(3, 64, 64, 9, 3), [[0, 3, 0], [0, 0, 0], [5, 0, 7]], 576, 16),
    # The bytes between the rows belong to nobody.
    "gaps in the object": Case([(0, 32, 16, 16, 0), (0, 32, 16, 80, 1)], [[1, 2], [3, 4]], 112, 16),
    "many objects": Case(layered(2, 16, 32, 20, 1), [[1 + i] for i in range(17)], 32, 16),
}


class Built:
    """A case's memory on a device, and what a plain copy would do with it."""

    def __init__(self, case: Case, device: str) -> None:
        from lakecache._kernels import RowTable

        self.case, self.device = case, device
        highest = max(max(ids) for ids in case.ids)
        pool_bytes = max(base + stride * highest + size for base, stride, size, *_ in case.rows)
        self.pool = self.noise(pool_bytes + 64, 1)[case.shift :]
        self.staging = self.noise(len(case.ids) * case.part_bytes + 64, 2)[case.shift :]
        self.ids = torch.tensor(case.ids, dtype=torch.int32, device=device)
        columns = list(zip(*case.rows, strict=True))
        self.table = RowTable(
            [self.pool.data_ptr() + base for base in columns[0]],
            *columns[1:],
            part_bytes=case.part_bytes,
            slot_count=len(case.ids[0]),
            device=device,
        )

    def noise(self, size: int, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).to(
            self.device
        )

    def pairs(self) -> Any:
        """The pool's and staging's slice of every page that is not left out."""
        for item, ids in enumerate(self.case.ids):
            for base, stride, size, offset, slot in self.case.rows:
                if ids[slot]:
                    page, staged = base + stride * ids[slot], item * self.case.part_bytes + offset
                    yield slice(page, page + size), slice(staged, staged + size)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=CASES)
def built(request: pytest.FixtureRequest, device: str) -> Built:
    return Built(CASES[request.param], device)


def test_width_of_an_access(built: Built) -> None:
    assert built.table.vector_bytes == built.case.vector_bytes


def test_gather(built: Built) -> None:
    from lakecache._kernels import gather

    pool, want = built.pool.clone(), built.staging.clone()
    for page, staged in built.pairs():
        want[staged] = pool[page]
    gather(built.table, built.ids, built.staging, len(built.ids))
    assert torch.equal(built.staging, want)
    assert torch.equal(built.pool, pool)


def test_scatter(built: Built) -> None:
    from lakecache._kernels import scatter

    want, staging = built.pool.clone(), built.staging.clone()
    for page, staged in built.pairs():
        want[page] = staging[staged]
    scatter(built.table, built.ids, built.staging, len(built.ids))
    assert torch.equal(built.pool, want)
    assert torch.equal(built.staging, staging)


def test_compare(built: Built) -> None:
    from lakecache._kernels import compare, gather

    flag = torch.zeros(1, dtype=torch.int32, device=built.device)

    def differs() -> bool:
        flag.zero_()
        compare(built.table, built.ids, built.staging, len(built.ids), flag)
        return bool(flag.item())

    gather(built.table, built.ids, built.staging, len(built.ids))
    assert not differs()
    used = torch.zeros_like(built.staging, dtype=torch.bool)
    pages = [staged for _, staged in built.pairs()]
    for staged in pages:
        used[staged] = True
    for at in {pages[0].start, pages[len(pages) // 2].start, pages[-1].stop - 1}:
        built.staging[at] ^= 128
        assert differs()
        built.staging[at] ^= 128
    # What no row covers, or a row that is left out, may be anything.
    built.staging[~used] ^= 1
    assert not differs()


def test_only_the_first_objects(device: str) -> None:
    from lakecache._kernels import gather

    built = Built(CASES["many objects"], device)
    before = built.staging.clone()
    gather(built.table, built.ids, built.staging, 5)
    assert not torch.equal(built.staging[: 5 * 32], before[: 5 * 32])
    assert torch.equal(built.staging[5 * 32 :], before[5 * 32 :])


@pytest.mark.parametrize("integers", ["uint64", "int64"])
def test_columns_of_numpy(device: str, integers: str) -> None:
    numpy = pytest.importorskip("numpy")
    from lakecache._kernels import RowTable, gather

    pool = torch.arange(1024, device=device).to(torch.uint8)
    columns = [[pool.data_ptr(), pool.data_ptr() + 64], [128] * 2, [64, 48], [0, 64], [0, 1]]
    table = RowTable(
        *(numpy.array(column, dtype=integers) for column in columns),
        part_bytes=112,
        slot_count=2,
        device=device,
    )
    staging = torch.zeros(112, dtype=torch.uint8, device=device)
    gather(table, torch.tensor([[3, 5]], dtype=torch.int32, device=device), staging, 1)
    assert torch.equal(staging, torch.cat([pool[384:448], pool[704:752]]))


def test_a_warm_table_has_touched_nothing(device: str) -> None:
    built = Built(CASES["several sizes and groups"], device)
    before = built.pool.clone()
    built.table.warm_up()
    assert torch.equal(built.pool, before)


def test_what_cannot_be_launched(device: str) -> None:
    from lakecache._kernels import MAX_COUNT, gather

    built = Built(CASES["many pages"], device)
    for count in (0, -1, MAX_COUNT + 1):
        with pytest.raises(ValueError, match=f"{count} objects"):
            gather(built.table, built.ids, built.staging, count)
    with pytest.raises(ValueError, match="8 block ids"):
        gather(built.table, built.ids, built.staging, 3)
    with pytest.raises(ValueError, match="int64"):
        gather(built.table, built.ids.long(), built.staging, 2)
    with pytest.raises(ValueError, match="20479 bytes of staging"):
        gather(built.table, built.ids, built.staging[:20479], 2)
    with pytest.raises(ValueError, match="aligned to 16"):
        gather(built.table, built.ids, built.staging[1:], 2)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ((4096, 64, 64, 1, 0), "within an object of 64"),
        ((4096, 64, 0, 0, 0), "row 0"),
        ((4096, -64, 64, 0, 0), "row 0"),
        ((0, 64, 64, 0, 0), "row 0"),
        ((4096, 64, 64, 0, 2), "slot 2 of 2"),
        ((4096, 64, 64, 0, -1), "slot -1 of 2"),
        (None, "without rows"),
    ],
)
def test_rows_that_cannot_be(device: str, row: Any, text: str) -> None:
    from lakecache._kernels import RowTable

    columns = [[value] for value in row] if row else [[]] * 5
    with pytest.raises(ValueError, match=text):
        RowTable(*columns, part_bytes=64, slot_count=2, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize(("page", "size"), [(65536, 1 << 30), (65533, 5 << 29)])
def test_batches_beyond_32_bits(page: int, size: int) -> None:
    """1 GiB in wide accesses, and 2.5 GiB one byte at a time: more than 2**31 elements."""
    from lakecache._kernels import RowTable, compare, gather, scatter

    slots = 256
    count = size // (page * slots)
    blocks = count * slots + 1
    pool = torch.randint(-(2**31), 2**31, (blocks * page // 4 + 1,), device="cuda").to(torch.int32)
    pool = pool.view(torch.uint8)[: blocks * page]
    table = RowTable(
        [pool.data_ptr()] * slots,
        [page] * slots,
        [page] * slots,
        [slot * page for slot in range(slots)],
        list(range(slots)),
        part_bytes=slots * page,
        slot_count=slots,
        device="cuda",
    )
    order = torch.randperm(count * slots, device="cuda") + 1
    ids = order.to(torch.int32).view(count, slots)
    staging = torch.zeros(count * slots * page, dtype=torch.uint8, device="cuda")
    pages, staged = pool.view(blocks, page), staging.view(count * slots, page)
    gather(table, ids, staging, count)
    for index in (0, 1, count * slots // 2, count * slots - 1):
        assert torch.equal(staged[index], pages[order[index]])
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    compare(table, ids, staging, count, flag)
    assert not flag.item()
    staging[-1] ^= 1
    compare(table, ids, staging, count, flag)
    assert flag.item()
    staging[-1] ^= 1
    before = pool.clone()
    pages[1:].zero_()
    scatter(table, ids, staging, count)
    assert torch.equal(pool, before)


@pytest.mark.gpu
def test_a_stream_by_its_handle() -> None:
    """What runs on the stream before is waited for; what runs elsewhere is not."""
    from lakecache._kernels import gather

    built = Built(CASES["many pages"], "cuda")
    built.table.warm_up()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        built.pool.fill_(7)
    gather(built.table, built.ids, built.staging, len(built.ids), stream.cuda_stream)
    stream.synchronize()
    assert bool((built.staging[: 2 * 10240] == 7).all())


@pytest.mark.gpu
def test_no_value_compiles_again() -> None:
    """Counts, slots, part sizes and alignments that Triton would otherwise specialise on."""
    import triton

    from lakecache._kernels import gather

    compiled: list[Any] = []
    hook = triton.knobs.runtime.jit_post_compile_hook
    Built(CASES["two-byte alignment"], "cuda").table.warm_up()
    triton.knobs.runtime.jit_post_compile_hook = lambda **what: compiled.append(what)
    try:
        for slots, shift in ((1, 2), (2, 6), (16, 2), (17, 10)):
            rows = layered(2, 38, 42, 20, slots)
            case = Case(rows, [[1 + i for i in range(slots)]] * 3, 2 * slots * 38, 2, shift=shift)
            built = Built(case, "cuda")
            for count in (1, 2, 3):
                gather(built.table, built.ids[:count], built.staging, count)
        torch.cuda.synchronize()
    finally:
        triton.knobs.runtime.jit_post_compile_hook = hook
    assert not compiled
