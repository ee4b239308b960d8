"""Medians, intervals and quantiles of samples, and tables of them."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Sequence


def median(samples: Sequence[float]) -> float:
    """The median, or NaN of nothing."""
    return statistics.median(samples) if samples else math.nan


def interval(samples: Sequence[float], repeats: int = 10_000) -> tuple[float, float]:
    """95 % interval of the median, by a bootstrap with a fixed seed; NaN of fewer than two."""
    if len(samples) < 2:
        return math.nan, math.nan
    chance = random.Random(1)
    seen = sorted(
        statistics.median(chance.choices(samples, k=len(samples))) for _ in range(repeats)
    )
    return seen[int(0.025 * repeats)], seen[int(0.975 * repeats)]


def quantile(samples: Sequence[float], share: float) -> float:
    """A quantile by nearest rank, or NaN of nothing."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


def summary(samples: Sequence[float]) -> str:
    """Median and range."""
    if not samples:
        return "-"
    return f"{median(samples):.2f} [{min(samples):.2f}-{max(samples):.2f}]"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns of equal width, for a terminal."""
    lines = [[str(cell) for cell in line] for line in [header, *rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
