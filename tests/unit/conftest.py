"""What the tests of the store share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def ram_folder() -> Iterator[Path]:
    """A folder of its own in shared memory."""
    with tempfile.TemporaryDirectory(prefix="lakecache-test-", dir="/dev/shm") as folder:
        yield Path(folder)
