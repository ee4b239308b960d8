"""Where a bench keeps what it writes, and how it says what happens."""

from __future__ import annotations

import atexit
import fcntl
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import IO, Any

GIB = 1 << 30
LOG_BYTES = 100_000
_BEGIN = time.perf_counter()


class Workplace:
    """Where a run keeps what it writes: a scratch folder, removed at the end, and a record."""

    def __init__(self, output: Path | None, scratch: Path | None) -> None:
        self.scratch = Path(tempfile.mkdtemp(prefix="lakecache-bench-", dir=scratch))
        self.ram = Path(tempfile.mkdtemp(prefix="lakecache-bench-", dir="/dev/shm"))
        self.output = output
        atexit.register(self.remove)

    def remove(self) -> None:
        """Delete everything but the record."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        shutil.rmtree(self.ram, ignore_errors=True)

    def save(self, record: dict[str, Any]) -> None:
        """Write the record as far as it goes, so that a run cut short leaves its results."""
        if self.output is None:
            return
        self.output.parent.mkdir(parents=True, exist_ok=True)
        partial = self.output.with_suffix(".partial")
        partial.write_text(json.dumps(record, indent=1) + "\n")
        partial.replace(self.output)

    def keep_logs(self, path: Path | None) -> None:
        """Append the beginnings and ends of the engines' logs to one file."""
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as kept:
            for log in sorted(self.scratch.glob("*.log")):
                data = log.read_bytes()
                kept.write(f"\n===== {log.name}\n".encode())
                if len(data) > 2 * LOG_BYTES:
                    data = data[:LOG_BYTES] + b"\n[...]\n" + data[-LOG_BYTES:]
                kept.write(data)


class Turn:
    """Lets benches started together start their engines side by side and measure one by one."""

    def __init__(self, path: Path | None) -> None:
        """Without a file, it is always our turn."""
        self._path = path
        self._held: IO[bytes] | None = None

    def take(self) -> None:
        """Wait until no other bench with the same file measures."""
        if self._path is None or self._held is not None:
            return
        self._held = self._path.open("ab")
        progress(f"waits for its turn at {self._path}")
        fcntl.flock(self._held, fcntl.LOCK_EX)
        progress("measures")

    def leave(self) -> None:
        """Let the next one measure."""
        if self._held is not None:
            self._held.close()
            self._held = None


def progress(text: str) -> None:
    """Say what happens now, with the seconds since the start."""
    print(f"[{time.perf_counter() - _BEGIN:6.1f}] {text}", flush=True)
