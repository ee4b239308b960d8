"""Loads under way: what the workers are told of them, and how they end."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lakecache._objects import KIND_CHUNK
from lakecache._records import Load

if TYPE_CHECKING:
    from lakecache._metadata import StepPlan, Tally
    from lakecache._records import Tracked

__all__ = ["Loads"]

# A load without any progress for this long is given up; copies under way are waited for.
STALL_SECONDS = 20.0


class Loads:
    """A load between steps ends when the workers report its request; one within a step when all
    ranks have copied all of it. Its lease is held until then.
    """

    def __init__(self, *, ranks: int, counts: Tally) -> None:
        self._ranks = ranks
        self._counts = counts
        self._idents = itertools.count(1)
        self._by_request: dict[str, Load] = {}
        self._by_ident: dict[int, Load] = {}
        self._within_step: dict[int, Tracked] = {}
        self._new: list[tuple[int, str | None, int]] = []
        self._early: list[int] = []
        self._doomed: list[int] = []

    def between_steps(self) -> bool:
        """Whether vLLM waits for a load."""
        return bool(self._by_request)

    def within_step(self) -> bool:
        """Whether copies of a load are to be acknowledged that vLLM does not wait for."""
        return bool(self._within_step)

    def to_plan(self) -> bool:
        """Whether `plan` has something to do."""
        return bool(self._by_request or self._new)

    def start(self, tracked: Tracked, objects: Sequence[tuple[int, bytes]]) -> Load:
        """Begin to load the leading objects of the request's lease."""
        load = Load(
            next(self._idents), tracked.lease, objects,
            same_step=tracked.same_step, early=tracked.early,
        )  # fmt: skip
        load.lease.truncate(len(objects))
        load.lease.start()
        self._begin(tracked.request.request_id, load)
        tracked.lease, tracked.asked, tracked.load = None, None, load
        if load.same_step:
            self._within_step[load.ident] = tracked
        return load

    def _begin(self, request_id: str, load: Load) -> None:
        self._by_ident[load.ident] = load
        self._counts["loads"] += 1
        if load.same_step:
            self._counts["loads_same_step"] += 1
            self._new.append((load.ident, None, len(load.objects)))
        else:
            self._by_request[request_id] = load
            self._new.append((load.ident, request_id, len(load.objects)))
            if load.early:
                self._counts["loads_early"] += 1
                self._early.append(load.ident)

    def fail(self, request_id: str, tracked: Tracked | None) -> None:
        """Have the workers report a load that cannot take place, so that vLLM computes it."""
        load = self._by_request.get(request_id)
        if load is None:
            lease = None if tracked is None else tracked.lease
            load = Load(next(self._idents), lease, [(KIND_CHUNK, b"")])
            if tracked is not None:
                tracked.lease, tracked.load = None, load
            self._begin(request_id, load)
        if not load.failed:
            load.failed = True
            self._doomed.append(load.ident)

    def fail_all(self) -> None:
        """Fail all loads that vLLM waits for."""
        for request_id in self._by_request:
            self.fail(request_id, None)

    def plan(self, plan: StepPlan) -> None:
        """Tell the workers of new loads, of objects that have come, and of loads that fail."""
        for ident, request_id, _ in self._new:
            if request_id is None:
                self._plan_objects(plan, self._by_ident[ident])
        now = time.monotonic()
        for request_id, load in self._by_request.items():
            if load.failed:
                continue
            if self._plan_objects(plan, load):
                load.moved = now
            stalled = now - load.moved > STALL_SECONDS
            if stalled or load.lease.failed() is not None:
                self._counts["loads_stalled" if stalled else "loads_broken"] += 1
                self.fail(request_id, None)
        self.tell(plan)

    def _plan_objects(self, plan: StepPlan, load: Load) -> bool:
        """Name the slots that have come since the last step; whether there were any."""
        slots: list[tuple[int, int, int]] = load.lease.slots()
        for index, entry, generation in slots:
            shape, ids = load.objects[index]
            plan.chunks.append((load.ident, index, shape, entry, generation, ids))
        return bool(slots)

    def tell(self, plan: StepPlan) -> None:
        """Put what the workers have to hear of into the plan."""
        plan.loads += self._new
        plan.early += self._early
        plan.failed += self._doomed
        self._new, self._early, self._doomed = [], [], []

    def owed(self, plan: StepPlan) -> bool:
        """Whether a load within a step is in this plan, or not even in that."""
        return any(request_id is None for _, request_id, _ in (*self._new, *plan.loads))

    def copied(self, ident: int, index: int, ranks: int) -> None:
        """Take that so many more ranks have copied an object."""
        load = self._by_ident.get(ident)
        if load is None:
            return
        load.moved = time.monotonic()
        load.copied[index] += ranks
        if load.copied[index] < self._ranks:
            return
        load.lease.release(index)
        load.left -= 1
        if load.left == 0 and load.same_step:
            del self._by_ident[ident]
            self._within_step.pop(ident).load = None
            load.lease.close()

    def received(self, request_id: str) -> Load | None:
        """Take that the workers have reported a request's load."""
        load = self._by_request.pop(request_id, None)
        if load is not None:
            self._by_ident.pop(load.ident, None)
        return load

    def close(self) -> None:
        """Give all leases back, at the engine's end."""
        for load in self._by_ident.values():
            if load.lease is not None:
                load.lease.close()
        self._by_request.clear()
        self._by_ident.clear()
