"""Compare two recorded answers: equal tokens, log-probabilities within a tolerance.

usage: compare_outputs.py A.json B.json [--tolerance 1e-4]

A file holds either {"outputs": [{"token_ids": [...], "logprobs": [...]}, ...]}, one item per
request, where a log-probability is a number or a {token: number} table, or the answer of the
OpenAI-compatible /v1/completions with logprobs. The exit status is 0 when both agree, 1 when they
differ, 2 when a file cannot be understood.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# float32 on one machine repeats exactly; another batch shape moves the last bits.
DEFAULT_TOLERANCE = 1e-4

TokenId = int | str


class FormatError(ValueError):
    """A file does not hold recorded outputs."""


@dataclass(frozen=True)
class Output:
    """The answer to one request; a log-probability table per token."""

    tokens: tuple[TokenId, ...]
    logprobs: tuple[Mapping[str, float], ...]


def _table(entry: Any, token: TokenId) -> Mapping[str, float]:
    if isinstance(entry, (int, float)):
        return {str(token): float(entry)}
    if isinstance(entry, dict):
        return {str(name): float(value) for name, value in entry.items()}
    raise FormatError(f"a log-probability is {entry!r}")


def _output(tokens: Any, logprobs: Any) -> Output:
    if not isinstance(tokens, list) or not isinstance(logprobs, list):
        raise FormatError("an output lacks the list of tokens or of logprobs")
    if len(tokens) != len(logprobs):
        raise FormatError(f"{len(tokens)} tokens but {len(logprobs)} log-probabilities")
    pairs = zip(logprobs, tokens, strict=True)
    return Output(tuple(tokens), tuple(_table(entry, token) for entry, token in pairs))


def parse(document: Any) -> list[Output]:
    """Recorded outputs of either format."""
    if not isinstance(document, dict):
        raise FormatError("the document is not an object")
    if "choices" in document:
        answers = [choice.get("logprobs") or {} for choice in document["choices"]]
        outputs = [_output(a.get("tokens"), a.get("token_logprobs")) for a in answers]
    else:
        items = document.get("outputs")
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise FormatError('there is no list "outputs"')
        outputs = [_output(item.get("token_ids"), item.get("logprobs")) for item in items]
    # Nothing compared must not read as "all equal".
    if not outputs or not any(output.tokens for output in outputs):
        raise FormatError("there is no token to compare")
    return outputs


def _distance(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    difference = abs(a - b)
    return math.inf if math.isnan(difference) else difference


def compare(a: list[Output], b: list[Output], tolerance: float) -> tuple[list[str], float]:
    """The differences, in words, and the largest distance of two log-probabilities."""
    if len(a) != len(b):
        return [f"{len(a)} outputs against {len(b)}"], math.inf
    problems: list[str] = []
    worst = 0.0
    for number, (x, y) in enumerate(zip(a, b, strict=True)):
        if x.tokens != y.tokens:
            shared = zip(x.tokens, y.tokens, strict=False)
            place = next((i for i, (s, t) in enumerate(shared) if s != t), None)
            where = "lengths differ" if place is None else f"first at position {place}"
            problems.append(f"output {number}: tokens differ ({where})")
            continue
        for place, (p, q) in enumerate(zip(x.logprobs, y.logprobs, strict=True)):
            # The tail of a top-k table may swap among near ties; the chosen token is in both.
            chosen = str(x.tokens[place])
            names = p.keys() & q.keys()
            if not names or ((chosen in p) != (chosen in q)):
                problems.append(f"output {number}, position {place}: no common log-probability")
                continue
            far = max(_distance(p[name], q[name]) for name in names)
            worst = max(worst, far)
            if far > tolerance:
                problems.append(
                    f"output {number}, position {place}: log-probabilities {far:g} apart"
                )
    return problems, worst


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("a", type=Path, metavar="A.json")
    parser.add_argument("b", type=Path, metavar="B.json")
    parser.add_argument("--tolerance", type=float, default=DEFAULT_TOLERANCE)
    options = parser.parse_args(arguments)
    documents: list[list[Output]] = []
    for path in (options.a, options.b):
        try:
            documents.append(parse(json.loads(path.read_text())))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
    problems, worst = compare(documents[0], documents[1], options.tolerance)
    for problem in problems[:20]:
        print(problem)
    if problems:
        print(f"DIFFERENT: {len(problems)} differences (tolerance {options.tolerance:g})")
        return 1
    tokens = sum(len(output.tokens) for output in documents[0])
    print(f"equal: {tokens} tokens, log-probabilities at most {worst:g} apart", end=" ")
    print(f"(tolerance {options.tolerance:g})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
