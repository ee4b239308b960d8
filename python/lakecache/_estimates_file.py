"""The estimates of an engine, kept beside its objects for the next one, and probes of its disk.

Files are read and written, and the disk is probed, by one thread in the background, which runs one
thing at a time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from lakecache._fit import CHANGED, Sample
from lakecache._probe import probe_disk

if TYPE_CHECKING:
    from lakecache._estimates import PrefillModel, TierModel

__all__ = ["EstimatesFile"]

log = logging.getLogger("vllm.lakecache")

FILE = "estimates.json"
VERSION = 1
# A larger file holds no estimates.
FILE_BYTES_MAX = 1 << 20
# Estimates are written after this long, then twice as long, up to the last.
FIRST_SAVE_SECONDS, SAVE_SECONDS = 5.0, 60.0
# A disk that was refused, and not read, for this long is read once in the background.
PROBE_AGAIN_SECONDS, PROBE_SELDOM_SECONDS = 120.0, 3600.0


class Saved(msgspec.Struct, forbid_unknown_fields=True):
    """The file of estimates. `estimates` is for people; the measurements are what is read."""

    version: int
    engine: str
    estimates: dict[str, Any]
    prefill: list[Sample]
    memory: list[Sample]
    step: list[Sample]
    disk: list[Sample]
    probed: Annotated[float, msgspec.Meta(ge=1)] | None = None


class EstimatesFile:
    """Keeps what these models have measured. All methods are for the scheduler's thread alone."""

    def __init__(
        self, prefill: PrefillModel, memory: TierModel, step: TierModel, disk: TierModel, *,
        engine: str, explain: Callable[[], dict[str, Any]],
    ) -> None:  # fmt: skip
        """`engine` is what decides how fast it is, and `explain` gives estimates for people."""
        self._prefill, self._memory, self._step, self._disk = prefill, memory, step, disk
        self._engine = engine
        self._explain = explain
        # Whether a load from disk was refused since the disk was probed.
        self.refused_disk = False
        self._path: Path | None = None
        self._thread: threading.Thread | None = None
        self._found: Saved | None = None
        self._probe: float | None = None
        self._probe_after = PROBE_AGAIN_SECONDS
        self._probed_at = self._saved_at = time.monotonic()
        self._save_after = FIRST_SAVE_SECONDS
        self._saved_count = 0

    def keep_in(self, cache_dir: Path, namespace: str) -> None:
        """Keep estimates beside a namespace's objects: read them in the background, or probe."""
        if self._path is None:
            self._path = cache_dir / namespace / FILE
            self._start(self._read, self._path)

    def wait(self, timeout: float) -> None:
        """Wait for what runs in the background; for tests and tools."""
        if self._thread is not None:
            self._thread.join(timeout)
        self.adopt()

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        """Run one thing in the background; the caller knows that nothing else is running."""
        self._thread = threading.Thread(
            target=work, args=arguments, name="lakecache-estimates", daemon=True
        )
        self._thread.start()

    def _read(self, path: Path) -> None:
        try:
            saved = msgspec.json.decode(_read_small(path), type=Saved)
            if (saved.version, saved.engine) == (VERSION, self._engine):
                self._found = saved
                if saved.disk or saved.probed:
                    return
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            log.info("LakeCache begins without estimates: %s: %s", path, error)
        self._measure(path)

    def _measure(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            self._probe = probe_disk(path.parent.parent)

    def adopt(self) -> None:
        """Take over what the background has found."""
        found, self._found = self._found, None
        if found is not None:
            try:
                for fit, samples in (
                    (self._prefill.fit, found.prefill),
                    (self._memory.fit, found.memory),
                    (self._step.fit, found.step),
                    (self._disk.fit, found.disk),
                ):
                    newer = fit.samples()
                    fit.clear()
                    fit.restore([*samples, *newer])
                self._disk.probed = found.probed
            except ValueError as error:
                log.info("LakeCache begins without estimates: %s: %s", self._path, error)
        probe, self._probe = self._probe, None
        if probe is not None:
            self._disk.probed = probe
            costs = self._disk.costs()
            if costs is not None and probe * costs[1] > CHANGED:
                self._disk.fit.clear()

    def tick(self, now: float) -> None:
        """Read the disk again or write the estimates, where it is time for one of them."""
        if self._path is None or (self._thread is not None and self._thread.is_alive()):
            return
        self.adopt()
        idle = now - max(self._probed_at, self._disk.measured_at)
        if idle > self._probe_after and (self.refused_disk or self._disk.costs() is None):
            # Should a read look faster than loads ever are, few loads are lost on it.
            self.refused_disk, self._probed_at = False, now
            self._probe_after = min(2 * self._probe_after, PROBE_SELDOM_SECONDS)
            self._start(self._measure, self._path)
        elif now - self._saved_at > self._save_after and self._count() != self._saved_count:
            self._saved_at = now
            self._save_after = min(2 * self._save_after, SAVE_SECONDS)
            self._start(self._write, *self._snapshot())

    def _count(self) -> int:
        tiers = self._memory, self._step, self._disk
        return self._prefill.fit.count + sum(tier.fit.count for tier in tiers)

    def _snapshot(self) -> tuple[Path, Saved]:
        assert self._path is not None
        self._saved_count = self._count()
        return self._path, Saved(
            VERSION, self._engine, self._explain(), self._prefill.fit.samples(),
            self._memory.fit.samples(), self._step.fit.samples(), self._disk.fit.samples(),
            self._disk.probed,
        )  # fmt: skip

    def _write(self, path: Path, saved: Saved) -> None:
        # Swept with other unfinished files, should we be killed.
        temporary = path.with_name(f".{FILE}.{os.getpid()}.tmp")
        try:
            temporary.touch(mode=0o600)
            temporary.write_bytes(msgspec.json.format(msgspec.json.encode(saved), indent=1))
            temporary.replace(path)
        except OSError as error:
            # The directory comes with the first stored object.
            log.debug("LakeCache could not keep its estimates: %s", error)

    def close(self) -> None:
        """Keep the estimates."""
        self.wait(1.0)
        if self._path is not None and self._count():
            self._write(*self._snapshot())


def _read_small(path: Path) -> bytes:
    """Read a file of ours; ValueError for what cannot be one."""
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(opened, "rb") as file:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise ValueError("no regular file")
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise ValueError(f"more than {FILE_BYTES_MAX} bytes")
    return data
