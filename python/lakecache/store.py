"""The store without vLLM: bytes in, bytes out, in shared memory and on disk.

    with TieredStore(cache_dir="/var/cache/mine", cpu_bytes="1GiB") as store:
        store.put(b"some key", tensor)
        with store.lease_many([b"some key"]) as lease:
            (view,) = lease.view(0)

Objects are opaque bytes and never change once they are stored. A miss is never an exception: `put`
answers False and a lease says what it holds. Everything that waits has a timeout in seconds.
Stores may be used from several threads at once; one lease belongs to one thread at a time.
"""

from __future__ import annotations

import errno
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lakecache import _messages
from lakecache._buffers import DeviceAccess, bytes_of, fill_views, flat
from lakecache._objects import KEY_BYTES, READY
from lakecache._opening import open_cache
from lakecache._store_lease import StoreLease, held_prefix, held_runs, wait_for
from lakecache.config import CacheConfig, shown_bytes
from lakecache.errors import CapacityError, ClosedError, ConfigError

if TYPE_CHECKING:
    from typing import Self

    from lakecache import _core

__all__ = ["DiskBackend", "StoreLease", "TieredStore"]

log = logging.getLogger("lakecache")

KIND = 0
# How long the store waits for the pool's writer lock when it is opened.
NAMING_SECONDS = 2.0


class _Store:
    """What both faces share: keys, puts, leases, statistics."""

    def __init__(
        self,
        config: CacheConfig,
        *,
        namespace: str | bytes,
        shared: bool,
        index_timeout: float,
    ) -> None:
        from lakecache import _core

        self._core = _core
        self._digest, manifest = _namespace_digest(namespace, _core.blake3)
        self._cache: _core.Cache | None = open_cache(config, shared=shared)
        self._access = DeviceAccess()
        try:
            number = self._cache.namespace(self._digest, manifest, wait=NAMING_SECONDS)
            if number is None:
                raise CapacityError(
                    errno.ENOSPC,
                    f"the pool takes no namespace {namespace!r}: it can remember no more of them, "
                    "and `lakecache clear` empties it; or a stopped process holds its lock",
                )
            self._namespace = number
            self._largest: int = self._cache.stats()["memory_capacity_bytes"]
            if config.cache_dir is not None and index_timeout > 0:
                self._cache.wait_scanned(index_timeout)
            _messages.pass_on(log)
        except BaseException:
            self.close(timeout=0.0)
            raise

    @property
    def pool_id(self) -> str:
        """The id of the shared memory that serves this store; equal in all that share it."""
        return self._open().pool_id

    @property
    def io_engine(self) -> str:
        """How files are read: `io_uring`, `pread` or `none`."""
        return self._open().io_engine

    @property
    def io_engine_reason(self) -> str | None:
        """Why that is not the preferred engine, in one sentence; None where it is."""
        return self._open().io_engine_reason

    def key(self, key: bytes) -> bytes:
        """The 32-byte name of an object in the store: covers the namespace and your key.

        A key of 32 bytes is taken as a digest already; any other is hashed with BLAKE3 first.
        """
        return self._keys([key])

    def put(
        self, key: bytes, data: Any, *, parent: bytes | None = None, timeout: float = 1.0
    ) -> bool:
        """Store the bytes of `data` under `key`; they are copied once.

        Args:
            key: 32 bytes, or any other bytes, which are hashed.
            data: bytes, a contiguous buffer, or a contiguous torch tensor in host memory, of any
                shape and type; at least one byte. The bytes are stored, not shape and type.
            parent: the key without which this object is useless, if there is one (the chunk before
                it): a parent is evicted after its children.
            timeout: seconds to wait for room, for the lock and for the object to be readable.

        Returns:
            True when the object can be leased now, by this put or an earlier one (the first writer
            wins). False when it was not stored: no room, or not in time.

        Raises:
            TypeError: `data` is not contiguous bytes in host memory.
            ConfigError: `data` is empty.
            CapacityError: it is larger than the memory tier.
            ClosedError: the store is closed.
        """
        source = bytes_of(data)
        if not source.nbytes:
            raise ConfigError("an object of 0 bytes cannot be stored; data is empty")

        def fill(slot: tuple[int, int]) -> None:
            fill_views(self._open().view(*slot), source)

        return self._put(self.key(key), source.nbytes, fill, parent, timeout)

    def put_device(
        self, key: bytes, tensor: Any, *, parent: bytes | None = None, timeout: float = 1.0
    ) -> bool:
        """Store the bytes of a tensor where it lies, in GPU memory above all; like `put`.

        The copy follows the work queued on the device's current stream, and is over when the call
        returns.

        Raises:
            TypeError: it is not a contiguous torch tensor.
        """
        source = flat(tensor)
        if not source.numel():
            raise ConfigError("an object of 0 bytes cannot be stored; the tensor is empty")
        fill = partial(self._access.store, self._open(), source)
        return self._put(self.key(key), source.numel(), fill, parent, timeout)

    def lookup(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """How many leading keys are present in any tier, and how many of those in memory.

        Takes microseconds and holds nothing: what it counts may be evicted a moment later.
        """
        return self._open().lookup(self._keys(keys))

    def lease_many(self, keys: Sequence[bytes], *, timeout: float = 30.0) -> StoreLease:
        """Hold every one of `keys` that is present, wherever it stands in the list.

        What is held is not evicted, from memory or disk, until it is released; so hold no more at
        a time than fits in memory, or what lies on disk finds no room to be read to. Files are
        opened by I/O threads; this waits for them, at most `timeout` seconds, and then holds what
        it has.
        """
        cache = self._open()
        names = self._split(keys)
        return StoreLease(cache, self._access, names, held_runs(cache, names, timeout))

    def reserve_prefix(self, keys: Sequence[bytes], *, timeout: float = 30.0) -> StoreLease:
        """Hold the longest run of leading `keys` that is present, and mark it as used now.

        This is what a prefix cache needs: a chunk is of use only with all those before it.
        `len(lease)` is the length of the run; it may be 0.
        """
        cache = self._open()
        names = self._split(keys)
        lease, count = held_prefix(cache, names, timeout)
        runs = [(0, count, lease)] if count else []
        cache.touch(b"".join(names[:count]))
        return StoreLease(cache, self._access, names[:count], runs)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark a chain of keys, root first, as used now."""
        self._open().touch(self._keys(keys))

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until all that was put is on disk, or was given up; False when time ran out."""
        return self._open().flush(timeout)

    def clear_memory(self) -> int:
        """Drop from memory what is neither held nor still to be written; the bytes freed.

        Files stay: the next lease reads them.
        """
        return self._open().clear_memory()

    def stats(self) -> dict[str, Any]:
        """Counters since this store was opened, and gauges of the tiers, by name.

        Names that end in `_bytes` are bytes, those in `_seconds` seconds, others are counts.
        """
        return dict(self._open().stats())

    def events(self) -> list[dict[str, Any]]:
        """What happened since the last call, oldest first: `op`, `tier`, `key` (hex), `bytes`.

        The queue is bounded; when nobody asks, the oldest are dropped.
        """
        return self._open().events()

    def close(self, timeout: float = 5.0) -> None:
        """Write back for at most `timeout` seconds and leave the pool. Safe to repeat.

        Views that are still alive stay readable.
        """
        cache, self._cache = self._cache, None
        if cache is not None:
            self._access.close()
            cache.close(timeout)
            _messages.pass_on(log)

    def __enter__(self) -> Self:
        """Give the store itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the store."""
        self.close()

    def _open(self) -> _core.Cache:
        if self._cache is None:
            raise ClosedError("this store is closed; open a new one")
        # Every operation comes by here.
        _messages.pass_on(log)
        return self._cache

    def _keys(self, keys: Iterable[bytes]) -> bytes:
        return self._core.derive_keys(
            self._digest,
            KIND,
            [key if len(key) == KEY_BYTES else self._core.blake3(key) for key in _checked(keys)],
        )

    def _split(self, keys: Sequence[bytes]) -> list[bytes]:
        joined = self._keys(keys)
        return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]

    def _put(
        self,
        name: bytes,
        size: int,
        fill: Callable[[tuple[int, int]], None],
        parent: bytes | None,
        timeout: float,
    ) -> bool:
        cache = self._open()
        if size > self._largest:
            raise CapacityError(
                errno.ENOSPC,
                f"an object of {shown_bytes(size)} can never fit: the memory that all objects pass "
                f"through has {shown_bytes(self._largest)}. Set a larger cpu_bytes for the first "
                "process that opens the store, or split the object",
            )
        above = None if parent is None else self.key(parent)
        deadline = time.monotonic() + timeout

        def reserve() -> tuple[int, int] | bool | None:
            if cache.lookup(name)[0]:
                cache.touch(name)
                return True
            return cache.reserve(self._namespace, name, KIND, above, 0, 0, 1, size)

        slot = wait_for(reserve, deadline)
        if not isinstance(slot, tuple):
            return slot is True
        try:
            fill(slot)
        except BaseException:
            cache.abandon(*slot)
            raise
        cache.commit(*slot)
        # Read by others from here on; gone already means evicted, and then the disk may have it.
        state = wait_for(lambda: cache.state(*slot) or None, deadline)
        return state == READY or cache.lookup(name)[0] == 1


class TieredStore(_Store):
    """Objects in memory and, where `cache_dir` is set, on disk; both within hard limits.

    The keywords are the configuration keys of `kv_connector_extra_config` (see README.md); those
    that concern only vLLM, such as `chunk_size`, are checked and have no effect.
    """

    def __init__(
        self,
        *,
        namespace: str | bytes = "store",
        shared: bool = True,
        index_timeout: float = 30.0,
        **settings: Any,
    ) -> None:
        """Open or join the pool of `cache_dir`.

        Args:
            namespace: a name, or a digest of 32 bytes, of all that decides what the bytes mean:
                the same key in another namespace is another object.
            shared: False keeps the memory to this process, and `cache_dir` locked to it. True
                shares it with every process that opens the same `cache_dir` and `ram_dir`, and
                leaves it for the next one.
            index_timeout: seconds to wait for the index of the files, the first time a directory is
                opened; until it is there, objects on disk are misses. 0 does not wait.
            settings: `cache_dir`, `cpu_bytes`, `disk_capacity_bytes`, `ram_dir`, `io_engine`, ...

        Raises:
            ConfigError: an unknown key, or a wrong value; the text names the remedy.
            CapacityError: `cpu_bytes` can never fit here.
            StorageError: a directory cannot be used; keeps `errno`.
            EngineUnavailableError: `io_engine` names one that is not to be had, or others use the
                directory in a way that excludes this one (privately, or with another `ram_dir`).
            PoolIncompatibleError: the pool has another format, or is out of reach.
        """
        config = CacheConfig.from_extra_config(settings)
        super().__init__(config, namespace=namespace, shared=shared, index_timeout=index_timeout)


class DiskBackend(_Store):
    """Objects on disk only. Memory is used for transit alone (`cpu_bytes` is 0)."""

    def __init__(
        self,
        *,
        cache_dir: str,
        namespace: str | bytes = "store",
        shared: bool = True,
        index_timeout: float = 30.0,
        **settings: Any,
    ) -> None:
        """Open or join the directory; arguments and errors are those of `TieredStore`."""
        if settings.setdefault("cpu_bytes", 0) != 0:
            raise ConfigError(
                f"cpu_bytes is {settings['cpu_bytes']!r}, but a DiskBackend keeps nothing in "
                "memory. Leave it out, or use TieredStore."
            )
        config = CacheConfig.from_extra_config({"cache_dir": cache_dir, **settings})
        super().__init__(config, namespace=namespace, shared=shared, index_timeout=index_timeout)

    def put(
        self, key: bytes, data: Any, *, parent: bytes | None = None, timeout: float = 10.0
    ) -> bool:
        """Write an object; True once its file is in place, False where it was not kept."""
        deadline = time.monotonic() + timeout
        if not super().put(key, data, parent=parent, timeout=timeout):
            return False
        self.flush(max(0.0, deadline - time.monotonic()))
        return self.lookup([key])[0] == 1

    def lease_keys(self, keys: Sequence[bytes], *, timeout: float = 30.0) -> StoreLease:
        """Hold the files of those `keys` that are present, against eviction too."""
        return self.lease_many(keys, timeout=timeout)


def _checked(keys: Iterable[bytes]) -> Iterable[bytes]:
    if isinstance(keys, bytes | bytearray | str):
        raise TypeError(f"keys must be a sequence of bytes, not one {type(keys).__name__}")
    for key in keys:
        if not isinstance(key, bytes):
            raise TypeError(f"a key must be bytes, not {type(key).__name__}")
        yield key


def _namespace_digest(
    namespace: str | bytes, blake3: Callable[[bytes], bytes]
) -> tuple[bytes, str]:
    if isinstance(namespace, str) and namespace:
        digest = blake3(b"lakecache.store namespace\0" + namespace.encode())
        return digest, json.dumps({"made_by": "lakecache.store", "name": namespace})
    if isinstance(namespace, bytes) and len(namespace) == KEY_BYTES:
        return namespace, json.dumps({"made_by": "lakecache.store", "digest": namespace.hex()})
    raise ConfigError(f"namespace is {namespace!r}; it must be a name or a digest of 32 bytes")
