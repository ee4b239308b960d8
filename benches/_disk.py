"""The bandwidth of a folder's disk, and what its files take and hold in the page cache."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from pathlib import Path
from typing import Any


def disk_bandwidth(folder: Path, nbytes: int, threads: int = 8, block: int = 4 << 20) -> dict:
    """O_DIRECT bandwidth of a folder's disk, GB/s, several threads, fresh random bytes."""
    path = folder / "bandwidth"
    nbytes -= nbytes % (threads * block)
    flags = getattr(os, "O_DIRECT", 0)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
    except OSError:
        flags = 0
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    rates: dict[str, Any] = {"bytes": nbytes, "threads": threads, "direct": bool(flags)}

    def run(index: int, write: bool) -> None:
        buffer = mmap.mmap(-1, block)
        if write:
            buffer.write(os.urandom(block))
        for offset in range(index * block, nbytes, threads * block):
            if write:
                os.pwrite(descriptor, buffer, offset)
            else:
                os.preadv(descriptor, [buffer], offset)

    try:
        for name, write in (("write", True), ("read", False)):
            if not flags and not write:
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            workers = [threading.Thread(target=run, args=(i, write)) for i in range(threads)]
            started = time.perf_counter()
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            rates[name] = nbytes / (time.perf_counter() - started) / 1e9
    finally:
        os.close(descriptor)
        path.unlink()
    return rates


def folder_bytes(folder: str | None) -> int:
    """Bytes of all files below a folder; files may vanish meanwhile."""
    total = 0
    for root, _, names in os.walk(folder) if folder else ():
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(root, name).stat().st_blocks * 512
    return total


def drop_page_cache(folder: str) -> None:
    """Have the next reads of a folder's files come from the disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                descriptor = os.open(Path(root, name), os.O_RDONLY)
            except OSError:
                continue
            try:
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
