"""KV to host memory and back: pageable, pinned (with CUDA), and through LakeCache's memory.

usage: python examples/host_kv.py [--device cpu|cuda] [--kv-snapshot FILE]

Without a GPU "there" and "back" are copies within host memory.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable

import samples
import torch

from lakecache.store import TieredStore

ROUNDS = 5


def timed(device: str, size: int, work: Callable[[], None]) -> float:
    """GB/s of the fastest of some rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return size / best / 1e9


def main() -> int:
    options = samples.arguments(__doc__).parse_args()
    tensors = samples.kv_tensors(options.kv_snapshot, options.device)
    source = torch.cat([tensor.contiguous().view(torch.uint8).flatten() for tensor in
                        tensors.values()])  # fmt: skip
    target = torch.empty_like(source)
    size = source.numel()
    print(f"{len(tensors)} tensors, {size:,} bytes, device {options.device}")
    good = True

    def report(name: str, there: float | None, back: float) -> None:
        nonlocal good
        equal = samples.same_bytes(source, target)
        good &= equal
        first = f"{there:6.1f}" if there is not None else "     -"
        print(f"{name:10} there {first} GB/s  back {back:6.1f} GB/s  bytes equal: {equal}")
        target.zero_()

    kinds = [("pageable", False)] + ([("pinned", True)] if options.device == "cuda" else [])
    for name, pinned in kinds:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        there = timed(options.device, size, lambda host=host: host.copy_(source))
        back = timed(options.device, size, lambda host=host: target.copy_(host))
        report(name, there, back)

    with samples.places() as places:
        memory = 4 * size + (64 << 20)
        with TieredStore(ram_dir=places["ram_dir"], cpu_bytes=memory, shared=False) as store:
            started = time.perf_counter()
            good &= store.put(b"kv", source.cpu(), timeout=30)
            there = size / (time.perf_counter() - started) / 1e9
            with store.lease_many([b"kv"]) as lease:
                views = lease.view(0)
                warnings.filterwarnings("ignore", message="The given buffer is not writable")

                def copy_back() -> None:
                    at = 0
                    for view in views:
                        # Shares the mapped memory, which is read-only; torch warns once.
                        part = torch.frombuffer(view, dtype=torch.uint8)
                        target[at : at + view.nbytes].copy_(part)
                        at += view.nbytes

                report("lakecache", there, timed(options.device, size, copy_back))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
