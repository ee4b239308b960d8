"""What a store has leased: objects that are held, and their way into memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lakecache._buffers import bytes_of, flat, is_on_device
from lakecache._objects import FILLING, GONE, READY
from lakecache.errors import ConfigError, DeadlineError, LeaseLostError

if TYPE_CHECKING:
    from typing import Self

    from lakecache import _core
    from lakecache._buffers import DeviceAccess

__all__ = ["StoreLease", "held_prefix", "held_runs", "wait_for"]

# Waits sleep this long between looks, growing: the first looks catch what is nearly done.
FIRST_SLEEP_SECONDS = 20e-6
LONGEST_SLEEP_SECONDS = 2e-3


class StoreLease:
    """Objects held against eviction. Close it, or use it in a `with` statement.

    Indexes are those of the keys that were asked for.
    """

    def __init__(
        self, cache: _core.Cache, access: DeviceAccess, names: Sequence[bytes],
        runs: list[tuple[int, int, _core.Lease]],
    ) -> None:  # fmt: skip
        """Made by a store. `runs` are (first index, count, lease of that run)."""
        self._cache: _core.Cache | None = cache
        self._access = access
        self._names = names
        self._runs = runs
        self._started: set[int] = set()
        self._slots: dict[int, tuple[int, int]] = {}
        self._released: set[int] = set()
        self._tiers = {
            first + at: "disk" if tier else "memory"
            for first, count, lease in runs
            for at, tier in enumerate(lease.tiers()[:count])
        }

    def __len__(self) -> int:
        """How many keys were asked for; for a prefix, how many are held."""
        return len(self._names)

    @property
    def found(self) -> list[bool]:
        """For each key, whether it was present when the lease was taken."""
        return [at in self._tiers for at in range(len(self))]

    def tier(self, index: int) -> str | None:
        """Where the object was when the lease was taken: `memory`, `disk`, or None for a miss."""
        return self._tiers.get(index)

    def view(self, index: int, *, timeout: float = 30.0) -> list[memoryview]:
        """The object's bytes where they lie in memory, read from disk first if need be.

        Returns:
            1 to 8 read-only views of format "B", one per extent, in order; the object is their
            concatenation. A view keeps its object in memory until it is deleted, lease or not.

        Raises:
            KeyError: the key was not present, or has been released.
            LeaseLostError: the file is damaged or could not be read, or there was no room for it
                for 10 s. Compute the bytes again, or hold fewer objects.
            DeadlineError: there was no room, or the disk was too slow.
        """
        cache, slot = self._ready(index, timeout)
        views = [view.toreadonly() for view in cache.view(*slot)]
        if not views:
            raise LeaseLostError(f"object {index} of the lease is gone")
        return views

    def read(self, index: int, *, timeout: float = 30.0) -> bytes:
        """A copy of the object's bytes. Raises like `view`."""
        return b"".join(self.view(index, timeout=timeout))

    def copy_into(self, index: int, target: Any, *, timeout: float = 30.0) -> None:
        """Copy the object into a writable contiguous buffer of the same size, or into a contiguous
        tensor on any device. The copy is over when the call returns.
        """
        if is_on_device(target):
            bytes_there = flat(target)
            cache, slot = self._ready(index, timeout)
            self._access.load(cache, bytes_there, slot)
            return
        space = bytes_of(target)
        if space.readonly:
            raise TypeError("the target is read-only")
        views = self.view(index, timeout=timeout)
        size = sum(view.nbytes for view in views)
        if size != space.nbytes:
            raise ConfigError(f"the object has {size} bytes and the target {space.nbytes}")
        at = 0
        for view in views:
            space[at : at + view.nbytes] = view
            at += view.nbytes

    def load(self, *, timeout: float = 30.0) -> int:
        """Bring everything held into memory; how many objects are readable in the end.

        Raises nothing: what fails or does not fit in time is not counted.
        """
        deadline = time.monotonic() + timeout
        loaded = 0
        for index in sorted(self._tiers.keys() - self._released):
            try:
                self._ready(index, max(0.0, deadline - time.monotonic()))
            except (LeaseLostError, DeadlineError):
                continue
            loaded += 1
        return loaded

    def release(self, index: int) -> None:
        """Give one object back. Safe to repeat."""
        found = self._run_of(index)
        if found is not None and index not in self._released:
            self._released.add(index)
            self._slots.pop(index, None)
            _, first, lease = found
            lease.release(index - first)

    def close(self) -> None:
        """Give everything back. Safe to repeat."""
        self._released.update(self._tiers)
        self._slots.clear()
        runs, self._runs = self._runs, []
        for _, _, lease in runs:
            lease.close()
        # What is left of a closed store would keep its directory in use.
        self._cache = None

    def __enter__(self) -> Self:
        """Give the lease itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give everything back."""
        self.close()

    def _run_of(self, index: int) -> tuple[int, int, _core.Lease] | None:
        for number, (first, count, lease) in enumerate(self._runs):
            if first <= index < first + count:
                return number, first, lease
        return None

    def _ready(self, index: int, timeout: float) -> tuple[_core.Cache, tuple[int, int]]:
        found, cache = self._run_of(index), self._cache
        if cache is None or found is None or index in self._released:
            raise KeyError(f"object {index} of the lease was not present, or has been released")
        number, first, lease = found
        if number not in self._started:
            self._started.add(number)
            lease.start()

        def arrived() -> tuple[int, int] | None:
            for at, entry, generation in lease.slots():
                self._slots[first + at] = (entry, generation)
            slot = self._slots.get(index)
            state = FILLING if slot is None else cache.state(*slot)
            if state == READY:
                return slot
            broken = lease.failed()
            if state == GONE or (broken is not None and broken <= index - first):
                raise LeaseLostError(
                    f"object {index} of the lease could not be read: its file is damaged or gone, "
                    "or what is held left no room in memory for it (hold fewer objects at a time, "
                    "or raise cpu_bytes); without it compute its bytes again"
                )
            return None

        slot = wait_for(arrived, time.monotonic() + timeout)
        if slot is None:
            raise DeadlineError(
                f"object {index} of the lease was not in memory after {timeout:g} s: the disk is "
                "slow, or what is held leaves no room (hold fewer objects at a time)"
            )
        return cache, slot


def held_prefix(
    cache: _core.Cache, names: Sequence[bytes], timeout: float
) -> tuple[_core.Lease, int]:
    """Lease the leading keys, wait until their files are open, and hold no more than those."""
    lease = cache.lease(b"".join(names))
    wait_for(lease.poll, time.monotonic() + timeout)
    return lease, lease.settle()


def held_runs(
    cache: _core.Cache, names: Sequence[bytes], timeout: float
) -> list[tuple[int, int, _core.Lease]]:
    """Lease all that is present: one run of neighbours at a time."""
    deadline = time.monotonic() + timeout
    runs: list[tuple[int, int, _core.Lease]] = []
    first = 0
    while first < len(names):
        left = max(0.0, deadline - time.monotonic())
        if not cache.lookup(names[first])[0]:
            first += 1
            continue
        lease, count = held_prefix(cache, names[first:], left)
        if count:
            runs.append((first, count, lease))
        # The key that ended the run is missing, or its file is gone.
        first += count + 1
    return runs


def wait_for(look: Callable[[], Any], deadline: float) -> Any:
    """Call `look` until it answers something but None, or the deadline has passed."""
    pause = FIRST_SLEEP_SECONDS
    while True:
        answer = look()
        # So that a deadline that is no number has passed.
        if answer is not None or not time.monotonic() < deadline:
            return answer
        time.sleep(pause)
        pause = min(pause * 2, LONGEST_SLEEP_SECONDS)
