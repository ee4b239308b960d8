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
        return json.loads(said.splitlines()[-1])

    return run


@pytest.fixture
def small_tmpfs(tmp_path):
    """A file system of 8 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "lakecache-test", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root with CAP_SYS_ADMIN")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


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
