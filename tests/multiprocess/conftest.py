"""Folders of a test's own, and child processes that use them (`children.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Start:
    """Start a child: what it does, its store's settings, and more arguments."""

    def run(what: str, settings: dict[str, Any], *rest: object) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "python")}
        command = [sys.executable, str(HERE / "children.py"), what, json.dumps(settings)]
        return subprocess.Popen(
            [*command, *(str(item) for item in rest)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    return run


@pytest.fixture
def ram() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lakecache-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def settings(tmp_path: Path, ram: Path) -> dict[str, Any]:
    return {"cache_dir": str(tmp_path / "cache"), "ram_dir": str(ram), "cpu_bytes": 32 << 20}
