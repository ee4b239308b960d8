"""How fast pages move: within the GPU, over the link, and both as one pipeline.

    python benches/bench_copy.py --output benches/records/copy.json

Needs a GPU, torch and Triton; neither vLLM nor the compiled half of LakeCache. The host side is a
file in shared memory, mapped and registered with the driver, as in the product. Times are CUDA
events around the whole of a piece of work, so what the host needs to enqueue it counts as well
where the device waits for it. All arms that are compared take turns in one process; rates are
medians, ratios are between medians. Before a pipeline is timed its bytes are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KIB, MIB = 1 << 10, 1 << 20

FRAGMENTS = (16 * KIB, 64 * KIB, 256 * KIB, 2 * MIB)
STAGING = (16 * MIB, 32 * MIB, 64 * MIB, 128 * MIB, 256 * MIB)
TILES = (4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB)
LAYERS = 36


def gpu_problem() -> str | None:
    """Why nothing can be measured here; None where it can."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


class Driver:
    """The few calls of the CUDA driver that torch does not offer."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self.register = self._call("cuMemHostRegister_v2", pointer, size, ctypes.c_uint)
        self.unregister = self._call("cuMemHostUnregister", pointer)
        self.copy_async = self._call("cuMemcpyAsync", pointer, pointer, size, pointer)
        self._batch, self.batch_call = None, "none"
        # The first has the index of a failed copy among its arguments, the second has not.
        for name, failed in (("cuMemcpyBatchAsync_v2", ()), ("cuMemcpyBatchAsync", (pointer,))):
            with contextlib.suppress(AttributeError):
                arrays = (pointer, pointer, pointer, size, pointer, pointer, size)
                self._batch = self._call(name, *arrays, *failed, pointer)
                self._failed = (ctypes.byref(ctypes.c_size_t()),) if failed else ()
                self.batch_call = name
                break

    def _call(self, name: str, *types: Any) -> Callable[..., None]:
        function = getattr(self.lib, name)
        function.argtypes, function.restype = types, ctypes.c_int

        def call(*arguments: Any) -> None:
            if status := function(*arguments):
                raise RuntimeError(f"{name} failed with CUDA error {status}")

        return call

    def version(self) -> int:
        found = ctypes.c_int()
        self.lib.cuDriverGetVersion(ctypes.byref(found))
        return found.value

    def batch(self, destinations: Any, sources: Any, sizes: Any, stream: int) -> None:
        """Copy between the addresses in three int64 host tensors, in any order."""
        assert self._batch is not None
        # Source access in stream order, no hints of location, no flags; for all copies.
        attributes = (ctypes.c_int * 6)(1, 0, 0, 0, 0, 0)
        first = (ctypes.c_size_t * 1)(0)
        self._batch(
            destinations.data_ptr(),
            sources.data_ptr(),
            sizes.data_ptr(),
            len(sizes),
            attributes,
            first,
            1,
            *self._failed,
            stream,
        )

    def loop(self, destinations: list[int], sources: list[int], size: int, stream: int) -> None:
        copy = self.lib.cuMemcpyAsync
        failed = 0
        for destination, source in zip(destinations, sources, strict=True):
            failed |= copy(destination, source, size, stream)
        if failed:
            raise RuntimeError("cuMemcpyAsync failed")


@contextlib.contextmanager
def registered_memory(driver: Driver, size: int) -> Iterator[int]:
    """Address of a mapped and registered file in shared memory that has no name."""
    descriptor = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        memory = mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
    held = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(held)
    started = time.perf_counter()
    driver.register(address, size, 1)  # portable: for every context
    print(f"registered {size / MIB:.0f} MiB in {1e3 * (time.perf_counter() - started):.0f} ms")
    try:
        yield address
    finally:
        driver.unregister(address)
        del held
        memory.close()


@dataclass(frozen=True)
class Geometry:
    """How objects lie in pages of `fragment` bytes."""

    layout: str
    fragment: int
    layers: int
    slots: int

    @property
    def part_bytes(self) -> int:
        return self.fragment * self.layers * self.slots

    def facts(self) -> dict[str, Any]:
        return {
            "layout": self.layout,
            "fragment_bytes": self.fragment,
            "layers": self.layers,
            "blocks_per_object": self.slots,
            "object_bytes": self.part_bytes,
        }


def per_layer(fragment: int, slots: int, most: int = 64 * MIB) -> Geometry:
    """Pages per layer; as many layers as fit an object of `most` bytes."""
    return Geometry(
        "layer outside", fragment, max(1, min(LAYERS, most // (fragment * slots))), slots
    )


class Pages:
    """Random pages on the GPU, and the objects that they make up, in random blocks."""

    def __init__(self, geometry: Geometry, total: int, seed: int = 0) -> None:
        import torch

        from lakecache._kernels import RowTable

        self.geometry = geometry
        self.count = max(1, total // geometry.part_bytes)
        self.bytes = self.count * geometry.part_bytes
        fragment, layers, slots = geometry.fragment, geometry.layers, geometry.slots
        blocks = self.count * slots + 1
        self.pool = torch.empty(blocks * layers * fragment, dtype=torch.uint8, device="cuda")
        generator = torch.Generator("cuda").manual_seed(seed)
        self.pool.view(torch.int64).random_(generator=generator)
        order = torch.randperm(self.count * slots, device="cuda", generator=generator) + 1
        self.ids = order.to(torch.int32).view(self.count, slots)
        base = self.pool.data_ptr()
        rows = [(layer, slot) for layer in range(layers) for slot in range(slots)]
        self.columns = (
            [base + layer * blocks * fragment for layer, _ in rows],
            [fragment] * len(rows),
            [fragment] * len(rows),
            [index * fragment for index in range(len(rows))],
            [slot for _, slot in rows],
        )
        self._table = RowTable
        self.table = self.table_of()
        self.table.warm_up()

    def table_of(self, **more: int) -> Any:
        return self._table(
            *self.columns,
            part_bytes=self.geometry.part_bytes,
            slot_count=self.geometry.slots,
            device="cuda",
            **more,
        )

    def addresses(self) -> Any:
        """Every page's address, in the order of the objects' bytes (int64, on the host)."""
        import torch

        bases = torch.tensor(self.columns[0], dtype=torch.int64)
        slots = torch.tensor(self.columns[4], dtype=torch.int64)
        blocks = self.ids.cpu().to(torch.int64)[:, slots]
        return (bases + blocks * self.geometry.fragment).flatten()

    def check(self, save: Callable[[], None], load: Callable[[], None]) -> None:
        """Save, clear the pages, load: the pages have to be as they were."""
        import torch

        before = self.pool.clone()
        save()
        self.pool.zero_()
        load()
        # Block 0 belongs to nobody.
        shape = (self.geometry.layers, self.count * self.geometry.slots + 1, self.geometry.fragment)
        if not torch.equal(self.pool.view(shape)[:, 1:], before.view(shape)[:, 1:]):
            raise AssertionError(f"{self.geometry}: loaded pages are not what was saved")
        self.pool.copy_(before)


class Pipeline:
    """Packing and copying overlapped, with two staging buffers that take turns."""

    def __init__(self, driver: Driver, pages: Pages, host: int, staging_bytes: int) -> None:
        import torch

        self.driver, self.pages, self.host = driver, pages, host
        self.part = pages.geometry.part_bytes
        self.each = max(1, staging_bytes // self.part)
        self.buffers = [
            torch.empty(self.each * self.part, dtype=torch.uint8, device="cuda") for _ in range(2)
        ]
        self.kernels, self.copies = torch.cuda.Stream(), torch.cuda.Stream()
        self.full = [torch.cuda.Event() for _ in range(2)]
        self.empty = [torch.cuda.Event() for _ in range(2)]
        self.batches = [
            (first, min(self.each, pages.count - first), pages.ids[first:])
            for first in range(0, pages.count, self.each)
        ]

    def begin(self) -> None:
        import torch

        for stream in (self.kernels, self.copies):
            stream.wait_stream(torch.cuda.current_stream())

    def end(self) -> None:
        import torch

        for stream in (self.kernels, self.copies):
            torch.cuda.current_stream().wait_stream(stream)

    def save(self) -> None:
        from lakecache._kernels import gather

        for number, (first, count, ids) in enumerate(self.batches):
            side = number % 2
            buffer = self.buffers[side]
            if number >= 2:
                self.kernels.wait_event(self.empty[side])
            gather(self.pages.table, ids, buffer, count, self.kernels.cuda_stream)
            self.full[side].record(self.kernels)
            self.copies.wait_event(self.full[side])
            self.driver.copy_async(
                self.host + first * self.part,
                buffer.data_ptr(),
                count * self.part,
                self.copies.cuda_stream,
            )
            self.empty[side].record(self.copies)

    def load(self) -> None:
        from lakecache._kernels import scatter

        for number, (first, count, ids) in enumerate(self.batches):
            side = number % 2
            buffer = self.buffers[side]
            if number >= 2:
                self.copies.wait_event(self.empty[side])
            self.driver.copy_async(
                buffer.data_ptr(),
                self.host + first * self.part,
                count * self.part,
                self.copies.cuda_stream,
            )
            self.full[side].record(self.copies)
            self.kernels.wait_event(self.full[side])
            scatter(self.pages.table, ids, buffer, count, self.kernels.cuda_stream)
            self.empty[side].record(self.kernels)

    def run(self, work: Callable[[], None]) -> Callable[[], None]:
        def whole() -> None:
            self.begin()
            work()
            self.end()

        return whole


Arm = tuple[str, int, Callable[[], None]]


def timed(work: Callable[[], None]) -> float:
    """Milliseconds of device time from an idle device to an idle device."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


class Record:
    """Results as they come: printed at once, written at the end."""

    def __init__(self, repetitions: int) -> None:
        self.repetitions = repetitions
        self.results: list[dict[str, Any]] = []

    def compare(
        self, section: str, facts: dict[str, Any], arms: Sequence[Arm], against: dict[str, str]
    ) -> None:
        """Time the arms in turns. An arm is (name, bytes that count, work)."""
        samples: dict[str, list[float]] = {name: [] for name, _, _ in arms}
        for _, _, work in arms:
            timed(work)
        for repetition in range(self.repetitions):
            # Each round starts elsewhere, so that no arm always follows the same one.
            turn = repetition % len(arms)
            for name, _, work in (*arms[turn:], *arms[:turn]):
                samples[name].append(timed(work))
        medians = {name: statistics.median(times) for name, times in samples.items()}
        rates = {name: size / medians[name] / 1e6 for name, size, _ in arms}
        print(f"\n{section}: " + ", ".join(f"{key} {value}" for key, value in facts.items()))
        for name, size, _ in arms:
            other = against.get(name)
            ratio = rates[name] / rates[other] if other else None
            times = samples[name]
            shown = "" if ratio is None else f"  {ratio:6.3f} of {other}"
            print(
                f"  {name:34s} {rates[name]:8.1f} GB/s  {medians[name]:9.3f} ms "
                f"[{min(times):.3f}, {max(times):.3f}]{shown}",
                flush=True,
            )
            self.results.append(
                {
                    "section": section,
                    **facts,
                    "arm": name,
                    "bytes": size,
                    "gb_per_s": rates[name],
                    "median_ms": medians[name],
                    "samples_ms": times,
                    "against": other,
                    "ratio": ratio,
                }
            )


def repeated(times: int, work: Callable[[], None]) -> Callable[[], None]:
    def several() -> None:
        for _ in range(times):
            work()

    return several


def bench_kernels(record: Record, batch: int) -> None:
    """Gather and scatter against a copy of the same bytes; bytes read and written both count."""
    import torch

    from lakecache._kernels import gather, scatter

    launches = 4
    geometries = [per_layer(size, slots) for size in FRAGMENTS for slots in (4, 16)]
    geometries += [
        Geometry("block outside", size, 1, slots) for size in FRAGMENTS for slots in (4, 16)
    ]
    for geometry in geometries:
        pages = Pages(geometry, batch)
        staging = torch.empty(pages.bytes, dtype=torch.uint8, device="cuda")
        source = torch.empty_like(staging)
        tables = {"": pages.table}
        if geometry.slots == 16 and geometry.layout == "layer outside":
            for tile in TILES:
                tables[f", tile {tile // KIB} KiB"] = pages.table_of(tile_bytes=tile)
        counted = 2 * pages.bytes * launches
        arms: list[Arm] = [
            ("copy_", counted, repeated(launches, lambda s=source, d=staging: d.copy_(s)))
        ]
        for suffix, table in tables.items():
            table.warm_up()
            for move in (gather, scatter):
                arguments = (table, pages.ids, staging, pages.count)
                work = repeated(launches, lambda move=move, a=arguments: move(*a))
                arms.append((move.__name__ + suffix, counted, work))
        record.compare(
            "kernels", geometry.facts(), arms, {name: "copy_" for name, _, _ in arms[1:]}
        )
        del pages, staging, source, tables, arms, arguments, work, table
        torch.cuda.empty_cache()


def bench_launch(record: Record) -> None:
    """Host time of one launch, the stream's queue never full."""
    import torch

    from lakecache._kernels import gather

    pages = Pages(per_layer(64 * KIB, 16), 1)
    staging = torch.empty(pages.bytes, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    samples = []
    for _ in range(50):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(20):
            gather(pages.table, pages.ids, staging, pages.count, stream.cuda_stream)
        samples.append((time.perf_counter() - started) / 20 * 1e6)
    torch.cuda.synchronize()
    median = statistics.median(samples)
    print(f"\nlaunch: {median:.1f} us of host time [{min(samples):.1f}, {max(samples):.1f}]")
    record.results.append({"section": "launch", "median_us": median, "samples_us": samples})


def direct_arms(driver: Driver, pages: Pages, host: int) -> list[Arm]:
    """Every page by a copy of its own, without staging: batched calls, and one call each."""
    import torch

    fragment = pages.geometry.fragment
    device = pages.addresses()
    memory = torch.arange(len(device), dtype=torch.int64) * fragment + host
    sizes = torch.full_like(device, fragment)
    device_list, host_list = device.tolist(), memory.tolist()
    stream = torch.cuda.Stream()

    def ordered(work: Callable[[], None]) -> Callable[[], None]:
        def whole() -> None:
            stream.wait_stream(torch.cuda.current_stream())
            work()
            torch.cuda.current_stream().wait_stream(stream)

        return whole

    def batch(destinations: Any, sources: Any) -> Callable[[], None]:
        return ordered(lambda: driver.batch(destinations, sources, sizes, stream.cuda_stream))

    def loop(destinations: list[int], sources: list[int]) -> Callable[[], None]:
        return ordered(lambda: driver.loop(destinations, sources, fragment, stream.cuda_stream))

    pairs = {"a call per page": (loop(host_list, device_list), loop(device_list, host_list))}
    if driver.batch_call != "none":
        pairs["batched"] = (batch(memory, device), batch(device, memory))
    arms: list[Arm] = []
    for name, (save, load) in pairs.items():
        try:
            pages.check(save, load)
        except RuntimeError as error:
            print(f"{name}: left out: {error}")
        else:
            arms += [(f"D2H, {name}", pages.bytes, save), (f"H2D, {name}", pages.bytes, load)]
    return arms


def bench_link(record: Record, driver: Driver, host: int, total: int) -> None:
    """Pipelines and direct copies against one copy of the same bytes, per direction."""
    import torch

    for fragment in FRAGMENTS:
        pages = Pages(per_layer(fragment, 4, most=16 * MIB), total)
        plain = torch.empty(pages.bytes, dtype=torch.uint8, device="cuda")
        stream = torch.cuda.Stream()

        def one_copy(destination: int, source: int, size: int, on: Any) -> None:
            on.wait_stream(torch.cuda.current_stream())
            driver.copy_async(destination, source, size, on.cuda_stream)
            torch.cuda.current_stream().wait_stream(on)

        there = (host, plain.data_ptr(), pages.bytes, stream)
        back = (plain.data_ptr(), host, pages.bytes, stream)
        arms: list[Arm] = [
            ("D2H, one copy", pages.bytes, lambda a=there: one_copy(*a)),
            ("H2D, one copy", pages.bytes, lambda a=back: one_copy(*a)),
        ]
        for staging in STAGING:
            line = Pipeline(driver, pages, host, staging)
            save, load = line.run(line.save), line.run(line.load)
            pages.check(save, load)
            size = f"2 x {staging // MIB} MiB"
            arms.append((f"D2H, pipeline {size}", pages.bytes, save))
            arms.append((f"H2D, pipeline {size}", pages.bytes, load))
        arms += direct_arms(driver, pages, host)
        record.compare(
            "link",
            {**pages.geometry.facts(), "batch_call": driver.batch_call},
            arms,
            {name: name[:3] + ", one copy" for name, _, _ in arms[2:]},
        )
        del pages, plain, arms, line, save, load
        torch.cuda.empty_cache()


def bench_both_ways(record: Record, driver: Driver, host: int, total: int) -> None:
    """A save and a load at the same time, against two copies at the same time."""
    import torch

    geometry = per_layer(64 * KIB, 4, most=16 * MIB)
    out, back = Pages(geometry, total, 1), Pages(geometry, total, 2)
    plain = [torch.empty(out.bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def two_copies() -> None:
        main = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(main)
        driver.copy_async(host, plain[0].data_ptr(), out.bytes, streams[0].cuda_stream)
        driver.copy_async(plain[1].data_ptr(), host + out.bytes, out.bytes, streams[1].cuda_stream)
        for stream in streams:
            main.wait_stream(stream)

    arms: list[Arm] = [("both, one copy each", 2 * out.bytes, two_copies)]
    for staging in STAGING:
        save = Pipeline(driver, out, host, staging)
        load = Pipeline(driver, back, host + out.bytes, staging)
        back.check(load.run(load.save), load.run(load.load))

        def both(save: Pipeline = save, load: Pipeline = load) -> None:
            save.begin()
            load.begin()
            save.save()
            load.load()
            save.end()
            load.end()

        arms.append((f"both, pipelines 4 x {staging // MIB} MiB", 2 * out.bytes, both))
    record.compare(
        "both ways", geometry.facts(), arms, {name: arms[0][0] for name, _, _ in arms[1:]}
    )


def usable(wanted: int) -> int:
    """As much of `wanted` bytes of shared memory as there is, less a reserve."""
    state = os.statvfs("/dev/shm")
    return min(wanted, (state.f_bavail * state.f_frsize - 64 * MIB) // MIB * MIB)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="where the record goes (JSON)")
    parser.add_argument("--repetitions", type=int, default=11, help="of every arm (at least 9)")
    parser.add_argument("--batch-mib", type=int, default=256, help="bytes of one launch")
    parser.add_argument("--link-mib", type=int, default=1024, help="bytes over the link")
    options = parser.parse_args()
    if options.repetitions < 9:
        parser.error("medians of fewer than 9 repetitions say little")
    if problem := gpu_problem():
        print(f"bench_copy: nothing measured: {problem}")
        return 0
    if (ROOT / "python").exists():
        sys.path.insert(0, str(ROOT / "python"))
    import torch
    import triton

    torch.zeros(1, device="cuda")  # makes the context that the driver's calls need
    driver, record = Driver(), Record(options.repetitions)
    host_bytes = usable(2 * options.link_mib * MIB)
    link = host_bytes // 2
    if link < options.link_mib * MIB:
        print(f"/dev/shm has room for {link // MIB} MiB each way only")
    bench_launch(record)
    bench_kernels(record, options.batch_mib * MIB)
    if link >= 64 * MIB:
        with registered_memory(driver, host_bytes) as host:
            bench_link(record, driver, host, link)
            bench_both_ways(record, driver, host, link)
    if options.output:
        document = {
            "bench": "copy",
            "gpu": torch.cuda.get_device_name(),
            "cuda_driver": driver.version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "repetitions": options.repetitions,
            "results": record.results,
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
