"""What the unit tests share."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def ram_folder() -> Iterator[Path]:
    """A folder of its own in shared memory."""
    with tempfile.TemporaryDirectory(prefix="lakecache-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log's records of warnings and errors."""
    # vLLM's loggers don't propagate, which caplog needs. Set in the test itself it would be too
    # late: pytest has put its handler on those loggers, too, and would have each record twice.
    logger = logging.getLogger("vllm")
    before, logger.propagate = logger.propagate, True
    yield caplog
    logger.propagate = before
