"""The configuration: defaults, sizes, and errors that say what to change."""

from __future__ import annotations

import pytest

from lakecache import errors
from lakecache.config import CacheConfig, parse_bytes
from lakecache.errors import ConfigError


def test_defaults() -> None:
    config = CacheConfig.from_extra_config({})
    assert config.cache_dir is None
    assert config.cpu_bytes == 1 << 30
    assert config.disk_capacity_bytes is None
    assert config.ram_dir == "/dev/shm/lakecache"
    assert config.chunk_size == 256
    assert config.transfer == "pinned"
    assert config.load_policy == "auto"
    assert config.checksum
    assert not config.verify_load


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("512MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("1.5 gib", 3 << 29),
        ("2097152", 2 << 20),
        (2 << 20, 2 << 20),
        (0, 0),
        ("0", 0),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_bytes("cpu_bytes", text) == size


@pytest.mark.parametrize("value", ["8 apples", "", "-1GiB", -5, True, None, [], "1e99TB", 8, "8"])
def test_bad_sizes_name_key_and_value(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes("cpu_bytes", value)
    assert "cpu_bytes" in str(caught.value)
    assert repr(value) in str(caught.value)


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'cache_dir'"):
        CacheConfig.from_extra_config({"cachedir": "/tmp/x"})
    with pytest.raises(ConfigError, match="'disk_capacity_bytes'"):
        CacheConfig.from_extra_config({"disk_bytes": 1})


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("io_engine", "iouring", "io_uring"),
        ("transfer", "fast", "pinned, sync"),
        ("durability", "fsync", "none, data"),
        ("write_policy", "write-through", "write_through"),
        ("chunk_size", 0, "from 1"),
        ("chunk_size", "256", "from 1"),
        ("verify_load", 1, '"on" or "off"'),
        ("cache_dir", "", "path of a directory"),
        ("cache_dir", "~nobody-of-this-name/x", "known user"),
        ("disk_capacity_bytes", 0, "unset for no limit"),
    ],
)
def test_bad_values(key: str, value: object, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CacheConfig.from_extra_config({key: value})
    assert key in str(caught.value)
    assert hint in str(caught.value)


def test_a_long_value_is_not_repeated_at_length() -> None:
    with pytest.raises(ConfigError) as caught:
        CacheConfig.from_extra_config({"io_engine": "x" * 5000})
    assert "'xxx" in str(caught.value)
    assert len(str(caught.value)) < 400


WRONG = [
    1, -1, 0, 1.5, float("nan"), float("inf"), True, None, "", "x", [], {}, b"x", ["a"], "1e9",
    "-5GiB", "\0", "~nobody-of-this-name", 10**30, "9" * 400 + "GiB", "1." + "9" * 400 + "GiB",
    "9" * 5000 + "GiB", "/\ud800",
]  # fmt: skip


def refusal(key: str, value: object) -> str | None:
    try:
        CacheConfig.from_extra_config({"cache_dir": "/x", "cpu_bytes": "8GiB", key: value})
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("key", CacheConfig.__struct_fields__)
def test_any_value_is_taken_or_refused_by_name(key: str) -> None:
    refused = [text for value in WRONG if (text := refusal(key, value)) is not None]
    assert len(refused) > len(WRONG) // 2
    assert all(key in text for text in refused)


def test_nothing_to_keep_anything_in() -> None:
    with pytest.raises(ConfigError, match="cache_dir"):
        CacheConfig.from_extra_config({"cpu_bytes": 0})
    with pytest.raises(ConfigError, match="disk_capacity_bytes"):
        CacheConfig.from_extra_config({"disk_capacity_bytes": "1GiB"})


def test_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.chdir(str(tmp_path))
    config = CacheConfig.from_extra_config({"cache_dir": "kv", "checksum": "off"})
    assert config.cache_dir == f"{tmp_path}/kv"
    assert not config.checksum


def test_error_classes() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.CapacityError, OSError)
    assert issubclass(errors.StorageError, OSError)
    assert issubclass(errors.DeadlineError, TimeoutError)
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.LakeCacheError)
    assert errors.StorageError(28, "no space").errno == 28
