"""Where and when something was measured, and the files under `records/`.

`python benches/_record.py NAME DIRECTORY` gathers the figures of `cargo bench` and of the benches
that wrote JSON into DIRECTORY, as one record.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORDS = Path(__file__).resolve().parent / "records"


def machine() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    processor = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    revision = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return {
        "processor": processor[0] if processor else platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "revision": revision.stdout.strip(),
        "load_average": os.getloadavg(),
    }


def write(name: str, results: Any, command: Sequence[str] | None = None) -> Path:
    """Write a record, in the place of the last one, and say where."""
    now = datetime.datetime.now(datetime.UTC)
    record = {
        "bench": name,
        "date": now.isoformat(timespec="seconds"),
        "command": shlex.join(command or ["python", *sys.orig_argv[1:]]),
        "machine": machine(),
        "results": results,
    }
    RECORDS.mkdir(exist_ok=True)
    path = RECORDS / f"{name}-cpu.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {path.relative_to(ROOT)}")
    return path


def criterion(target: Path) -> dict[str, float]:
    """Medians of the last `cargo bench`, in nanoseconds, by name of the benchmark."""
    found = {}
    for path in sorted(target.glob("criterion/**/new/estimates.json")):
        name = json.loads((path.parent / "benchmark.json").read_text())["full_id"]
        found[name] = round(json.loads(path.read_text())["median"]["point_estimate"], 1)
    return found


def pytest_benchmark(found: dict[str, Any]) -> dict[str, float]:
    """Medians of the Python benches, in nanoseconds, by name of the test."""
    return {one["name"]: round(one["stats"]["median"] * 1e9, 1) for one in found["benchmarks"]}


def main() -> None:
    name, directory = sys.argv[1], Path(sys.argv[2])
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    results: dict[str, Any] = {"criterion_median_ns": criterion(target)}
    for path in sorted(directory.glob("*.json")):
        found = json.loads(path.read_text())
        if path.stem == "python":
            results["python_median_ns"] = pytest_benchmark(found)
        else:
            results[path.stem] = found
    write(name, results, ["make", "bench"])


if __name__ == "__main__":
    main()
