"""A stand-in for the compiled half, in plain Python and in one process: enough to run vLLM on.

Pools are kept by directory, so that two members in one process share one. Objects "on disk" are
files in `cache_dir` with a digest in front. Faults are set on the pool.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from pathlib import Path
from typing import Any

KEY = 32
pools: dict[str, Pool] = {}


def install() -> None:
    """Put this module in the place of `lakecache._core`."""
    sys.modules["lakecache._core"] = sys.modules[__name__]


def blake3(data: Any) -> bytes:
    return hashlib.sha256(bytes(data)).digest()


def blake3_file(path: str, ranges: list[tuple[int, int]] | None) -> bytes:
    data = Path(path).read_bytes()
    if ranges is None:
        return blake3(data)
    return blake3(b"".join(data[at : at + size] for at, size in ranges))


def derive_keys(namespace: bytes, kind: int, hashes: list[bytes]) -> bytes:
    return b"".join(blake3(namespace + bytes([kind]) + bytes(item)) for item in hashes)


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY] for at in range(0, len(keys), KEY)]


class Slot:
    def __init__(self, key: bytes, size: int) -> None:
        self.key, self.data, self.state, self.pins = key, bytearray(size), 0, 1


class Pool:
    def __init__(self, ident: str, directory: str | None) -> None:
        self.ident, self.directory = ident, directory
        self.slots: dict[int, Slot] = {}
        self.by_key: dict[bytes, int] = {}
        self.next = 1
        self.spaces: dict[bytes, int] = {}
        self.persistent: list[bool] = []  # what each naming of a namespace said
        self.polls_pending = 0  # how many polls of a lease answer None
        self.refuse_reserve = False
        # How long each attempt might wait for the lock.
        self.waits: list[float] = []
        self.copy_status = 0
        self.checked = True
        self.touched: list[bytes] = []

    def file(self, key: bytes) -> Path | None:
        return Path(self.directory) / f"{key.hex()}.kv" if self.directory else None

    def on_disk(self, key: bytes) -> bool:
        file = self.file(key)
        return file is not None and file.exists()

    def ready(self, key: bytes) -> bool:
        entry = self.by_key.get(key)
        return entry is not None and self.slots[entry].state == 1

    def add(self, key: bytes, size: int) -> int:
        entry, self.next = self.next, self.next + 1
        self.slots[entry] = Slot(key, size)
        self.by_key[key] = entry
        return entry

    def drop(self, entry: int) -> None:
        slot = self.slots.pop(entry, None)
        if slot is not None:
            slot.state = 2
            self.by_key.pop(slot.key, None)


class Cache:
    def __init__(
        self, *, cache_dir: str | None, ram_dir: str, worker: bool = False, **settings: Any
    ) -> None:
        ident = cache_dir or ram_dir
        if cache_dir:
            Path(cache_dir).mkdir(parents=True, exist_ok=True)
        self.pool = pools.setdefault(ident, Pool(ident, cache_dir))
        self.settings = settings
        self.pool.checked = bool(settings.get("checksum", True))
        self.pool_id = ident
        self.closed = False

    def namespace(
        self, digest: bytes, manifest: str, persistent: bool = True, wait: float = 0.001
    ) -> int | None:
        self.pool.persistent.append(persistent)
        return self.pool.spaces.setdefault(digest, len(self.pool.spaces))

    def lookup(self, keys: bytes) -> tuple[int, int]:
        found = memory = 0
        for key in split(keys):
            if self.pool.ready(key):
                memory += 1
            elif not self.pool.on_disk(key):
                break
            found += 1
        return found, memory

    def lookup_checkpoints(
        self, chunks: bytes, states: bytes, per_chunk: int, most: int
    ) -> list[tuple[int, int, int, bool]]:
        present = self.lookup(chunks)[0]
        ready = [self.pool.ready(key) for key in split(chunks)[:present]]
        found = []
        for index, key in reversed(list(enumerate(split(states)))):
            need = (index + 1) // per_chunk
            there = self.pool.ready(key) or self.pool.on_disk(key)
            if there and need <= present and len(found) < most:
                found.append((index, need, sum(ready[:need]), self.pool.ready(key)))
        return found

    def lease(self, keys: bytes) -> Lease:
        return Lease(self.pool, split(keys))

    def reserve(
        self, number: int, key: bytes, kind: int, parent: bytes | None, first: int, last: int,
        ranks: int, size: int, wait: float = 0.001,
    ) -> Any:  # fmt: skip
        self.pool.waits.append(wait)
        if self.pool.refuse_reserve or key in self.pool.by_key:
            return None
        return self.pool.add(key, size), 1

    def commit(self, entry: int, generation: int) -> None:
        slot = self.pool.slots[entry]
        slot.state, slot.pins = 1, slot.pins - 1
        file = self.pool.file(slot.key)
        if file is not None:
            file.write_bytes(blake3(slot.data) + slot.data)

    def abandon(self, entry: int, generation: int) -> None:
        self.pool.drop(entry)

    def touch(self, keys: bytes) -> None:
        self.pool.touched += split(keys)

    def pin(self, entry: int, generation: int) -> bool:
        slot = self.pool.slots.get(entry)
        if slot is None:
            return False
        slot.pins += 1
        return True

    def unpin(self, entry: int, generation: int) -> None:
        self.pool.slots[entry].pins -= 1

    def copier(self, threads: int) -> Copier:
        return Copier(self.pool)

    def flush(self, timeout: float) -> bool:
        return True

    def clear_memory(self) -> int:
        gone = [e for e, slot in self.pool.slots.items() if slot.state == 1 and slot.pins == 0]
        for entry in gone:
            self.pool.drop(entry)
        return len(gone)

    def close(self, timeout: float = 5.0) -> None:
        self.closed = True


class Lease:
    def __init__(self, pool: Pool, keys: list[bytes]) -> None:
        self.pool, self.keys = pool, keys
        self.held: dict[int, int] = {}
        self.given: set[int] = set()
        self.broken: int | None = None
        self.pending = pool.polls_pending
        self.started = self.closed = False
        self.disk = bytes(not pool.ready(key) for key in keys)
        for index, key in enumerate(keys):
            if pool.ready(key):
                self._hold(index, pool.by_key[key])

    def _hold(self, index: int, entry: int) -> None:
        self.held[index] = entry
        self.pool.slots[entry].pins += 1

    def poll(self) -> int | None:
        if self.pending:
            self.pending -= 1
            return None
        return len(self.keys)

    def settle(self) -> int:
        held = len(self.keys)
        if self.pending:
            held = next((index for index, disk in enumerate(self.disk) if disk), held)
        self.truncate(held)
        return held

    def truncate(self, n: int) -> None:
        for index in [index for index in self.held if index >= n]:
            self.release(index)
        self.keys, self.disk, self.pending = self.keys[:n], self.disk[:n], 0

    def tiers(self) -> bytes:
        return self.disk

    def start(self) -> None:
        self.started = True
        for index, key in enumerate(self.keys):
            if index in self.held:
                continue
            if self.pool.ready(key):
                self._hold(index, self.pool.by_key[key])
                continue
            file = self.pool.file(key)
            data = file.read_bytes() if file is not None and file.exists() else b""
            if not data or (self.pool.checked and blake3(data[KEY:]) != data[:KEY]):
                self.broken = index
                if file is not None:
                    file.unlink(missing_ok=True)
                return
            entry = self.pool.add(key, len(data) - KEY)
            slot = self.pool.slots[entry]
            slot.data[:], slot.state = data[KEY:], 1
            self.held[index] = entry

    def slots(self) -> list[tuple[int, int, int]]:
        if not self.started:
            return []
        new = [(index, entry, 1) for index, entry in self.held.items() if index not in self.given]
        self.given.update(index for index, _, _ in new)
        return new

    def failed(self) -> int | None:
        return self.broken

    def release(self, index: int) -> None:
        entry = self.held.pop(index, None)
        if entry is not None and entry in self.pool.slots:
            self.pool.slots[entry].pins -= 1

    def close(self) -> None:
        self.closed = True
        for index in list(self.held):
            self.release(index)


class Copier:
    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.done: list[tuple[int, int]] = []

    def load(self, job: int, entry: int, generation: int, offset: int, addresses: Any,
             size: int, deadline: float, verify: bool = False) -> None:  # fmt: skip
        slot = self.pool.slots.get(entry)
        if slot is None or slot.state != 1 or self.pool.copy_status:
            self.done.append((job, self.pool.copy_status or 1))
            return
        for number, address in enumerate(addresses):
            at = offset + number * size
            ctypes.memmove(int(address), bytes(slot.data[at : at + size]), size)
        self.done.append((job, 0))

    def store(self, job: int, entry: int, generation: int, offset: int, addresses: Any,
              size: int) -> None:  # fmt: skip
        slot = self.pool.slots.get(entry)
        if slot is None or slot.state != 0 or self.pool.copy_status:
            self.done.append((job, self.pool.copy_status or 1))
            return
        for number, address in enumerate(addresses):
            at = offset + number * size
            slot.data[at : at + size] = ctypes.string_at(int(address), size)
        self.done.append((job, 0))

    def poll(self) -> list[tuple[int, int]]:
        done, self.done = self.done, []
        return done

    def close(self) -> None:
        pass
