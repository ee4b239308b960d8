"""`lakecache clear` beside processes that live, and after one that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lakecache._core")

from lakecache.store import TieredStore

pytestmark = pytest.mark.multiprocess


def clear(settings: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    place = ["--cache-dir", settings["cache_dir"], "--ram-dir", settings["ram_dir"]]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "python")}
    return subprocess.run(
        [sys.executable, "-m", "lakecache", "clear", *place, "--yes"],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_refuses_while_a_member_lives_and_works_after_it_was_killed(start, settings, ram):
    child = start("fill", settings, 0)
    assert child.stdout.readline() == "filling\n", child.stderr.read()
    refused = clear(settings)
    assert refused.returncode == 1
    assert f"in use by process {child.pid}" in refused.stderr
    assert list(ram.rglob("pool"))
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=30)
    done = clear(settings)
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(ram.rglob("pool"))
    assert not list(Path(settings["cache_dir"]).rglob("*.kv"))
    with TieredStore(**settings) as store:
        assert store.put(b"new", b"x" * 1000, timeout=30)


def test_refuses_beside_a_pool_that_nobody_sees(settings):
    with TieredStore(**settings, shared=False) as store:
        assert store.put(b"new", b"x" * 1000, timeout=30)
        refused = clear(settings)
        assert refused.returncode == 1
        assert "in use" in refused.stderr
    assert clear(settings).returncode == 0
