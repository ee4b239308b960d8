"""What the two halves of the connector say to each other, once per engine step.

Everything here is pickled on vLLM's critical path, so it is flat and small: block ids travel as
packed 32-bit integers, and a step without work carries one constant object.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

__all__ = [
    "IDLE",
    "CacheStats",
    "Handshake",
    "StepPlan",
    "Tally",
    "WorkerReport",
]

STATS_SECONDS = 1.0


class StepPlan(KVConnectorMetadata):
    """Scheduler to workers: loads to begin, chunks that may be copied now, stores to make.

    - `loads`: (load, request id, number of objects to expect); without a request id the load is
      part of this step: its objects are in memory, and the step's forward waits for them
    - `chunks`: (load, index, shape, entry, generation, block ids; 0 for blocks to leave out)
    - `early`: loads to report once their copies are queued, with the engine's next work behind them
    - `failed`: loads of which no further chunk will come
    - `stores`: (job, shape, entry, generation, block ids), of what earlier steps have computed
    - `pinned`: whether this step computes something that a later one stores

    A shape is the kind of an object, and for tails also which of their sizes it has.
    """

    __slots__ = ("chunks", "early", "failed", "loads", "pinned", "stores")

    def __init__(self) -> None:
        """Begin an empty plan."""
        self.loads: list[tuple[int, str | None, int]] = []
        self.chunks: list[tuple[int, int, int, int, int, bytes]] = []
        self.early: list[int] = []
        self.failed: list[int] = []
        self.stores: list[tuple[int, int, int, int, bytes]] = []
        self.pinned = False

    def __bool__(self) -> bool:
        """Whether a worker has anything to do."""
        return bool(self.chunks or self.stores or self.loads or self.failed or self.pinned)

    @property
    def same_step(self) -> bool:
        """Whether this step's forward needs pages that are loaded in it."""
        return any(request_id is None for _, request_id, _ in self.loads)

    def __reduce__(self) -> Any:
        """Pickle as a call with plain tuples; the idle plan as a mere reference."""
        if not self:
            return (_idle, ())
        fields = self.loads, self.chunks, self.early, self.failed, self.stores, self.pinned
        return (_plan, fields)


def _plan(*fields: Any) -> StepPlan:
    plan = StepPlan()
    plan.loads, plan.chunks, plan.early, plan.failed, plan.stores, plan.pinned = fields
    return plan


# Never written to: steps in flight share it.
IDLE = StepPlan()


def _idle() -> StepPlan:
    return IDLE


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Workers to scheduler: how many ranks have finished what.

    `stores` maps a job to (ranks that copied it, ranks that failed); `copied` maps (load, index)
    to the ranks that no longer need the chunk. `same_step` is whether all ranks that report can
    still load within the step. `handshakes`, by (pipeline rank, tensor rank), are there once, where
    vLLM does not pass them on at the start.
    """

    stores: dict[int, tuple[int, int]] = field(default_factory=dict)
    copied: dict[tuple[int, int], int] = field(default_factory=dict)
    same_step: bool = True
    handshakes: dict[tuple[int, int], Handshake] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Add the counts of another rank, or of another step."""
        if not isinstance(other, WorkerReport):
            return self
        stores = dict(self.stores)
        for job, (good, bad) in other.stores.items():
            have = stores.get(job, (0, 0))
            stores[job] = (have[0] + good, have[1] + bad)
        copied = dict(self.copied)
        for chunk, ranks in other.copied.items():
            copied[chunk] = copied.get(chunk, 0) + ranks
        return WorkerReport(
            stores, copied, self.same_step and other.same_step,
            {**self.handshakes, **other.handshakes},
        )  # fmt: skip


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """One worker's start-up message to the scheduler half."""

    pool_id: str
    # Bytes of this rank's part of an object, by shape.
    part_bytes: dict[int, int]
    # Canonical JSON of everything about this rank's pages that changes their bytes.
    identity: str
    # Whether this rank can load within the step that needs the pages.
    same_step: bool = False
    # One sentence, where this worker cannot take part.
    declined: str | None = None
    # Of this worker alone.
    worker: str = ""
    # What vLLM does with requests whose load fails.
    failure_policy: str = "recompute"

    @staticmethod
    def disagreement(told: Sequence[Handshake], ranks: int, pool_id: str) -> str | None:
        """Say in one sentence why workers that answer so cannot serve; None if they can."""
        refused = next((worker.declined for worker in told if worker.declined), None)
        if refused:
            return refused
        if len(told) != ranks:
            return f"{len(told)} of {ranks} workers answered the handshake"
        if any(worker.pool_id != pool_id for worker in told):
            return (
                "a worker has another shared-memory pool than the scheduler (another host, or "
                "another /dev/shm); run all ranks on one host with one /dev/shm"
            )
        if any(worker.part_bytes != told[0].part_bytes for worker in told):
            return "the ranks' shares of an object differ in size"
        return None


@dataclass
class CacheStats(KVConnectorStats):
    """Counters of one interval; sums over halves, ranks and intervals."""

    def reset(self) -> None:
        """Begin a new interval."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> CacheStats:
        """Add another interval or another half."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Give the line that vLLM logs."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether there is nothing to log."""
        return not self.data


class Tally(Counter[str]):
    """Counters of the current interval, and the sums of those before."""

    def __init__(self) -> None:
        """Begin at zero."""
        super().__init__()
        self._before: Counter[str] = Counter()
        self._given_at = 0.0

    def interval(self) -> CacheStats | None:
        """Give the interval's counters and begin the next, at most once a second."""
        now = time.monotonic()
        if now - self._given_at < STATS_SECONDS:
            return None
        self._given_at = now
        self._before.update(self)
        data = dict(self)
        self.clear()
        return CacheStats(data=data)

    def since_start(self) -> Counter[str]:
        """Give all counters since the start."""
        return self._before + self
