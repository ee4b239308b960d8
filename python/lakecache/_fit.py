"""Costs fitted to measurements: how long something takes, as a sum over what is done."""

from __future__ import annotations

import math
from operator import ge, le, mul
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["CHANGED", "Fit", "Sample"]

# One measurement: what was done, in the units of the model, and how many seconds it took.
Sample = tuple[tuple[float, ...], float]

KEPT_PER_CLASS = 5
CLASSES = 32
# A class counts half as much after this many measurements of other classes, but never nothing.
HALF_LIFE = 8
LEAST_WEIGHT = 0.003
# A change below this is noise and not worth solving again.
NOISE = 0.05
# A class whose median moves by this factor says that the speed changed: all others age at once.
CHANGED = 1.5
CHANGE_AGES = 4 * HALF_LIFE
# So many measurements in a row that are all this much slower, or all faster, than expected.
OFF, OFF_IN_A_ROW = 3.0, 3
# A class of n measurements is sure to lie within their range, widened on both sides by the usual
# factor between neighbours to the power of MARGIN / (n - 1).
MARGIN = 6.0
RIDGE = 1e-4
SHORTEST = 1e-6
# Bytes, or tokens x context, or seconds, of any one measurement are fewer.
AMOUNT_MAX = 1e15


class Bound(NamedTuple):
    """A class whose measurements take at least `factor` times as long as the costs say, where that
    is above 1; or at most, where it is below. `done` is what its middle measurement did.
    """

    place: tuple[int, ...]
    done: tuple[float, ...]
    factor: float


class Fit:
    """Seconds as a sum of costs, each zero or more, times what was done.

    Measurements are sorted into classes by powers of two of what was done. A class keeps the last
    five and is represented by their lower median, so that a stall or a first-time compilation is
    outvoted. The costs minimise the relative error over all classes. That hardly sees a class which
    is much slower than the others say, so a lasting deviation scales what was measured before it.

    An engine's steps are no such sum where small ones replay a graph and large ones are launched
    one kernel at a time. So `near` keeps a prediction within what was measured: doing more takes no
    less time than a class was sure to take, doing less takes no more. It rises with what is done.
    """

    def __init__(self, scales: Sequence[float]) -> None:
        """Take the typical size of each quantity: a lone measurement is split in proportion."""
        self._scales = tuple(scales)
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._classes: dict[tuple[int, ...], list[Sample]] = {}
        self._middle: dict[tuple[int, ...], Sample] = {}
        self._seen_at: dict[tuple[int, ...], int] = {}
        self._age = 0
        self._fitted: dict[tuple[int, ...], float] = {}
        self._costs = (0.0,) * len(self._scales)
        self._stale = False
        self._bounds: list[Bound] | None = None
        self._off: list[tuple[Sample, float]] = []
        self.count = 0

    def add(self, done: tuple[float, ...], seconds: float) -> None:
        """Take one measurement."""
        self._keep(done, seconds)
        ratio = self._off_by(done, seconds)
        if ratio is None:
            self._off.clear()
            return
        if self._off and (ratio > 1) != (self._off[0][1] > 1):
            self._off.clear()
        self._off.append(((done, max(seconds, SHORTEST)), ratio))
        if len(self._off) == OFF_IN_A_ROW:
            ratios = sorted(ratio for _, ratio in self._off)
            self._scale([sample for sample, _ in self._off], ratios[OFF_IN_A_ROW // 2])

    def _off_by(self, done: Sequence[float], seconds: float) -> float | None:
        """Give how many times as long as expected it took, if that is no mere deviation."""
        for expected in (self._sum, self.seconds):
            ratio = seconds / (expected(done) or seconds or 1)
            if 1 / OFF < ratio < OFF:
                return None
        return ratio

    def _scale(self, recent: list[Sample], ratio: float) -> None:
        before, count = [sample for sample in self.samples() if sample not in recent], self.count
        self.clear()
        for done, seconds in before:
            self._keep(done, min(seconds * ratio, AMOUNT_MAX))
        for done, seconds in recent:
            self._keep(done, seconds)
        self.count = count

    def _keep(self, done: tuple[float, ...], seconds: float) -> None:
        self.count += 1
        self._bounds = None
        place = _place(done)
        samples = self._classes.pop(place, [])
        samples.append((done, max(seconds, SHORTEST)))
        del samples[:-KEPT_PER_CLASS]
        # Popped and put back: the class seen least recently comes first.
        self._classes[place] = samples
        if len(self._classes) > CLASSES:
            oldest = next(iter(self._classes))
            del self._classes[oldest], self._middle[oldest], self._seen_at[oldest]
            self._fitted.pop(oldest, None)
        ranked = sorted(samples, key=self._excess)
        middle, before = ranked[(len(ranked) - 1) // 2], self._middle.get(place)
        excess = self._excess(middle)
        self._age += 1
        if before is not None:
            jump = excess / self._excess(before)
            if not 1 / CHANGED < jump < CHANGED:
                # The speed itself has changed, so that what was measured before counts for little.
                self._age += CHANGE_AGES
        self._middle[place], self._seen_at[place] = middle, self._age
        known = self._fitted.get(place)
        self._stale |= known is None or abs(excess - known) > NOISE * known

    def _excess(self, sample: Sample) -> float:
        expected = self._sum(sample[0])
        return sample[1] / expected if expected > 0 else sample[1]

    def _sum(self, done: Iterable[float]) -> float:
        return sum(map(mul, self._costs, done))

    def costs(self) -> tuple[float, ...]:
        """Give the seconds per unit of each quantity; all zero before the first measurement."""
        if self._stale:
            self._solve()
        return self._costs

    def seconds(self, done: Sequence[float]) -> float:
        """Predict."""
        if self._stale:
            self._solve()
        return self._sum(done)

    def prepare(self) -> list[Bound]:
        """Solve for the costs and find the bounds, if what was measured since changes them."""
        if self._stale:
            self._solve()
        if self._bounds is None:
            self._bounds = self._find_bounds()
        return self._bounds

    def near(self, done: Sequence[float]) -> float:
        """Predict, within the bounds of the classes that did less and of those that did more."""
        bounds = self.prepare()
        expected = self._sum(done)
        if not bounds:
            return expected
        mine, least, most = _place(done), 0.0, math.inf
        for place, middle, factor in bounds:
            if factor > 1 and all(map(ge, mine, place)):
                least = max(least, factor * self._sum(map(min, done, middle)))
            elif factor < 1 and all(map(le, mine, place)):
                most = min(most, factor * self._sum(map(max, done, middle)))
        return max(least, min(expected, most))

    def _find_bounds(self) -> list[Bound]:
        """Give the classes that lie on one side of the costs by more than measurements vary.

        How much they vary is the median over all classes, so that a compilation hides nothing. A
        class that was not seen for long, or not since the speed changed, says nothing.
        """
        ranges = {
            place: sorted(map(self._excess, samples))
            for place, samples in self._classes.items()
            if len(samples) > 1
        }
        if not ranges:
            return []
        factors = sorted((one[-1] / one[0]) ** (1 / (len(one) - 1)) for one in ranges.values())
        usual, found = factors[(len(factors) - 1) // 2], []
        for place, excesses in ranges.items():
            if self._age - self._seen_at[place] > CHANGE_AGES:
                continue
            margin = usual ** (MARGIN / (len(excesses) - 1))
            least, most = excesses[0] / margin, excesses[-1] * margin
            if least > 1 or most < 1:
                found.append(Bound(place, self._middle[place][0], least if least > 1 else most))
        return found

    def _solve(self) -> None:
        size = len(self._scales)
        weights = [
            max(0.5 ** ((self._age - self._seen_at[place]) / HALF_LIFE), LEAST_WEIGHT)
            for place in self._middle
        ]
        columns = [
            [done[i] / (scale * seconds) for done, seconds in self._middle.values()]
            for i, scale in enumerate(self._scales)
        ]
        weighted = [list(map(mul, weights, column)) for column in columns]
        normal = [[sum(map(mul, one, other)) for other in columns] for one in weighted]
        right = [sum(column) for column in weighted]
        ridge = RIDGE * max(normal[i][i] for i in range(size))
        for i in range(size):
            normal[i][i] += ridge
        active = list(range(size))
        while True:
            found = _solve_linear(
                [[normal[i][j] for j in active] for i in active], [right[i] for i in active]
            )
            worst = min(range(len(active)), key=found.__getitem__)
            if found[worst] >= 0:
                break
            del active[worst]
        costs = [0.0] * size
        for i, cost in zip(active, found, strict=True):
            costs[i] = cost / self._scales[i]
        self._costs = tuple(costs)
        self._stale = False
        self._bounds = None
        self._fitted = {place: self._excess(middle) for place, middle in self._middle.items()}

    def samples(self) -> list[Sample]:
        """Give the measurements that are kept, the class seen last at the end."""
        return [sample for samples in self._classes.values() for sample in samples]

    def restore(self, samples: Sequence[Sample]) -> None:
        """Take measurements that were kept before; raises ValueError if they are none."""
        for done, seconds in samples:
            amounts = (*done, seconds)
            if len(done) != len(self._scales) or not all(map(math.isfinite, amounts)):
                raise ValueError(f"not a measurement: {done}, {seconds}")
            if done[0] != 1 or min(amounts) < 0 or max(amounts) > AMOUNT_MAX:
                raise ValueError(f"an impossible measurement: {done}, {seconds}")
        for done, seconds in samples:
            self.add(tuple(done), seconds)


def _place(done: Sequence[float]) -> tuple[int, ...]:
    """Name the class of a measurement."""
    return tuple(int(amount).bit_length() for amount in done)


def _solve_linear(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small symmetric positive definite system by elimination."""
    size = len(right)
    for i in range(size):
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            if factor:
                right[j] -= factor * right[i]
                for k in range(i, size):
                    matrix[j][k] -= factor * matrix[i][k]
    found = [0.0] * size
    for i in reversed(range(size)):
        rest = math.fsum(matrix[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (right[i] - rest) / matrix[i][i]
    return found
