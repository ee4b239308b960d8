"""What the engine core did for a request, from the stages that `--stages` records with a sample.

A stage is (what, tokens of the step or None, begin, end), in ms since the request was sent.
"""

from __future__ import annotations

from typing import Any


def planned_ms(sample: dict[str, Any]) -> float | None:
    """How long the engine core had the request before it planned the first step that computes."""
    stages = sample.get("stages", ())
    came = [begin for what, _, begin, _ in stages if what == "add_request"]
    planned = [begin for what, tokens, begin, _ in stages if what == "schedule" and tokens]
    return planned[0] - came[0] if came and planned else None


def launching_ms(sample: dict[str, Any]) -> float:
    """How long the engine launched steps that compute: most of the noise of a busy host."""
    return sum(
        end - begin
        for what, tokens, begin, end in sample.get("stages", ())
        if what == "execute_model" and tokens
    )
