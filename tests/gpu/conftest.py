"""One set of engines for all tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import site_engines


@pytest.fixture(scope="session")
def site() -> Iterator[site_engines.Site]:
    made = site_engines.Site()
    try:
        yield made
    finally:
        made.close()
