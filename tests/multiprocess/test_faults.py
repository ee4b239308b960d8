"""What is wrong at the start is a clear error; what goes wrong later is a miss. Nothing hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("lakecache._core")

from lakecache.errors import CapacityError, ConfigError, LakeCacheError
from lakecache.store import TieredStore

pytestmark = pytest.mark.multiprocess

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
REFUSED = 3


def use(settings: dict, blocked: str = "") -> dict:
    """What a process says that puts and reads one object under such conditions."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "python")}
    done = subprocess.run(
        [sys.executable, str(HERE / "children.py"), "use", json.dumps(settings), blocked],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode in (0, REFUSED), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "panicked" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def ram():
    with tempfile.TemporaryDirectory(prefix="lakecache-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def settings(tmp_path, ram):
    return {
        "cache_dir": str(tmp_path / "cache"),
        "ram_dir": str(ram),
        "cpu_bytes": 32 * MIB,
    }


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


def test_a_directory_that_cannot_be_written(settings, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    said = use({**settings, "cache_dir": str(closed / "cache")}, "override")
    assert said["error"] in ("StorageError", "ConfigError")
    assert str(closed) in said["text"]


def test_a_file_where_the_directory_should_be(settings, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    said = use({**settings, "cache_dir": str(tmp_path / "file")})
    assert str(tmp_path / "file") in said["text"]


def test_memory_that_can_never_fit_its_tmpfs(settings, small_tmpfs):
    said = use({**settings, "ram_dir": str(small_tmpfs / "ram")})
    assert said["error"] in ("CapacityError", "ConfigError")
    assert "cpu_bytes" in said["text"]


def test_a_full_tmpfs_is_a_miss(settings, small_tmpfs):
    (small_tmpfs / "other").write_bytes(bytes(7 * MIB))
    said = use({**settings, "ram_dir": str(small_tmpfs / "ram"), "cpu_bytes": 6 * MIB})
    assert "error" in said or not said["stored"] or all(said["right"])


def test_a_full_disk_is_a_miss(settings, small_tmpfs):
    (small_tmpfs / "other").write_bytes(bytes(7 * MIB))
    said = use({**settings, "cache_dir": str(small_tmpfs / "cache")})
    assert "error" in said or all(said["right"])


def test_blocked_io_uring_falls_back(settings):
    said = use(settings, "io_uring")
    assert said["engine"] == "pread"
    assert said["reason"]
    assert said["right"] == [True]


def test_io_uring_by_name_where_it_is_blocked(settings):
    said = use({**settings, "io_engine": "io_uring"}, "io_uring")
    assert said["error"] == "EngineUnavailableError"
    assert "io_uring" in said["text"]


def test_no_memory_tier(settings):
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
