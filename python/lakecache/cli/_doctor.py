"""`lakecache doctor`: whether LakeCache would work here, and what to do where it would not.

What the core decides at an engine's start is asked of the core, by trying it; the rest is read from
the kernel.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lakecache.cli._common import configuration, print_json
from lakecache.config import CacheConfig, shown_bytes
from lakecache.errors import LakeCacheError

SUMMARY = "say whether it would work here, with remedies"

VLLM = "0.32"
OPEN_FILES = 65_536
HUGE_PAGES_SINCE = (6, 1)
# The bit of CAP_IPC_LOCK among a process's capabilities.
IPC_LOCK = 1 << 14
IN_MEMORY = {"tmpfs", "ramfs"}


class Check(NamedTuple):
    """What was found, and what to do where that is not `ok`."""

    name: str
    status: Literal["ok", "warning", "error"]
    found: str
    remedy: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the limits, which the machine is compared with."""
    parser.add_argument("--cpu-bytes", help="as in the configuration")
    parser.add_argument("--disk-capacity-bytes", help="as in the configuration")


def run(options: argparse.Namespace) -> int:
    """Print every check; 1 where one is an error."""
    config = configuration(options, "cpu_bytes", "disk_capacity_bytes")
    checks = [check for each in CHECKS for check in each(config)]
    failed = any(check.status == "error" for check in checks)
    if options.json:
        print_json({"ok": not failed, "checks": [check._asdict() for check in checks]})
    else:
        for check in checks:
            print(f"{check.status:<8} {check.name}: {check.found}")
            if check.remedy:
                print(f"{'':<8} -> {check.remedy}")
    return int(failed)


def vllm(_: CacheConfig) -> Iterator[Check]:
    """The version that is installed, and whether it would find the connectors by name."""
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        found = "not installed in this environment, where lakecache.store alone works"
        yield Check("vLLM", "warning", found, f"install vLLM {VLLM} for the connectors")
        return
    if not re.match(rf"{re.escape(VLLM)}(\D|$)", version):
        yield Check("vLLM", "error", version, f"the connectors are made for vLLM {VLLM}")
        return
    yield Check("vLLM", "ok", version)
    allowed = os.environ.get("VLLM_PLUGINS")
    if not metadata.entry_points(group="vllm.general_plugins", name="lakecache"):
        found = "the package is not installed with its entry points"
    elif allowed is not None and "lakecache" not in allowed.split(","):
        found = f"VLLM_PLUGINS is {allowed!r}, without lakecache"
    else:
        return
    remedy = 'change that, or configure "kv_connector_module_path": "lakecache.connector"'
    yield Check("plugin", "warning", found, remedy)


def memory(config: CacheConfig) -> Iterator[Check]:
    """Whether a pool of `cpu_bytes` fits, now or ever, and whether it can be made."""
    from lakecache import _core

    ram_dir = _existing(Path(config.ram_dir))
    what = f"cpu_bytes = {shown_bytes(config.cpu_bytes)} in {config.ram_dir}"
    if not os.access(ram_dir, os.W_OK | os.X_OK):
        found = f"{ram_dir} is not writable for user {os.geteuid()}"
        yield Check("ram_dir", "error", found, "set a ram_dir that this user may write to")
    if (kind := _file_system(ram_dir)) not in IN_MEMORY:
        found = f"{ram_dir} is on {kind}, not on a tmpfs: the kernel writes the pool to disk"
        yield Check("ram_dir", "warning", found, "set a ram_dir on a tmpfs, such as /dev/shm")
    try:
        lacking = _core.pool_lacks(
            str(ram_dir), config.cache_dir, config.cpu_bytes, config.disk_capacity_bytes
        )
    except LakeCacheError as error:
        yield Check("memory", "error", _text(error))
        return
    if lacking is None:
        yield Check("memory", "ok", f"{what} fits")
        return
    remedy = "until it is there less is kept: free memory, enlarge what is short or lower cpu_bytes"
    yield Check("memory", "warning", f"{what} does not fit now: {lacking}", remedy)


def disk(config: CacheConfig) -> Iterator[Check]:
    """What the file system of `cache_dir` has and can do."""
    from lakecache import _core

    if config.cache_dir is None:
        yield Check("cache_dir", "ok", "not given: memory only")
        return
    try:
        able = _core.probe_disk(config.cache_dir)
    except LakeCacheError as error:
        remedy = "give it to the user that runs the engine (chown, chmod 700)"
        yield Check("cache_dir", "error", _text(error), remedy)
        return
    yield Check("cache_dir", "ok", f"{config.cache_dir} is writable, and this user's alone")
    yield _space(config.cache_dir, config.disk_capacity_bytes, able)
    reason = able["io_engine_reason"]
    if able["io_engine"] == "io_uring":
        yield Check("io_uring", "ok", "works")
    else:
        yield Check("io_uring", "warning", reason)
    slower = f"use a local file system (ext4, XFS, btrfs) instead of that of {config.cache_dir}"
    for name, has in (("O_DIRECT", able["direct"]), ("O_TMPFILE", able["unnamed"])):
        if has:
            yield Check(name, "ok", "works")
        else:
            yield Check(name, "warning", "missing, so reads or writes are slower", slower)


def _space(cache_dir: str, limit: int | None, able: dict[str, Any]) -> Check:
    """Compare the limit with what is free, or held by this store's files already."""
    from lakecache import _core

    namespaces = _core.contents(cache_dir)["namespaces"].values()
    rows = [row for stored in namespaces for row in (*stored["kinds"].values(), stored["damaged"])]
    held = sum(size for _, size in rows)
    room = max(0, able["free_bytes"] - able["reserve_bytes"]) + held
    found = f"{shown_bytes(room)} for objects, of which {shown_bytes(held)} are taken"
    if limit is None or limit <= room:
        return Check("disk space", "ok", found)
    remedy = f"free some, or lower disk_capacity_bytes ({shown_bytes(limit)})"
    return Check("disk space", "warning", found, remedy)


def locked_memory(config: CacheConfig) -> Iterator[Check]:
    """Whether the pool may be registered with io_uring."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY or limit >= config.cpu_bytes or _may_lock():
        yield Check("locked memory", "ok", "enough for cpu_bytes")
        return
    remedy = "ulimit -l unlimited, LimitMEMLOCK=infinity, docker --ulimit memlock=-1, or IPC_LOCK"
    found = f"the limit is {shown_bytes(limit)}, so disk reads are slower"
    yield Check("locked memory", "warning", found, remedy)


def open_files(_: CacheConfig) -> Iterator[Check]:
    """The hard limit: the soft one is raised to it."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if limit == resource.RLIM_INFINITY or limit >= OPEN_FILES:
        yield Check("open files", "ok", "enough")
        return
    remedy = f"raise the hard limit to {OPEN_FILES} (ulimit -Hn, docker --ulimit nofile)"
    yield Check("open files", "warning", f"the hard limit is {limit}", remedy)


def huge_pages(_: CacheConfig) -> Iterator[Check]:
    """Whether the kernel can back the pool with huge pages."""
    release = os.uname().release
    version = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    has = Path("/sys/kernel/mm/transparent_hugepage").exists()
    if has and version >= HUGE_PAGES_SINCE:
        yield Check("huge pages", "ok", f"kernel {release} has them for shared memory")
        return
    found = f"kernel {release} {'is too old' if has else 'has none'}, so disk reads are slower"
    yield Check("huge pages", "warning", found, "Linux 6.1 or newer has them for shared memory")


CHECKS: tuple[Callable[[CacheConfig], Iterator[Check]], ...] = (
    vllm,
    memory,
    disk,
    locked_memory,
    open_files,
    huge_pages,
)


def _existing(path: Path) -> Path:
    """The path, or what is there of it: an engine makes the rest."""
    return next(each for each in (path, *path.parents) if each.exists())


def _file_system(path: Path) -> str:
    """The type of the file system that a path is on, as the kernel names it."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == number:
            return source.split()[0]
    # Such as btrfs, whose files have other device numbers than their mount.
    return "another file system"


def _may_lock() -> bool:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) & IPC_LOCK)


def _text(error: LakeCacheError) -> str:
    """The message without the error number that an OSError puts before it."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
