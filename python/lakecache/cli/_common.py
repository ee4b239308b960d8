"""What the commands share: where the store is, and how things are written."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from lakecache.config import CacheConfig
from lakecache.errors import ConfigError

__all__ = ["OTHER_RAM_DIR", "configuration", "no_pool", "print_json", "store_place"]

OTHER_RAM_DIR = "where engines have another ram_dir, give it by --ram-dir"


def configuration(options: argparse.Namespace, *keys: str) -> CacheConfig:
    """Check the options named `keys` as the configuration does; raise ConfigError.

    A cache_dir must exist: a mistyped one would look like an empty store.
    """
    given = {key: getattr(options, key) for key in ("cache_dir", "ram_dir", *keys)}
    config = CacheConfig.from_extra_config({k: v for k, v in given.items() if v is not None})
    if config.cache_dir is not None and not Path(config.cache_dir).is_dir():
        raise ConfigError(
            f"cache_dir {config.cache_dir} is not a directory: create it, or correct --cache-dir"
        )
    return config


def store_place(options: argparse.Namespace) -> CacheConfig:
    """As `configuration`, of a cache_dir that LakeCache has used and a ram_dir that is there."""
    config = configuration(options)
    if options.ram_dir is not None and not Path(config.ram_dir).is_dir():
        raise ConfigError(f"ram_dir {config.ram_dir} is not a directory: correct --ram-dir")
    if config.cache_dir is not None and not (Path(config.cache_dir) / "lock").exists():
        raise ConfigError(
            f"cache_dir {config.cache_dir} was never used by LakeCache (it has no file named "
            "lock): correct --cache-dir"
        )
    return config


def no_pool(config: CacheConfig) -> str:
    """Say so, and what may be forgotten: the memory of a store with files is not that of the one
    without, and is looked for in one ram_dir only.
    """
    if config.cache_dir is not None:
        return f"no pool in {config.ram_dir}; {OTHER_RAM_DIR}"
    return "no pool without a cache_dir; --cache-dir names the store of engines that have one"


def print_json(value: Any) -> None:
    """Write one JSON document."""
    print(json.dumps(value, indent=1))
