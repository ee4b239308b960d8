"""An engine that is killed at any moment while it stores: the next one starts, and is right.

LAKECACHE_KILLS sets how often (5 here and in CI, more by hand).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_engine import ROOT

KILLS = int(os.environ.get("LAKECACHE_KILLS", "5"))
CPU_BYTES = 32 << 20
DISK_BYTES = 24 << 20
SEEDS = 400

VICTIM = """
import json, sys
from vllm_engine import engine, prompt
extra, first = json.loads(sys.argv[1]), int(sys.argv[2])
with engine(extra) as cached:
    print("STORING", flush=True)
    seed = first
    while True:
        # No settling in between: stores and writes are under way at every moment.
        cached.llm.generate(
            [{"prompt_token_ids": prompt(300, seed + i)} for i in range(4)], use_tqdm=False
        )
        seed += 4
"""

SURVIVOR = """
import json, sys
from vllm_engine import difference, engine, prompt
extra, seeds = json.loads(sys.argv[1]), json.loads(sys.argv[2])
prompts = [prompt(300, seed) for seed in seeds]
with engine(None) as native:
    expected = [native.generate([p])[0] for p in prompts]
with engine(extra) as cached:
    found = [cached.generate([p])[0] for p in prompts]
    cached.forget_gpu()
    again = [cached.generate([p])[0] for p in prompts]
    worst = max(difference(*pair) for pair in zip(expected + expected, found + again))
    hits = [sum(1 for answer in answers if answer[2] > 0) for answers in (found, again)]
    print("RESULT" + json.dumps([worst, hits, cached.connector.errors]))
"""


def start(script: str, extra: dict[str, object], argument: str) -> subprocess.Popen[str]:
    path = [str(ROOT / "python"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-c", script, json.dumps(extra), argument],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        stdout=subprocess.PIPE,
        text=True,
    )


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def check_limits(places: dict[str, str]) -> None:
    objects = [path for path in files(Path(places["cache_dir"])) if path.suffix == ".kv"]
    assert sum(path.stat().st_size for path in objects) <= DISK_BYTES
    pools = [path for path in files(Path(places["ram_dir"])) if path.name == "pool"]
    assert len(pools) == 1
    assert sum(path.stat().st_size for path in pools) <= CPU_BYTES


@pytest.mark.multiprocess
@pytest.mark.timeout(120 + 60 * KILLS)
def test_killed_while_storing(places: dict[str, str]) -> None:
    Path(places["ram_dir"]).mkdir(parents=True)
    extra = {**places, "cpu_bytes": CPU_BYTES, "disk_capacity_bytes": DISK_BYTES}
    moments = random.Random(7)
    for round_number in range(KILLS):
        victim = start(VICTIM, extra, str(round_number * 16 % SEEDS))
        try:
            assert victim.stdout is not None
            assert any("STORING" in line for line in victim.stdout), "the next start works"
            time.sleep(moments.uniform(0.05, 1.5))
        finally:
            victim.kill()
            victim.communicate(timeout=60)
        check_limits(places)
    seeds = [round_number * 16 % SEEDS + i for round_number in range(min(KILLS, 5)) for i in (0, 1)]
    survivor = start(SURVIVOR, extra, json.dumps(seeds))
    try:
        out, _ = survivor.communicate(timeout=200)
    finally:
        survivor.kill()
    line = next(line for line in out.splitlines() if line.startswith("RESULT"))
    worst, (at_start, again), errors = json.loads(line.removeprefix("RESULT"))
    assert worst <= 1e-3, "a prompt restored after the kills is answered as if computed"
    assert at_start > 0, "what was stored before a kill is found after it"
    assert again == len(seeds)
    assert errors == 0
    check_limits(places)
    assert not [path for path in files(Path(places["cache_dir"])) if path.name.endswith(".tmp")]
