"""These tests run the real vLLM on the CPU, each engine in the test's own process.

`LAKECACHE_FAKE_CORE=1` runs them on the stand-in of the compiled half, to tell faults of the
connector from faults of the store.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_engine import MODEL

FAKE = os.environ.get("LAKECACHE_FAKE_CORE") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def runnable(request: pytest.FixtureRequest) -> None:
    pytest.importorskip("vllm")
    if not MODEL.exists():
        pytest.skip(f"{MODEL} is missing: make prepares it")
    if FAKE:
        from fakes import core

        core.install()
        if request.node.get_closest_marker("multiprocess"):
            pytest.skip("the stand-in lives in one process")
        return
    core = pytest.importorskip("lakecache._core")
    if not hasattr(core, "Cache"):
        pytest.skip("the extension has no Cache")


@pytest.fixture
def places(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A cache directory and a shared-memory root of the test's own."""
    yield {"cache_dir": str(tmp_path / "kv"), "ram_dir": str(tmp_path / "ram")}
    if FAKE:
        from fakes import core

        core.pools.clear()
