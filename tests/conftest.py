"""What every test can rely on: GPU tests are skipped where there is no GPU, and say so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_environment import ENVIRONMENT

ROOT = Path(__file__).resolve().parent.parent

# Before any test module imports torch or vLLM.
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)


def gpu_problem() -> str | None:
    """Why GPU tests cannot run here; None where they can."""
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        return "no NVIDIA device on this machine"
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (problem := gpu_problem()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=problem))


@pytest.fixture(scope="session")
def models() -> Path:
    """The folder of model folders (`make models`)."""
    return Path(os.environ.get("LAKECACHE_MODELS", ROOT / ".models"))


@pytest.fixture(scope="session")
def tiny_model(models: Path) -> Path:
    """The random qwen3 model; `make test` makes it."""
    folder = models / "qwen3-tiny"
    if not (folder / "config.json").exists():
        pytest.skip("no .models/qwen3-tiny: run `make models`")
    return folder
