"""Load or compute, whichever is faster: `load_policy: auto`.

For a hit there are three kinds of answer: load all of it, load its beginning and compute the rest,
or compute everything. The predicted time of each is the time to load (per tier a latency, and what
is under way and wanted over the bandwidth), or the rest of the prefill that is under way if that is
longer, plus the engine's time to compute the rest; the shortest wins, the longer load if equal.
What is not known yet counts as free, so that it is tried.

Where the tier does not change, one more token costs the same to load as the one before but more to
compute, so the best end of a load is an end of the hit or a place where the tier changes: nothing
in between needs a look. (A load that ends together with the prefill under way could be better
still; it is not looked for.)
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lakecache._estimates import PrefillModel, StepClock, TierModel
from lakecache._estimates_file import EstimatesFile
from lakecache._fit import CHANGED

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from lakecache.config import CacheConfig

__all__ = ["Choice", "Hit", "LoadPolicy"]

log = logging.getLogger("vllm.lakecache")

# Loads of so many bytes take as long to be noticed, or to begin, as to be copied: some
# milliseconds, at tens of GB/s from memory and at one or a few from disk.
MEMORY_BALANCE, DISK_BALANCE = 64 << 20, 4 << 20
# A tier that was not used for this long is tried again if that costs next to nothing.
RETRY_SECONDS = 60.0
RETRY_LOSS = 0.02
# A failed load that took this long says how slow its tier is.
FAILED_SECONDS = 1.0


class Hit(NamedTuple):
    """What could be loaded for a request: candidates, each longer than the one before.

    A candidate is described by the tokens that the GPU holds after the load, and by the bytes to
    load from memory and from disk, from the beginning of the load up to there. `same_step` says
    that what is all in memory will be loaded within the step that computes the rest, or reported
    before it and awaited within it. `stops` gives, for the token at which computing begins, where
    the engine ends a step even if it could compute more in it.
    """

    tokens: int  # of the prompt
    local: int  # that the GPU holds already
    ends: Sequence[int]
    memory: Sequence[int]
    disk: Sequence[int]
    same_step: bool = False
    stops: Callable[[int], Iterable[int]] = lambda begin: ()


class Choice(NamedTuple):
    """What was decided for a request, in chunks, while the GPU held `local` of its tokens."""

    local: int
    offered: int
    taken: int

    def counters(self, chunk: int, *, loads: bool) -> dict[str, int]:
        """Give what to count for it, with `chunk` tokens per chunk. Nothing where a load was
        wanted but does not take place, or the other way round.
        """
        if loads != (self.taken > 0):
            return {}
        if not self.taken:
            outcome = "declined"
        else:
            outcome = "taken" if self.taken == self.offered else "shortened"
        counted = {f"hits_{outcome}": 1, "tokens_declined": (self.offered - self.taken) * chunk}
        return {name: count for name, count in counted.items() if count}


class Underway(NamedTuple):
    """A load: when it began, its bytes by tier, and those that were under way before it. What is
    reported `early` may end within the step that goes on behind it.
    """

    early: bool
    began: float
    memory: int
    disk: int
    before_memory: int
    before_disk: int
    predicted: float


class LoadPolicy:
    """Estimates and decisions of one engine. All methods are for the scheduler's thread alone."""

    def __init__(self, *, step_tokens: int, engine: str) -> None:
        """Take the most tokens of a step, and what else decides how fast this engine is."""
        self.prefill = PrefillModel(step_tokens)
        self.memory = TierModel(MEMORY_BALANCE)
        self.disk = TierModel(DISK_BALANCE)
        # Memory, by loads within a step: without the engine's steps until a load is noticed.
        self.step = TierModel(MEMORY_BALANCE)
        self.clock = StepClock(self.prefill, self.step)
        self.file = EstimatesFile(
            self.prefill, self.memory, self.step, self.disk, engine=engine, explain=self.explain
        )
        self._loads: dict[int, Underway] = {}
        self._last: dict[str, Any] = {}
        self._began = time.monotonic()

    @classmethod
    def of(cls, vllm_config: VllmConfig, config: CacheConfig) -> LoadPolicy:
        """Make the policy of an engine."""
        scheduler = vllm_config.scheduler_config
        step_tokens = scheduler.max_num_batched_tokens
        if scheduler.long_prefill_token_threshold > 0:
            step_tokens = min(step_tokens, scheduler.long_prefill_token_threshold)
        settings = config.transfer, config.io_engine, config.checksum, config.verify_load
        return cls(step_tokens=step_tokens, engine=_engine_name(*map(str, settings)))

    # Decisions

    def decide(self, hit: Hit) -> int:
        """Give the number of the candidate to load, counted from 1; 0 is to compute everything."""
        self.file.adopt()
        compute = self.prefill.seconds(hit.local, hit.tokens, hit.stops(hit.local))
        if compute is None:
            return len(hit.ends)
        # Computing waits for what is being computed; a load goes on meanwhile.
        wait = self.clock.remaining()
        times = [wait + compute]
        for end, memory, disk in zip(hit.ends, hit.memory, hit.disk, strict=True):
            rest = self.prefill.seconds(end, hit.tokens, hit.stops(end)) or 0.0
            load = self.load_seconds(memory, disk, same_step=hit.same_step and not disk)
            times.append(max(wait, load) + rest)
        best = min(range(len(times)), key=lambda index: (times[index], -index))
        chosen = best
        if best < len(hit.ends):
            chosen = self._retry(hit, times, best)
            self.file.refused_disk |= hit.disk[-1] > (hit.disk[chosen - 1] if chosen else 0)
        self._last = {
            "tokens": hit.tokens, "local": hit.local, "ends": list(hit.ends), "chosen": chosen,
            "milliseconds": [round(seconds * 1e3, 3) for seconds in times],
        }  # fmt: skip
        if log.isEnabledFor(logging.DEBUG):
            log.debug("LakeCache load policy: %s", self._last)
        return chosen

    def _retry(self, hit: Hit, times: list[float], best: int) -> int:
        """Try what is hardly slower, if its tier was not measured for a long time.

        Memory, which nothing else measures, may be slower by as much again for each such time.
        """
        now = time.monotonic()
        for index in range(len(times) - 1, best, -1):
            more_disk = hit.disk[index - 1] > (hit.disk[best - 1] if best else 0)
            tier = self.disk if more_disk else self.step if hit.same_step else self.memory
            unused = (now - max(tier.measured_at, self._began)) / RETRY_SECONDS
            loss = RETRY_LOSS * (1 if more_disk else max(unused, 1))
            slower = times[index] > times[best] * (1 + loss)
            if not slower and now - tier.measured_at > RETRY_SECONDS:
                tier.measured_at, tier.retried = now, True
                return index
        return best

    def load_seconds(self, memory: int, disk: int, *, same_step: bool = False) -> float:
        """Predict a load of so many bytes by tier, behind those under way. Unknown is free."""
        latency = total = 0.0
        first = self.step if same_step else self.memory
        for tier, num_bytes in ((first, memory), (self.disk, disk)):
            costs = tier.costs() if num_bytes else None
            if costs is not None:
                latency = max(latency, costs[0])
                total += costs[1] * (num_bytes + tier.under_way)
        return latency + total

    def choose(
        self, before: Choice | None, *, tokens: int, local: int, present: int, in_memory: int,
        leading: int, chunk: int, chunk_bytes: int, same_step: bool = False,
    ) -> Choice:  # fmt: skip
        """Decide about `present` chunks from the one of token `local` on; `in_memory` of them are
        in memory, and `leading` of those come before any on disk.

        A request that is asked again in the same state gets the answer it had.
        """
        if before is not None and (before.local, before.offered) == (local, present):
            return before
        first = local // chunk
        counts = sorted({leading, present} - {0})
        hit = Hit(
            tokens, local,
            [min((first + count) * chunk, tokens - 1) for count in counts],
            [min(count, in_memory) * chunk_bytes for count in counts],
            [max(count - in_memory, 0) * chunk_bytes for count in counts],
            same_step,
        )  # fmt: skip
        number = self.decide(hit)
        return Choice(local, present, counts[number - 1] if number else 0)

    # Measurements

    def step_planned(self, output: Any) -> None:
        """Note a step. In one without tokens, and with none under way whose tokens are waited for,
        bring the estimates up to date, rather than in a decision, for which a request waits.
        """
        self.clock.planned(output)
        if output.total_num_scheduled_tokens or self.clock.computes():
            return
        # The step's loads and stores must not be lost to a prediction; a decision would say why.
        with contextlib.suppress(ArithmeticError):
            self.prefill.fit.prepare()
            for tier in (self.memory, self.step, self.disk):
                tier.fit.costs()

    def step_ended(self) -> None:
        """Note that the oldest planned step is over; now and then keep the estimates."""
        now = self.clock.ended()
        if now is not None:
            self.file.tick(now)

    def load_started(
        self, ident: int, memory: int, disk: int, *, same_step: bool = False, early: bool = False
    ) -> None:
        """Note a load of so many bytes by tier."""
        if same_step:
            # What the next step takes beyond computing is the load.
            self.clock.loading += memory
            return
        before = self.memory.under_way, self.disk.under_way
        predicted = self.load_seconds(memory, disk)
        now = time.monotonic()
        self._loads[ident] = Underway(early, now, memory, disk, *before, predicted)
        self.memory.under_way += memory
        self.disk.under_way += disk

    def load_ended(self, ident: int, *, good: bool) -> None:
        """Note that a load is over; one that failed says at most how slow its tier is."""
        load = self._loads.pop(ident, None)
        if load is None:
            return
        self.memory.under_way -= load.memory
        self.disk.under_way -= load.disk
        now = time.monotonic()
        seconds = now - load.began
        # A disk that hangs is slow; what failed at once says nothing.
        if not good and seconds < max(FAILED_SECONDS, CHANGED * load.predicted):
            return
        self._last["load"] = {
            "memory_bytes": load.memory, "disk_bytes": load.disk, "early": load.early,
            "milliseconds": round(seconds * 1e3, 3),
            "predicted_milliseconds": round(load.predicted * 1e3, 3),
        }  # fmt: skip
        if load.early and good:
            # The next step may still wait for its copies: it is measured together with that.
            self.clock.loading += load.memory
            self.clock.loading_since = load.began
            return
        if not load.disk:
            self.memory.measured(load.memory + load.before_memory, seconds, now)
            return
        if load.memory:
            costs = self.memory.costs()
            if costs is None:
                return
            # What is left is the disk's part, and never nothing.
            part = costs[1] * (load.memory + load.before_memory)
            seconds = max(seconds - part, seconds / 8)
        self.disk.measured(load.disk + load.before_disk, seconds, now)

    def explain(self) -> dict[str, Any]:
        """Give the current estimates and the last decision, in units for people."""
        step, token, pair, decode = self.prefill.fit.costs()
        told: dict[str, Any] = {
            "prefill": {
                "step_ms": step * 1e3,
                "ms_per_1k_tokens": token * 1.024e6,
                "ms_per_1k_tokens_and_1k_context": pair * 1e3 * (1 << 20),
                "ms_per_decoding_request": decode * 1e3,
                "measured": self.prefill.fit.count,
                "errors": self.clock.errors,
            }
        }
        tiers = {"memory": self.memory, "memory_same_step": self.step, "disk": self.disk}
        for name, tier in tiers.items():
            latency, per_byte = tier.costs() or (None, None)
            told[name] = {
                "latency_ms": None if latency is None else latency * 1e3,
                "gb_per_s": 1e-9 / per_byte if per_byte else None,
                "measured": tier.fit.count,
            }
        told["disk"]["probed_gb_per_s"] = self.disk.probed and self.disk.probed / 1e9
        told["last"] = dict(self._last)
        return told


def _engine_name(*settings: str) -> str:
    """Name the device, and the settings that decide how fast it loads."""
    from vllm.platforms import current_platform

    device = str(current_platform.get_device_name())
    if current_platform.is_cpu():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line for line in lines if line.startswith("model name")), "CPU")
        device = f"{len(os.sched_getaffinity(0))} x {model.split(':')[-1].strip()}"
    return " ".join([device, *settings])
