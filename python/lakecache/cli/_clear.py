"""`lakecache clear`: removes what a store holds, while nobody uses it."""

from __future__ import annotations

import argparse
import sys

from lakecache.cli._common import no_pool, print_json, store_place
from lakecache.config import CacheConfig, shown_bytes
from lakecache.errors import ConfigError

SUMMARY = "remove what a store holds, while nobody uses it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which tiers go, and the consent."""
    tier = parser.add_mutually_exclusive_group()
    tier.add_argument("--memory-only", action="store_true", help="leave the files")
    tier.add_argument("--disk-only", action="store_true", help="leave the pool in shared memory")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(options: argparse.Namespace) -> int:
    """Empty the store; 0, or 1 where that was not wanted. Raises while anybody uses it."""
    from lakecache import _core

    config = store_place(options)
    if config.cache_dir is None and options.disk_only:
        raise ConfigError("--disk-only needs --cache-dir: without it there is only memory")
    memory, disk = not options.disk_only, not options.memory_only
    if not options.yes and not _confirmed(config, memory, disk):
        return 1
    cleared = _core.clear(config.ram_dir, config.cache_dir, memory, disk)
    found = cleared or {"memory_bytes": None, "objects": 0, "disk_bytes": 0, "foreign": []}
    found["foreign"] = [str(path) for path in found["foreign"]]
    if options.json:
        print_json(found)
        return 0
    if memory:
        freed = found["memory_bytes"]
        print(
            no_pool(config)
            if freed is None
            else f"removed the pool, {shown_bytes(freed)} of memory"
        )
    if disk and config.cache_dir is not None:
        print(f"removed {found['objects']} objects, {shown_bytes(found['disk_bytes'])} on disk")
    for path in found["foreign"]:
        print(f"left, as it is not of LakeCache: {path}")
    return 0


def _confirmed(config: CacheConfig, memory: bool, disk: bool) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("clear removes data and there is no terminal to ask at: add --yes")
    tiers = [name for name, goes in (("the pool in memory", memory), ("all files", disk)) if goes]
    place = config.cache_dir or config.ram_dir
    try:
        answer = input(f"Remove {' and '.join(tiers)} of {place}? [y/N] ")
    except (EOFError, KeyboardInterrupt):
        print()
        return False
    return answer.strip().lower() in {"y", "yes"}
