"""How a configuration becomes an open cache, and in which words that fails."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from lakecache.errors import StorageError

if TYPE_CHECKING:
    from lakecache import _core
    from lakecache.config import CacheConfig

__all__ = ["open_cache"]


def open_cache(
    config: CacheConfig, *, shared: bool = True, disk: bool = True, worker: bool = False
) -> _core.Cache:
    """Open or join the pool; without `disk` nothing is kept in files.

    Raises:
        ConfigError, CapacityError, EngineUnavailableError, PoolIncompatibleError: in the core's
            words, which name the key.
        StorageError: the system refused something; the text names the key and the user.
    """
    from lakecache import _core

    try:
        return _core.Cache(
            cache_dir=config.cache_dir if disk else None,
            ram_dir=config.ram_dir,
            cpu_bytes=config.cpu_bytes,
            disk_capacity_bytes=config.disk_capacity_bytes if disk else None,
            shared=shared,
            io_engine=config.io_engine,
            # What is verified in memory must not come unchecked from a damaged file each time.
            checksum=config.checksum or config.verify_load,
            durability=config.durability,
            write_policy=config.write_policy,
            worker=worker,
        )
    except StorageError as error:
        raise StorageError(error.errno, _unusable(config, error)) from None


def _unusable(config: CacheConfig, error: StorageError) -> str:
    """Say what the system refused, of which key, and what to do."""
    text = re.sub(r" \(os error \d+\)$", "", error.strerror or str(error))
    for key, value in (("cache_dir", config.cache_dir), ("ram_dir", config.ram_dir)):
        if value is not None and value in text:
            return (
                f"{key} {value} cannot be used: {text}. Set {key} to a directory that user "
                f"{os.geteuid()}, who runs this, can make or owns"
            )
    return text
