"""The configuration: every key of `kv_connector_extra_config`, checked before anything starts.

Each error names the key, the value, the limit and the remedy. Values come from JSON, so sizes are
integers or texts like "8GiB", and an unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from lakecache.errors import ConfigError

__all__ = ["CacheConfig", "parse_bytes", "shown_bytes"]

IoEngine = Literal["auto", "io_uring", "pread"]
Transfer = Literal["pinned", "sync"]
LoadPolicy = Literal["auto", "always"]
Durability = Literal["none", "data"]
WritePolicy = Literal["write_through", "on_evict", "second_use"]

DEFAULT_RAM_DIR = "/dev/shm/lakecache"
GIB = 1 << 30
# A bare "8" is far more often meant as 8 GiB than as 8 bytes.
SMALLEST_SIZE_BYTES = 1 << 20
LARGEST_SIZE_BYTES = 1 << 56
# Characters of a wrong value in an error.
LONGEST_SHOWN = 100

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
# With no more digits than Python turns into a number.
_SIZE = re.compile(r"(\d{1,4000}(?:\.\d+)?)\s*([a-z]*)")


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine's LakeCache settings. `from_extra_config` is the only constructor to use."""

    cache_dir: str | None = None
    cpu_bytes: int = GIB
    disk_capacity_bytes: int | None = None
    ram_dir: str = DEFAULT_RAM_DIR
    chunk_size: int = 256
    checkpoint_tokens: int | None = None
    transfer: Transfer = "pinned"
    verify_load: bool = False
    load_policy: LoadPolicy = "auto"
    io_engine: IoEngine = "auto"
    checksum: bool = True
    durability: Durability = "none"
    write_policy: WritePolicy = "write_through"
    save_decode: bool = False

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any] | None) -> CacheConfig:
        """Check a mapping as vLLM hands it over and return the settings, or raise ConfigError."""
        extra = dict(extra or {})
        for key in extra:
            if key not in cls.__struct_fields__:
                raise ConfigError(_unknown_key(str(key), cls.__struct_fields__))
        checked = {key: _CHECKS[key](key, value) for key, value in extra.items()}
        config = cls(**checked)
        if config.cache_dir is None and config.cpu_bytes == 0:
            raise ConfigError(
                "cpu_bytes is 0 and cache_dir is not set, so nothing could be kept anywhere. "
                'Set cache_dir to a directory, or cpu_bytes to a size such as "8GiB".'
            )
        if config.cache_dir is None and config.disk_capacity_bytes is not None:
            raise ConfigError(
                f"disk_capacity_bytes is {config.disk_capacity_bytes} but cache_dir is not set. "
                "Set cache_dir to the directory to keep objects in, or remove disk_capacity_bytes."
            )
        return config

    def tiers(self, *, disk: bool) -> str:
        """Say where objects are kept, for people; without `disk` that tier is out of use."""
        parts = []
        if self.cpu_bytes:
            parts.append(f"{shown_bytes(self.cpu_bytes)} of memory in {self.ram_dir}")
        if self.cache_dir is not None and disk:
            limit = self.disk_capacity_bytes
            most = "the disk" if limit is None else f"at most {shown_bytes(limit)} of disk"
            parts.append(f"{most} in {self.cache_dir}")
        return " and ".join(parts)


def shown_bytes(size: int) -> str:
    """Write a size for people, with four digits at most."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        count = size / _UNITS[unit.lower()]
        if count >= 1:
            return f"{count:.4g} {unit}"
    return f"{size} bytes"


def parse_bytes(key: str, value: object) -> int:
    """Read a size: an integer of bytes, or a text such as "8GiB", "512MiB" or "1.5GB"."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigError(_wrong(key, value, 'a size in bytes or a text such as "8GiB"'))
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip().lower())
        if match is None or match[2] not in _UNITS:
            raise ConfigError(
                _wrong(
                    key,
                    value,
                    'a size such as "8GiB", "512MiB" or "1.5GB" (units: B, KiB, '
                    "MiB, GiB, TiB, KB, MB, GB, TB)",
                )
            )
        size = (
            float(match[1]) * _UNITS[match[2]]
            if "." in match[1]
            else (int(match[1]) * _UNITS[match[2]])
        )
    else:
        size = value
    if isinstance(size, float) and not math.isfinite(size):
        raise ConfigError(_wrong(key, value, "a finite size"))
    size = int(size)
    if size < 0 or size > LARGEST_SIZE_BYTES:
        raise ConfigError(_wrong(key, value, f"a size from 0 to {LARGEST_SIZE_BYTES} bytes"))
    if 0 < size < SMALLEST_SIZE_BYTES:
        raise ConfigError(
            f"{key} is {value!r}, which is {size} bytes; the smallest useful size is "
            f'{SMALLEST_SIZE_BYTES} bytes. Write the unit, for example "8GiB".'
        )
    return size


def _unknown_key(key: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return (
        f"{key!r} is not a key of kv_connector_extra_config. Did you mean {near[0]!r}? "
        f"Known keys: {', '.join(known)}."
    )


def _wrong(key: str, value: object, wanted: str) -> str:
    shown = repr(value)
    if len(shown) > LONGEST_SHOWN:
        shown = f"{shown[:LONGEST_SHOWN]}..."
    return f"{key} is {shown}; it must be {wanted}. Change {key} in kv_connector_extra_config."


def _directory(key: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(_wrong(key, value, "the path of a directory"))
    if "\0" in value:
        raise ConfigError(_wrong(key, value, "a path without a NUL character"))
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        raise ConfigError(_wrong(key, value, "a path in Unicode")) from None
    # Absolute now: engine, scheduler and workers may run in different working directories.
    try:
        return str(Path(value).expanduser().absolute())
    except RuntimeError:
        raise ConfigError(_wrong(key, value, "a path whose ~ stands for a known user")) from None


def _optional_directory(key: str, value: object) -> str | None:
    return None if value is None else _directory(key, value)


def _optional_bytes(key: str, value: object) -> int | None:
    if value is None:
        return None
    size = parse_bytes(key, value)
    if size == 0:
        raise ConfigError(
            _wrong(
                key,
                value,
                "unset for no limit, or a size of at least "
                f"{SMALLEST_SIZE_BYTES} bytes; for no disk at all leave cache_dir unset",
            )
        )
    return size


def _tokens(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 20:
        raise ConfigError(_wrong(key, value, f"a number of tokens from 1 to {1 << 20}"))
    return value


def _optional_tokens(key: str, value: object) -> int | None:
    return None if value is None else _tokens(key, value)


def _switch(key: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in {"on", "off", "true", "false"}:
        return value.lower() in {"on", "true"}
    raise ConfigError(_wrong(key, value, '"on" or "off"'))


def _one_of(choices: object) -> Any:
    names = get_args(choices)

    def check(key: str, value: object) -> str:
        if value not in names:
            near = difflib.get_close_matches(str(value), names, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(_wrong(key, value, "one of " + ", ".join(names)) + hint)
        return str(value)

    return check


_CHECKS: dict[str, Any] = {
    "cache_dir": _optional_directory,
    "cpu_bytes": parse_bytes,
    "disk_capacity_bytes": _optional_bytes,
    "ram_dir": _directory,
    "chunk_size": _tokens,
    "checkpoint_tokens": _optional_tokens,
    "transfer": _one_of(Transfer),
    "verify_load": _switch,
    "load_policy": _one_of(LoadPolicy),
    "io_engine": _one_of(IoEngine),
    "checksum": _switch,
    "durability": _one_of(Durability),
    "write_policy": _one_of(WritePolicy),
    "save_decode": _switch,
}
