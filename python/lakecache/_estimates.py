"""What loading and computing cost, learnt from durations that were measured anyway."""

from __future__ import annotations

import logging
import math
import time
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

from lakecache._fit import CHANGED, Fit

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["PrefillModel", "StepClock", "TierModel"]

log = logging.getLogger("vllm.lakecache")

# A tier whose loads were measured less often than this is not known: the first ones compile.
LOADS_TO_KNOW = 3
# Until then, that of a disk whose bandwidth was probed.
PROBE_LATENCY_SECONDS = 0.003

STEPS_IN_FLIGHT = 16
# The step behind a load that was reported early is planned sooner than this, or never.
LOADED_SECONDS = 1.0
# So many steps that overlap are measured together; in a longer run of them, beginnings and ends
# count for little.
STEPS_TOGETHER = 8


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

    def computes(self) -> bool:
        """Whether a step that computes anything has not come back."""
        return self._computing > self._ended

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
