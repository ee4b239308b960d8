"""`lakecache stats`: what a store holds. It becomes no member of the pool and changes nothing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from lakecache.cli._common import OTHER_RAM_DIR, no_pool, print_json, store_place
from lakecache.config import CacheConfig, shown_bytes

SUMMARY = "say what a store holds, in memory and on disk"

# As the connectors number them; other numbers are an application's own.
KINDS = {0: "chunks", 1: "states", 2: "states with a tail"}


def add_arguments(_: argparse.ArgumentParser) -> None:
    """Add nothing: the place is all that it needs."""


def run(options: argparse.Namespace) -> int:
    """Print the state of the store; 0."""
    config = store_place(options)
    found = collect(config)
    if options.json:
        print_json(found)
    else:
        print("\n".join(_text(found, config)))
    return 0


def collect(config: CacheConfig) -> dict[str, Any]:
    """Read what there is, as one JSON-like value; sizes in bytes, headers and metadata included."""
    from lakecache import _core

    in_use, pool = _core.look(config.ram_dir, config.cache_dir)
    found: dict[str, Any] = {
        "cache_dir": config.cache_dir,
        "ram_dir": config.ram_dir,
        "in_use": in_use,
        "memory": pool,
        "disk": None,
    }
    if config.cache_dir is not None:
        disk = _core.contents(config.cache_dir)
        namespaces = {
            digest: _namespace(Path(config.cache_dir) / digest, stored)
            for digest, stored in disk["namespaces"].items()
        }
        sums = [row for each in namespaces.values() for row in each["stored"].values()]
        found["disk"] = {
            "objects": sum(row["objects"] for row in sums),
            "bytes": sum(row["bytes"] for row in sums),
            "limit_bytes": pool["disk_capacity_bytes"] if pool else None,
            "namespaces": namespaces,
            "foreign": [str(path) for path in disk["foreign"]],
        }
    return found


def _namespace(directory: Path, stored: dict[str, Any]) -> dict[str, Any]:
    named = {KINDS.get(kind, f"kind {kind}"): row for kind, row in stored["kinds"].items()}
    if stored["damaged"][0]:
        named["damaged"] = stored["damaged"]
    rows = {name: {"objects": count, "bytes": size} for name, (count, size) in named.items()}
    return {"about": _about(directory), "stored": rows}


def _about(directory: Path) -> str | None:
    """What the manifest, which is for people, calls the namespace."""
    file = directory / "manifest.json"
    try:
        # A pipe would be waited for.
        manifest = json.loads(file.read_bytes()) if file.is_file() else {}
        return str(manifest.get("name") or ", ".join(manifest["model"]["config"]["architectures"]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _text(found: dict[str, Any], config: CacheConfig) -> list[str]:
    lines = _memory(found, config)
    if (disk := found["disk"]) is None:
        return lines
    limit = disk["limit_bytes"]
    most = "" if limit is None else f" of at most {shown_bytes(limit)}"
    total = f"{disk['objects']} objects, {shown_bytes(disk['bytes'])}{most}"
    lines.append(f"disk: {total}, in {found['cache_dir']}")
    for digest, namespace in disk["namespaces"].items():
        rows = [
            f"{row['objects']} {name} ({shown_bytes(row['bytes'])})"
            for name, row in namespace["stored"].items()
        ]
        about = f" ({namespace['about']})" if namespace["about"] else ""
        lines.append(f"  {digest[:16]}{about}: {', '.join(rows)}")
    lines += [f"  not of LakeCache: {path}" for path in disk["foreign"]]
    return lines


def _memory(found: dict[str, Any], config: CacheConfig) -> list[str]:
    pool = found["memory"]
    if pool is None:
        if found["in_use"]:
            unseen = f"in use by a process whose pool cannot be seen in {config.ram_dir}"
            return [f"memory: {unseen}; {OTHER_RAM_DIR}"]
        return [f"memory: {no_pool(config)}"]
    data = pool["file_bytes"] - pool["metadata_bytes"]
    lines = [
        f"memory: {pool['objects']} objects, {shown_bytes(pool['used_bytes'])} of "
        f"{shown_bytes(data)} ({shown_bytes(pool['reserved_bytes'])} have memory, tables take "
        f"{shown_bytes(pool['metadata_bytes'])} more), in {pool['path']}"
    ]
    alive = sorted({str(member["pid"]) for member in pool["members"] if member["alive"]})
    lines.append(f"  used by processes: {', '.join(alive)}" if alive else "  used by nobody")
    return lines
