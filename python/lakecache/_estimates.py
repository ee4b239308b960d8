"""What loading and computing cost, learnt from durations that were measured anyway."""

from __future__ import annotations

import logging
import math
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from operator import add, ge, le, mul
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Fit", "PrefillModel", "StepClock", "TierModel", "probe_disk"]

log = logging.getLogger("vllm.lakecache")

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

# A tier whose loads were measured less often than this is not known: the first ones compile.
LOADS_TO_KNOW = 3
PROBE_LATENCY_SECONDS = 0.003
PROBE_FILES = 16
PROBE_BYTES = 64 << 20
PROBE_READ = 2 << 20
PROBE_SECONDS = 0.5
PROBE_THREADS = 4

STEPS_IN_FLIGHT = 16
# The step behind a load that was reported early is planned sooner than this, or never.
LOADED_SECONDS = 1.0
# So many steps that overlap are measured together; in a longer run of them, beginnings and ends
# count for little.
STEPS_TOGETHER = 8


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


class PrefillModel:
    """The engine's time to compute tokens of a prompt: per step, per token, per token x context."""

    def __init__(self, step_tokens: int) -> None:
        """Take the most tokens of one prompt that the engine computes in one step."""
        self.step_tokens = step_tokens
        # Steps, tokens, tokens x context, and decoding requests that shared the step.
        self.fit = Fit((1, 1 << 10, 1 << 24, 16))

    def seconds(self, begin: int, end: int, stops: Iterable[int] = ()) -> float | None:
        """Predict the time to compute tokens [begin, end) on an idle engine; None if unknown.

        `stops` are positions where the engine ends a step even if it could compute more in it.
        """
        if not self.fit.count:
            return None
        full = (end - begin) // self.step_tokens
        middle = begin + full * self.step_tokens
        seconds = 0.0
        if full:
            # Full steps differ in their context alone: as many of the average one.
            pairs = (middle * middle - begin * begin) / 2
            seconds = self.steps_seconds((full, middle - begin, pairs, 0))
        if middle < end:
            pairs = (end * end - middle * middle) / 2
            steps = 1 + sum(middle < stop < end for stop in stops)
            seconds += self.steps_seconds((steps, end - middle, pairs, 0))
        return seconds

    def steps_seconds(self, done: Sequence[float]) -> float:
        """Predict the steps that do this together: as many of the average one."""
        steps = done[0]
        return steps * self.fit.near([amount / steps for amount in done])

    def measured(self, done: Sequence[float], seconds: float) -> None:
        """Take in how long the steps that did this took together: each counts as the average."""
        steps = done[0]
        self.fit.add(tuple(amount / steps for amount in done), seconds / steps)


class TierModel:
    """The time from the start of a load to its end: a latency, and bytes over a bandwidth.

    The costs alone predict: what else is under way counts by its bytes, and a class's bounds know
    nothing of that.
    """

    def __init__(self, balance: int) -> None:
        """Begin with nothing known. What loads of one size took is split evenly between latency and
        bandwidth if that size is `balance` bytes, and goes the more to the latter the larger it is.
        """
        self.fit = Fit((1, balance))
        # Bytes of loads under way: a new load waits for them.
        self.under_way = 0
        self.measured_at = -math.inf
        # Whether a load was taken against the prediction.
        self.retried = False
        # Bytes per second that a timed read gave.
        self.probed: float | None = None

    def measured(self, num_bytes: float, seconds: float, now: float) -> None:
        """Take a finished load; the bytes that were under way at its start count as its own."""
        done = (1, num_bytes)
        if self.retried and self.fit.seconds(done) > CHANGED * seconds:
            # What was measured before would be outvoted too late: nothing is that fast by chance.
            self.fit.clear()
        self.retried = False
        self.fit.add(done, seconds)
        self.measured_at = now

    def costs(self) -> tuple[float, float] | None:
        """Give (latency in seconds, seconds per byte), or None while they are unknown."""
        if self.fit.count >= LOADS_TO_KNOW:
            latency, per_byte = self.fit.costs()
            return latency, per_byte
        if self.probed is not None:
            return PROBE_LATENCY_SECONDS, 1 / self.probed
        return None


class OpenStep(NamedTuple):
    """Steps that are measured together and have not come back: the number of the last, when the
    first was planned, behind which step under way (0: none), bytes to load, what they compute
    together (beginning with how many they are), and whether something else takes time in them, too.
    """

    number: int
    begin: float
    after: int
    loading: int
    done: tuple[float, ...]
    foreign: bool

    def and_then(self, begin: float, other: OpenStep) -> OpenStep:
        """Give both as one that has begun at a known time."""
        return OpenStep(
            other.number, begin, self.after, self.loading + other.loading,
            tuple(map(add, self.done, other.done)), self.foreign or other.foreign,
        )  # fmt: skip


class StepClock:
    """How long the engine's steps with prefill take, from when they are planned and come back.

    Every planned step comes back once, in order. With asynchronous scheduling the next one is
    planned while one runs, so a step begins when it is planned or when the one before it that
    computes something ends. And it may be long over when it comes back, as the engine's thread
    launches the next one first, which can take as long as the step itself. So steps with prefill
    that overlap are measured together.
    """

    def __init__(self, prefill: PrefillModel, step_loads: TierModel) -> None:
        """Feed these models."""
        self._prefill = prefill
        self._step_loads = step_loads
        self._planned = 0
        self._ended = 0
        # The last step that computes anything.
        self._computing = 0
        self._open: list[OpenStep] = []
        # When the step ended that the first open one comes after.
        self._last_end = 0.0
        # Bytes to load within the step that is planned next, and since when if not since then.
        self.loading = 0
        self.loading_since = math.inf
        self.errors = 0

    def planned(self, output: Any) -> None:
        """Note a step, `output` being vLLM's SchedulerOutput. Pure decode costs two lookups."""
        self._planned += 1
        tokens = output.total_num_scheduled_tokens
        if tokens > len(output.num_scheduled_tokens) or (self.loading and tokens):
            try:
                self._plan(output)
            except Exception:
                # The step's loads and stores must not be lost to a measurement.
                self.errors += 1
                if self.errors == 1:
                    log.exception("LakeCache could not measure a step; further ones are counted")
        if tokens:
            self._computing = self._planned

    def _plan(self, output: Any) -> None:
        now = time.monotonic()
        begin = min(now, self.loading_since)
        loading, self.loading, self.loading_since = self.loading, 0, math.inf
        if now - begin > LOADED_SECONDS:
            # The request that was loaded for has ended before its step.
            begin, loading = now, 0
        if self._planned - self._ended > STEPS_IN_FLIGHT:
            # Some step never came back: begin anew.
            self._ended = self._planned - 1
            self._open.clear()
        scheduled, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        cached = output.scheduled_cached_reqs
        tokens = pairs = requests = 0
        for request, context in (
            *((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs),
            *zip(cached.req_ids, cached.num_computed_tokens, strict=True),
        ):
            count = scheduled[request]
            if count - len(drafts.get(request, ())) > 1:
                requests += 1
                tokens += count
                pairs += count * (2 * context + count)
        if not tokens and not loading:
            return
        done = 1, tokens, pairs / 2, len(scheduled) - requests
        # Encoders, and loads that were not announced, take time that says nothing about tokens.
        foreign = output.scheduled_encoder_inputs or (output.has_sync_kv_loads and not loading)
        self._open.append(
            OpenStep(
                self._planned, begin, self._computing if self._computing > self._ended else 0,
                loading, done, bool(foreign),
            )
        )  # fmt: skip

    def ended(self) -> float | None:
        """Note that the oldest step is over; give the time if it was one with prefill."""
        self._ended += 1
        if not self._open:
            return None
        now = time.monotonic()
        step = self._open[0]
        if step.number > self._ended:
            if step.after == self._ended:
                self._last_end = now
            return None
        del self._open[0]
        begin = max(step.begin, self._last_end)
        following = next(iter(self._open), None)
        if following and following.after == step.number and step.done[0] < STEPS_TOGETHER:
            self._open[0] = step.and_then(begin, following)
            return now
        # One launch lies between two results that are taken in while steps overlap. Behind others,
        # the last one before a pause would seem to take no time.
        whole = not step.after or self._computing > step.number
        if not step.foreign and step.number == self._ended and whole:
            self._measured(step, now - begin)
        self._last_end = now
        return now

    def remaining(self) -> float:
        """Predict how long the steps with prefill that are under way will still take."""
        end = self._last_end
        for step in self._open:
            if not step.foreign:
                end = max(end, step.begin) + self._prefill.steps_seconds(step.done)
        return max(end - time.monotonic(), 0.0) if self._open else 0.0

    def _measured(self, step: OpenStep, seconds: float) -> None:
        if not step.loading:
            self._prefill.measured(step.done, seconds)
        elif self._prefill.fit.count:
            rest = seconds - self._prefill.steps_seconds(step.done)
            least = seconds / step.done[0] / 8
            self._step_loads.measured(step.loading, max(rest, least), time.monotonic())


def probe_disk(directory: Path) -> float | None:
    """Time reads of stored objects past the page cache: bytes per second, None without any.

    It reads at most 64 MiB, for about half a second, and raises nothing but OSError.
    """
    files = list(islice(_objects(directory), PROBE_FILES))
    if not files:
        return None
    begin = time.monotonic()
    share = PROBE_BYTES // len(files)
    with ThreadPoolExecutor(PROBE_THREADS, thread_name_prefix="lakecache-probe") as pool:
        total = sum(pool.map(lambda file: _read(file, share, begin + PROBE_SECONDS), files))
    return total / max(time.monotonic() - begin, 1e-9) if total else None


def _objects(directory: Path) -> Iterator[Path]:
    for namespace in directory.iterdir():
        if namespace.is_dir():
            yield from namespace.glob("*/*.kv")


def _read(file: Path, share: int, deadline: float) -> int:
    """Read up to `share` bytes of a file until the deadline; objects may vanish at any time."""
    total = 0
    try:
        try:
            opened = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            opened = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            # Anonymous pages are aligned as direct reads want it.
            with mmap.mmap(-1, PROBE_READ) as memory:
                while total < share and time.monotonic() < deadline:
                    count = os.preadv(opened, [memory], total)
                    total += count
                    if count < PROBE_READ:
                        break
        finally:
            os.close(opened)
    except OSError:
        pass
    return total
