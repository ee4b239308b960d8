"""What the examples share: keys and values to store, and places to store them in."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

# SmolLM2-135M: 30 layers, 3 heads of keys and values with 64 numbers each.
LAYERS, HEADS, HEAD_SIZE = 30, 3, 64


def count(text: str) -> int:
    """Read a number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def device(name: str) -> str:
    """Read the name of a device that is there, for argparse."""
    if name == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch sees no CUDA device here; leave --device out")
    return name


def file(name: str) -> Path:
    """Read the path of a file that is there, for argparse."""
    path = Path(name)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {name}; kv_snapshot.py makes one")
    return path


def arguments(text: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(text or "").splitlines()[0])
    parser.add_argument("--device", type=device, choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--kv-snapshot", type=file, metavar="FILE", help="made by kv_snapshot.py")
    return parser


def kv_tensors(snapshot: Path | None, device: str, tokens: int = 1024) -> dict[str, torch.Tensor]:
    """K and V by layer: of a real prompt, or random ones of a real model's shape."""
    if snapshot is not None:
        from safetensors.torch import load_file

        return load_file(snapshot, device=device)
    torch.manual_seed(0)
    shape = (2, tokens, HEADS, HEAD_SIZE)
    return {
        f"layer {layer}": torch.randn(shape).to(device=device, dtype=torch.bfloat16)
        for layer in range(LAYERS)
    }


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit for bit; NaN is equal to itself and -0 is not 0."""
    return torch.equal(
        one.cpu().contiguous().view(torch.uint8), other.cpu().contiguous().view(torch.uint8)
    )


@contextlib.contextmanager
def places() -> Iterator[dict[str, str]]:
    """A cache directory and a shared-memory folder that are gone in the end."""
    files = tempfile.mkdtemp(prefix="lakecache-example-")
    memory = tempfile.mkdtemp(prefix="lakecache-example-", dir="/dev/shm")
    try:
        yield {"cache_dir": f"{files}/cache", "ram_dir": memory}
    finally:
        shutil.rmtree(files, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)
