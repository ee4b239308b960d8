"""The worker half: copies between this rank's KV pages and the shared arena.

It runs on the model runner's thread. Copies are made by threads of the compiled half, without the
GIL; here they are only started and polled. A copy that has begun is never abandoned, because its
memory may be given to another request only when the copy is over: only waiting for a chunk to
become readable has a deadline.
"""

from __future__ import annotations

import itertools
import logging
import time
from typing import TYPE_CHECKING, Any

from lakecache import identity
from lakecache._metadata import Handshake, StepPlan, WorkerReport
from lakecache._pages import PageTable, layer_specs
from lakecache._support import chunk_geometry

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from lakecache.config import CacheConfig

__all__ = ["WorkerHalf"]

log = logging.getLogger("vllm.lakecache")

# How long a copy may wait for its chunk to arrive from disk.
ARRIVAL_SECONDS = 20.0
COPY_THREADS = 2
DRAIN_SECONDS = 5.0
COPIED = 0


class Load:
    """A request's load on this rank."""

    __slots__ = ("chunks", "done", "failed", "jobs", "left", "request_id")

    def __init__(self, request_id: str, chunks: int) -> None:
        self.request_id = request_id
        self.chunks = chunks
        self.done = 0
        self.failed = False
        # Copies under way, and for each chunk begun how many of them are left.
        self.jobs = 0
        self.left: dict[int, int] = {}

    def over(self) -> bool:
        """Whether it can be reported: no copy is under way, and all or something failed."""
        return self.jobs == 0 and (self.failed or self.done == self.chunks)


class Store:
    """One chunk's copies on this rank."""

    __slots__ = ("entry", "failed", "generation", "ident", "jobs")

    def __init__(self, ident: int, entry: int, generation: int) -> None:
        self.ident = ident
        self.entry = entry
        self.generation = generation
        self.jobs = 0
        self.failed = False


class WorkerHalf:
    """See the module's text. Methods may raise: the connector catches and counts."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        config: CacheConfig,
        cache: Any,
        *,
        rank: int,
    ) -> None:
        """Take an open cache that is a member of the scheduler's pool."""
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._cache = cache
        self._rank = rank
        self._copier = cache.copier(COPY_THREADS)
        chunk, block, _ = chunk_geometry(kv_cache_config, config.chunk_size)
        self._blocks_per_chunk = chunk // block
        self._pages: PageTable | None = None
        self._identity = ""
        self._declined: str | None = "the KV caches were not registered"
        self._numbers = itertools.count(1)
        self._jobs: dict[int, tuple[Load, int, int] | Store] = {}
        self._loads: dict[int, Load] = {}
        self._over: list[Load] = []
        self._report = WorkerReport()
        self.errors = 0

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Compute where all pages lie, or decline in one sentence."""
        try:
            self._pages = PageTable(self._kv_cache_config, kv_caches, self._blocks_per_chunk)
            specs = layer_specs(self._kv_cache_config)
            self._identity = identity.rank_identity(
                self._vllm_config, self._kv_cache_config, kv_caches, specs
            )
            self._declined = None
        except Exception as error:
            self._pages = None
            self._declined = str(error) or type(error).__name__

    def handshake(self) -> Handshake:
        """Tell the scheduler half about this rank."""
        pages = self._pages
        return Handshake(
            pool_id=self._cache.pool_id,
            part_bytes=pages.part_bytes if pages is not None else 0,
            identity=self._identity,
            declined=self._declined,
        )

    def busy(self) -> bool:
        """Whether polling can bring anything."""
        return bool(self._jobs or self._loads or self._over)

    # Loads

    def start_loads(self, plan: StepPlan) -> None:
        """Begin the copies of chunks that are there, or on their way from disk."""
        for ident, request_id, chunks in plan.loads:
            self._loads[ident] = Load(request_id, chunks)
        for ident, index, entry, generation, skip, ids in plan.chunks:
            load = self._loads.get(ident)
            if load is None or load.failed:
                continue
            try:
                self._start_chunk(load, ident, index, entry, generation, skip, ids)
            except Exception:
                self._complain("could not start to copy a chunk")
                load.failed = True
        for ident in plan.failed:
            load = self._loads.get(ident)
            if load is not None:
                load.failed = True
        if plan.loads or plan.failed:
            self._settle()

    def _start_chunk(
        self, load: Load, ident: int, index: int, entry: int, generation: int, skip: int, ids: bytes
    ) -> None:
        pages = self._pages
        if pages is None:
            raise RuntimeError(self._declined)
        part = self._rank * pages.part_bytes
        runs = list(pages.fragments(ids, skip=skip))
        load.left[index] = len(runs)
        for run in runs:
            job = next(self._numbers)
            self._jobs[job] = (load, ident, index)
            load.jobs += 1
            try:
                self._copier.load(
                    job, entry, generation, part + run.offset, run.addresses, run.fragment_bytes,
                    ARRIVAL_SECONDS, self._config.verify_load,
                )  # fmt: skip
            except Exception:
                del self._jobs[job]
                load.jobs -= 1
                raise

    # Stores

    def start_stores(self, plan: StepPlan) -> None:
        """Begin to copy full blocks that this step, or an earlier one, has computed."""
        for ident, entry, generation, ids in plan.stores:
            store = Store(ident, entry, generation)
            try:
                self._start_store(store, ids)
            except Exception:
                self._complain("could not start to store a chunk")
                store.failed = True
            if store.jobs == 0:
                self._acknowledge(store)

    def _start_store(self, store: Store, ids: bytes) -> None:
        pages = self._pages
        if pages is None:
            raise RuntimeError(self._declined)
        part = self._rank * pages.part_bytes
        for run in pages.fragments(ids):
            job = next(self._numbers)
            self._jobs[job] = store
            store.jobs += 1
            try:
                self._copier.store(
                    job, store.entry, store.generation, part + run.offset, run.addresses,
                    run.fragment_bytes,
                )  # fmt: skip
            except Exception:
                del self._jobs[job]
                store.jobs -= 1
                raise

    def _acknowledge(self, store: Store) -> None:
        good, bad = self._report.stores.get(store.ident, (0, 0))
        self._report.stores[store.ident] = (good + (not store.failed), bad + store.failed)

    # Results

    def poll(self) -> None:
        """Take in what the copying threads have finished."""
        if self._jobs:
            for job, status in self._copier.poll():
                self._finish(job, good=status == COPIED)
        self._settle()

    def _finish(self, job: int, *, good: bool) -> None:
        owner = self._jobs.pop(job, None)
        if owner is None:
            return
        if isinstance(owner, Store):
            owner.jobs -= 1
            owner.failed |= not good
            if owner.jobs == 0:
                self._acknowledge(owner)
            return
        load, ident, index = owner
        load.jobs -= 1
        load.left[index] -= 1
        if not good:
            load.failed = True
        elif load.left[index] == 0 and not load.failed:
            load.done += 1
            self._report.copied[ident, index] = 1

    def _settle(self) -> None:
        for ident in [ident for ident, load in self._loads.items() if load.over()]:
            self._over.append(self._loads.pop(ident))

    def take_results(self) -> tuple[set[str], set[str]]:
        """Give (requests whose loads are over, those among them that failed): each load once."""
        over, self._over = self._over, []
        return {load.request_id for load in over}, {load.request_id for load in over if load.failed}

    def take_report(self) -> WorkerReport | None:
        """Give the acknowledgements since the last call, if any."""
        if not self._report.stores and not self._report.copied:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def _complain(self, what: str) -> None:
        self.errors += 1
        if self.errors == 1:
            log.warning("LakeCache %s; further such errors are only counted", what, exc_info=True)

    def shutdown(self) -> None:
        """Wait, within a bound, until no thread touches the KV caches any more."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while self._jobs and time.monotonic() < deadline:
            self.poll()
            time.sleep(0.001)
        self._copier.close()

    def close(self) -> None:
        """Leave the pool."""
        self._cache.close()
