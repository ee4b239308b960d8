"""An engine that dies of an error in the middle of a step leaves nothing wrong behind."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from vllm_engine import difference, engine, prompt

STEP_TOKENS = 256


def open_files(places: dict[str, str]) -> list[str]:
    """The files of the store that this process has open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(descriptor.readlink()))
    return [name for name in found if name.startswith(tuple(places.values()))]


@pytest.mark.parametrize("failing", [2, 4])
def test_a_step_that_fails_half_way_is_not_stored(places: dict[str, str], failing: int) -> None:
    tokens, settings = prompt(1400, 3), {"max_num_batched_tokens": STEP_TOKENS}
    with engine(None, **settings) as native:
        expected = native.generate([tokens])[0]
    extra = {**places, "cpu_bytes": "64MiB"}
    with engine(extra, **settings) as dying:
        layers = dying.core.model_executor.driver_worker.worker.model_runner.model.model.layers
        steps = 0

        def fail(*_: Any) -> None:
            nonlocal steps
            steps += 1
            if steps == failing:
                raise MemoryError("in the middle of a step")

        layers[-1].register_forward_pre_hook(fail)
        with pytest.raises(MemoryError) as failure:
            dying.generate([tokens])
        assert open_files(places)
    # The error's frames still have the engine; others must be free to use its directories.
    assert failure.traceback
    assert open_files(places) == []
    # The first one fills the gaps, the second one finds what there is.
    for _ in range(2):
        with engine(extra, **settings) as cached:
            found = cached.generate([tokens])[0]
            assert difference(expected, found) == 0
    assert found[2] == 1344
