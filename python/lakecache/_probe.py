"""How fast a disk reads, found out by reading some of what is stored on it."""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["probe_disk"]

FILES = 16
BYTES = 64 << 20
READ_BYTES = 2 << 20
SECONDS = 0.5
THREADS = 4


def probe_disk(directory: Path) -> float | None:
    """Time reads of stored objects past the page cache: bytes per second, None without any.

    It reads at most 64 MiB, for about half a second, and raises nothing but OSError.
    """
    files = list(islice(_objects(directory), FILES))
    if not files:
        return None
    begin = time.monotonic()
    share = BYTES // len(files)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="lakecache-probe") as pool:
        total = sum(pool.map(lambda file: _read(file, share, begin + SECONDS), files))
    return total / max(time.monotonic() - begin, 1e-9) if total else None


def _objects(directory: Path) -> Iterator[Path]:
    for namespace in directory.iterdir():
        if namespace.is_dir():
            yield from namespace.glob("*/*.kv")


def _read(file: Path, share: int, deadline: float) -> int:
    """Read up to `share` bytes of a file until the deadline; objects may vanish at any time."""
    total = 0
    # A pipe in its place must not be waited for.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            opened = os.open(file, flags | os.O_DIRECT)
        except OSError:
            opened = os.open(file, flags)
            os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            # Anonymous pages are aligned as direct reads want it.
            with mmap.mmap(-1, READ_BYTES) as memory:
                while total < share and time.monotonic() < deadline:
                    count = os.preadv(opened, [memory], total)
                    total += count
                    if count < READ_BYTES:
                        break
        finally:
            os.close(opened)
    except OSError:
        pass
    return total
