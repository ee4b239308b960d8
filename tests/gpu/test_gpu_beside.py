"""Beside vLLM's OffloadingConnector in `MultiConnector`, on a GPU: whichever of the two comes first
loads, both store, and what is restored answers as what the GPU still held.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from site_engines import DEVICE, ROOT, Site

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multiprocess,
    pytest.mark.timeout(540),
    pytest.mark.skipif(DEVICE != "cuda", reason="OffloadingConnector needs a GPU"),
]
CHUNKS = [8, 3]
CHUNK = 256


def run(site: Site, first: str) -> dict[str, Any]:
    """Run `beside.py` in a process of its own."""
    folder = site.place.scratch / f"beside-{first}"
    folder.mkdir()
    script = Path(__file__).with_name("beside.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(
        [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    )}  # fmt: skip
    try:
        done = subprocess.run(
            [sys.executable, str(script), str(site.checkpoint("qwen3")), str(folder), first],
            env=environment, capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
    finally:
        shutil.rmtree(f"/dev/shm/{folder.name}", ignore_errors=True)
    assert done.returncode == 0, done.stderr[-4000:]
    # Libraries write to it, too.
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"cached"')]
    assert len(lines) == 1, done.stdout[-4000:]
    return json.loads(lines[0])


@pytest.mark.parametrize("first", ["lakecache", "offloading"])
def test_the_first_that_has_a_prompt_loads_it(site: Site, first: str) -> None:
    seen = run(site, first)
    assert seen["declined"] is None
    cold, _, restored = seen["cached"]
    counts = seen["counts"]
    assert cold == [0, 0]
    assert counts["stores"] == sum(CHUNKS)
    assert counts["loads"] == (len(CHUNKS) if first == "lakecache" else 0)
    assert counts["loads_failed"] == counts["stores_failed"] == counts["errors"] == 0
    assert all(cached >= chunks * CHUNK for cached, chunks in zip(restored, CHUNKS, strict=True))
    assert max(seen["differences"]) < 0.05
