"""Rules of CONTRIBUTING.md that no linter knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "rust" / "core" / "src"
RUST = sorted((ROOT / "rust").rglob("*.rs"))
PYTHON = sorted(
    p
    for d in ("python", "tests", "scripts", "examples", "benches")
    for p in (ROOT / d).rglob("*.py")
)

# A layer -> the layers it may name. What is not listed is at the bottom: everyone may use it.
MAY_USE = {
    "sys": set(),
    "io": {"sys"},
    "pool": {"sys"},
    "l1": {"sys", "pool"},
    "l2": {"sys", "pool"},
    "cache": {"sys", "pool", "io", "l1", "l2"},
}


def code_of(path: Path) -> str:
    """The text without line comments."""
    return re.sub(r"//.*", "", path.read_text())


def layer_of(path: Path) -> str | None:
    parts = path.relative_to(CORE).parts
    name = parts[0].removesuffix(".rs")
    return name if name in MAY_USE else None


@pytest.mark.parametrize("path", [*RUST, *PYTHON], ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_readable(path):
    assert len(path.read_text().splitlines()) <= 600


@pytest.mark.parametrize(
    "path", [p for p in RUST if p.is_relative_to(CORE)], ids=lambda p: str(p.relative_to(CORE))
)
def test_layers_know_only_those_below(path):
    layer = layer_of(path)
    if layer is None:
        return
    used = set(re.findall(r"\bcrate::(\w+)", code_of(path))) & MAY_USE.keys()
    for group in re.findall(r"\bcrate::\{([^;]*)\}", code_of(path)):
        used |= set(re.findall(r"\b(\w+)::", group)) & MAY_USE.keys()
    assert used - MAY_USE[layer] - {layer} == set()


@pytest.mark.parametrize(
    "path", [p for p in RUST if p.is_relative_to(CORE)], ids=lambda p: str(p.relative_to(CORE))
)
def test_system_calls_are_made_in_one_place(path):
    if layer_of(path) != "sys":
        # Error numbers and types are fine; calls are not.
        assert not re.findall(r"\b(?:libc|rustix)(?:::[a-z]\w*)+\(", code_of(path))


def test_importing_the_package_imports_nothing_heavy():
    import subprocess
    import sys

    code = (
        "import sys, lakecache, lakecache.config, lakecache.errors;"
        "print([m for m in ('torch', 'vllm', 'triton', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"
