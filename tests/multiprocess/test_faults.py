"""What is wrong at the start is a clear error; what goes wrong later is a miss. Nothing hangs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("lakecache._core")

from lakecache.errors import CapacityError, ConfigError, LakeCacheError
from lakecache.store import TieredStore

pytestmark = pytest.mark.multiprocess

MIB = 1 << 20
REFUSED = 3


@pytest.fixture
def use(start):
    """What a process says that puts and reads one object under such conditions."""

    def run(settings: dict, blocked: str = "") -> dict:
        child = start("use", settings, blocked)
        try:
            said, errors = child.communicate(timeout=90)
        finally:
            child.kill()
        assert child.returncode in (0, REFUSED), said + errors
        assert "Traceback" not in errors
        assert "panicked" not in errors
        return {**json.loads(said.splitlines()[-1]), "log": errors}

    return run


@pytest.fixture
def tmpfs(tmp_path):
    """Makes one file system of so many MiB."""
    folder = tmp_path / "small"
    folder.mkdir()

    def mount(size: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}m", "lakecache-test", str(folder)]
        if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting a tmpfs needs root with CAP_SYS_ADMIN")
        return folder

    yield mount
    subprocess.run(["umount", "-l", str(folder)], stderr=subprocess.DEVNULL, check=False)


@pytest.fixture
def small_tmpfs(tmpfs):
    """A file system of 8 MiB."""
    return tmpfs(8)


def test_a_directory_that_cannot_be_written(use, settings, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    said = use({**settings, "cache_dir": str(closed / "cache")}, "override")
    assert said["error"] in ("StorageError", "ConfigError")
    assert str(closed) in said["text"]


@pytest.mark.parametrize("listed", [True, False])
def test_a_file_that_may_not_be_read_is_stored_anew(use, settings, listed):
    with TieredStore(**settings) as store:
        assert store.put(b"object 0", bytes(100_000))
        assert store.flush()
    (file,) = Path(settings["cache_dir"]).rglob("*.kv")
    file.chmod(0)
    # Files in the list are met when they are leased, others by the scan.
    shutil.rmtree(settings["ram_dir"])
    if not listed:
        (Path(settings["cache_dir"]) / "objects.snapshot").unlink()
    first, second = (use(settings, "override") for _ in range(2))
    assert first["right"] == ([] if listed else [True])
    assert first["stats"]["disk_objects_damaged"] == 1
    assert second["right"] == [True]
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_file_where_the_directory_should_be(use, settings, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    said = use({**settings, "cache_dir": str(tmp_path / "file")})
    assert str(tmp_path / "file") in said["text"]


def test_memory_that_can_never_fit_its_tmpfs(use, settings, small_tmpfs):
    said = use({**settings, "ram_dir": str(small_tmpfs / "ram")})
    assert said["error"] in ("CapacityError", "ConfigError")
    assert "cpu_bytes" in said["text"]


@pytest.mark.parametrize("left", [1, 4])
def test_a_full_tmpfs_is_a_miss(use, settings, small_tmpfs, left):
    (small_tmpfs / "other").write_bytes(bytes((8 - left) * MIB))
    said = use({**settings, "ram_dir": str(small_tmpfs / "ram"), "cpu_bytes": 6 * MIB})
    if left == 1:
        # Not even the pool's metadata fits.
        assert said["error"] == "CapacityError"
        assert str(small_tmpfs) in said["text"]
    else:
        assert (said["stored"], said["right"]) == (False, [])
        assert said["stats"]["stores_no_room"] > 0


def test_memory_that_cannot_be_had_now_is_a_warning(use, settings, tmpfs):
    folder = tmpfs(64)
    (folder / "other").write_bytes(bytes(50 * MIB))
    said = use({**settings, "cache_dir": None, "ram_dir": str(folder / "ram")})
    assert not said["stored"]
    (line,) = [line for line in said["log"].splitlines() if "could be reserved" in line]
    for part in ("only 0 of ", str(folder), " 8 are left alone", "cpu_bytes"):
        assert part in line


def test_a_tmpfs_as_small_as_docker_makes_it_is_used(use, settings, tmpfs):
    said = use({**settings, "ram_dir": str(tmpfs(64) / "ram")})
    assert said["right"] == [True]
    assert "could be reserved" not in said["log"]


def test_damage_is_said_once_for_many_files(start, settings):
    with TieredStore(**settings) as store:
        names = [b"object %d" % number for number in range(5)]
        for number, name in enumerate(names):
            assert store.put(name, bytes([number]) * 100_000)
        assert store.flush()
        store.clear_memory()
    for file in Path(settings["cache_dir"]).rglob("*.kv"):
        with file.open("r+b") as stored:
            stored.seek(8192)
            stored.write(b"changed")
    shutil.rmtree(settings["ram_dir"])
    child = start("lose", settings, 5)
    said, errors = child.communicate(timeout=90)
    assert json.loads(said) == 5
    assert errors.count("the object is dropped") == 1


def test_another_size_than_the_pool_in_use_is_a_warning(settings, caplog):
    with (
        TieredStore(**settings),
        TieredStore(**{**settings, "cpu_bytes": 48 * MIB}) as other,
    ):
        assert other.put(b"key", b"bytes")
    assert f"cpu_bytes = {48 * MIB} has no effect" in caplog.text


def test_a_full_disk_is_a_miss(use, settings, small_tmpfs):
    (small_tmpfs / "other").write_bytes(bytes(8 * MIB - 200_000))
    said = use({**settings, "cache_dir": str(small_tmpfs / "cache")})
    # It was stored in memory, which was then emptied.
    assert (said["stored"], said["right"]) == (True, [])
    assert (said["stats"]["writes"], said["stats"]["writes_no_room"]) == (0, 1)


def test_blocked_io_uring_falls_back(use, settings):
    said = use(settings, "io_uring")
    assert said["engine"] == "pread"
    assert said["reason"]
    assert said["right"] == [True]


def test_io_uring_by_name_where_it_is_blocked(use, settings):
    said = use({**settings, "io_engine": "io_uring"}, "io_uring")
    assert said["error"] == "EngineUnavailableError"
    assert "io_uring" in said["text"]


def test_no_memory_tier(use, settings):
    said = use({**settings, "cpu_bytes": 0})
    assert said["stored"]
    assert said["right"] == [True]


def test_more_memory_than_there_is(settings):
    with pytest.raises((CapacityError, ConfigError), match="cpu_bytes"):
        TieredStore(**{**settings, "cpu_bytes": 1 << 45})


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"cpu_byts": 1}, "Did you mean 'cpu_bytes'"),
        ({"cpu_bytes": "1 Gigabyte"}, "cpu_bytes"),
        ({"cpu_bytes": True}, "cpu_bytes"),
        ({"cpu_bytes": -1}, "cpu_bytes"),
        ({"disk_capacity_bytes": "8"}, "Write the unit"),
        ({"io_engine": "uring"}, "io_uring"),
        ({"checksum": "maybe"}, "checksum"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_made(settings, wrong, says):
    with pytest.raises(ConfigError, match=says) as caught:
        TieredStore(**{**settings, **wrong})
    assert isinstance(caught.value, LakeCacheError)
    assert not Path(settings["cache_dir"]).exists()
