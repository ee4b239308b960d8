"""The worker half: this rank's share of every load and store.

It runs on the model runner's thread, which only starts and polls copies; `lakecache.transfer` makes
them.
"""

from __future__ import annotations

import itertools
import logging
import uuid
from typing import TYPE_CHECKING, Any

from lakecache import identity
from lakecache._metadata import Handshake, StepPlan, WorkerReport
from lakecache._objects import KIND_CHUNK, KIND_STATE, KIND_TAIL, Geometry
from lakecache._pages import Groups, ObjectShape, PageTable, layer_specs
from lakecache._tails import tail_runs
from lakecache.transfer import HostTransfer, PackedTransfer, SerialTransfer, Transfer

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from lakecache._staging import StagingBuffers
    from lakecache.config import CacheConfig

__all__ = ["WorkerHalf"]

log = logging.getLogger("vllm.lakecache")

DRAIN_SECONDS = 5.0


class Load:
    """A request's load on this rank."""

    __slots__ = ("begun", "chunks", "done", "failed", "request_id")

    def __init__(self, request_id: str | None, chunks: int) -> None:
        self.request_id = request_id
        self.chunks = chunks
        self.begun = 0
        self.done = 0
        self.failed = False

    def over(self) -> bool:
        """Whether it can be reported: no copy is under way, and all or something failed."""
        return self.begun == self.done and (self.failed or self.done == self.chunks)


class WorkerHalf:
    """See the module's text. Methods may raise: the connector catches and counts."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        config: CacheConfig,
        cache: Any,
        *,
        groups: Groups,
        geometry: Geometry,
        rank: int,
    ) -> None:
        """Take an open cache that is a member of the scheduler's pool."""
        self.name = uuid.uuid4().hex
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._cache = cache
        self._rank = rank
        self._groups = groups
        self._blocks_per_chunk = geometry.chunk // geometry.block
        self._tails = geometry.tails() if groups.states else []
        self._shapes: dict[int, ObjectShape] = {}
        self._transfer: Transfer | None = None
        self._buffers = self._staging()
        self._identity = ""
        self._declined: str | None = "the KV caches were not registered"
        self._numbers = itertools.count(1)
        # What each copy under way is for: a chunk of a load, or a store.
        self._jobs: dict[int, tuple[Load, int, int] | int] = {}
        self._loads: dict[int, Load] = {}
        self._over: list[Load] = []
        self._report = WorkerReport()
        self._same_step = False
        self.errors = 0

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Compute where all pages lie, or decline in one sentence."""
        try:
            groups = self._groups
            pages = PageTable(self._kv_cache_config, kv_caches, groups)
            specs = layer_specs(self._kv_cache_config, (*groups.attention, *groups.states))
            tails = tail_runs(
                self._vllm_config, self._kv_cache_config, kv_caches, groups, self._tails
            )
            self._identity = identity.rank_identity(
                self._vllm_config, self._kv_cache_config, kv_caches, specs, tails
            )
            self._shapes = {KIND_CHUNK: pages.chunk_shape(self._blocks_per_chunk)}
            if groups.states:
                self._shapes[KIND_STATE] = pages.state_shape(None)
                for shape, runs in enumerate(tails, KIND_TAIL):
                    self._shapes[shape] = pages.state_shape(runs)
            _fill_scales(self._vllm_config, kv_caches)
            self._transfer = self._make_transfer(next(iter(kv_caches.values())))
            self._same_step = self._transfer.same_step
            self._declined = None
        except Exception as error:
            self._transfer = None
            self._declined = str(error) or type(error).__name__

    def _staging(self) -> StagingBuffers | None:
        """Take the GPU's staging memory, before vLLM allocates its KV cache."""
        from vllm.platforms import current_platform

        if current_platform.is_cpu() or self._config.transfer == "sync":
            return None
        import torch

        from lakecache._staging import StagingBuffers

        stored = (*self._groups.attention, *self._groups.states)
        specs = layer_specs(self._kv_cache_config, stored)
        pages = sum(spec.page_size_bytes for _, spec in specs)
        found = StagingBuffers.allocate(
            torch.device("cuda", torch.cuda.current_device()),
            largest=pages * self._blocks_per_chunk,
            kv_bytes=self._kv_cache_config.kv_cache_tensors[0].size,
        )
        if found is None:
            log.warning(
                "LakeCache: the GPU has no memory left for staging buffers, so pages are copied "
                "one by one, which is slow. Lower gpu_memory_utilization or chunk_size (%d).",
                self._config.chunk_size,
            )
        return found

    def _make_transfer(self, pages: torch.Tensor) -> Transfer:
        verify = self._config.verify_load
        if self._buffers is not None:
            return PackedTransfer(
                self._cache, self._shapes, self._buffers,
                rank=self._rank, device=pages.device, verify=verify,
            )  # fmt: skip
        if self._config.transfer == "sync" or pages.device.type != "cpu":
            return SerialTransfer(
                self._cache, self._shapes, pages.untyped_storage(), rank=self._rank, verify=verify
            )
        return HostTransfer(self._cache, self._shapes, rank=self._rank, verify=verify)

    def handshake(self) -> Handshake:
        """Tell the scheduler half about this rank."""
        return Handshake(
            pool_id=self._cache.pool_id,
            part_bytes={number: shape.part_bytes for number, shape in self._shapes.items()},
            same_step=self._same_step,
            identity=self._identity,
            declined=self._declined,
            worker=self.name,
        )

    def report_handshake(self, told: Handshake) -> None:
        """Have the next report carry the handshake, where vLLM does not pass it on."""
        # By (pipeline rank, tensor rank), as vLLM has it; pipelines are declined.
        self._report.handshakes[0, self._rank] = told

    def busy(self) -> bool:
        """Whether polling can bring anything."""
        return bool(self._jobs or self._loads or self._over)

    # Loads

    def start_loads(self, plan: StepPlan) -> None:
        """Begin the copies of chunks that are there, or on their way from disk."""
        for ident, request_id, chunks in plan.loads:
            self._loads[ident] = Load(request_id, chunks)
        for ident, index, shape, entry, generation, ids in plan.chunks:
            load = self._loads.get(ident)
            if load is None or load.failed:
                continue
            job = next(self._numbers)
            try:
                self._ready().load(job, shape, entry, generation, ids)
            except Exception:
                if load.request_id is None:
                    raise
                self._complain("could not start to copy a chunk")
                load.failed = True
                continue
            self._jobs[job] = (load, ident, index)
            load.begun += 1
        for ident in plan.failed:
            load = self._loads.get(ident)
            if load is not None:
                load.failed = True
        if plan.same_step:
            self._ready().follow_loads()
        for ident in plan.early:
            self._report_early(ident)
        if plan.loads or plan.failed:
            self._settle()

    def _report_early(self, ident: int) -> None:
        """Report a load whose copies are all queued, and have the engine's work wait for them. One
        of which some cannot be queued is reported when it is over, like others.
        """
        load = self._loads.get(ident)
        if load is None or load.failed or load.begun < load.chunks:
            return
        try:
            self._ready().follow_loads()
        except Exception:
            log.debug("LakeCache: a load is waited for", exc_info=True)
            return
        self._over.append(self._loads.pop(ident))

    def _ready(self) -> Transfer:
        if self._transfer is None:
            raise RuntimeError(self._declined)
        return self._transfer

    # Stores

    def start_stores(self, plan: StepPlan) -> None:
        """Begin to copy full blocks that earlier steps have computed, without waiting for this one,
        and note where this one ends if a later one copies what it computes.
        """
        for ident, shape, entry, generation, ids in plan.stores:
            job = next(self._numbers)
            try:
                self._ready().store(job, shape, entry, generation, ids)
            except Exception:
                self._complain("could not start to store a chunk")
                self._acknowledge(ident, good=False)
                continue
            self._jobs[job] = ident
        if plan.pinned:
            self.mark_computed()

    def mark_computed(self) -> None:
        """Have the stores that follow wait for all that the engine has queued so far."""
        self._ready().mark_computed()

    def _acknowledge(self, ident: int, *, good: bool) -> None:
        copied, failed = self._report.stores.get(ident, (0, 0))
        self._report.stores[ident] = (copied + good, failed + (not good))

    # Results

    def poll(self) -> None:
        """Take in which copies are over."""
        if self._jobs and self._transfer is not None:
            for job, good in self._transfer.poll():
                self._finish(job, good=good)
        self._settle()

    def _finish(self, job: int, *, good: bool) -> None:
        owner = self._jobs.pop(job)
        if isinstance(owner, int):
            self._acknowledge(owner, good=good)
            return
        load, ident, index = owner
        load.done += 1
        load.failed |= not good
        # Nobody else says of a load within the step that it is over.
        if not load.failed or load.request_id is None:
            self._report.copied[ident, index] = 1

    def _settle(self) -> None:
        for ident in [ident for ident, load in self._loads.items() if load.over()]:
            self._over.append(self._loads.pop(ident))

    def take_results(self) -> tuple[set[str], set[str]]:
        """Give (requests whose loads are over, those among them that failed): each load once."""
        over, self._over = self._over, []
        named = [(load.request_id, load.failed) for load in over if load.request_id is not None]
        return {name for name, _ in named}, {name for name, failed in named if failed}

    def take_report(self) -> WorkerReport | None:
        """Give the acknowledgements since the last call, if any."""
        if self._same_step and not (self._transfer and self._transfer.same_step):
            self._same_step = self._report.same_step = False
        elif not (self._report.stores or self._report.copied or self._report.handshakes):
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def _complain(self, what: str) -> None:
        self.errors += 1
        if self.errors == 1:
            log.warning("LakeCache %s; further such errors are only counted", what, exc_info=True)

    def shutdown(self) -> None:
        """Wait, within a bound, until no copy touches the KV caches any more; leave the pool."""
        idle = self._transfer is None
        try:
            if self._transfer is not None:
                idle = self._transfer.close(DRAIN_SECONDS)
                self.poll()
        finally:
            # While copies may still land, what is pinned stays so until this process has ended.
            if idle:
                self._cache.close()


def _fill_scales(vllm_config: VllmConfig, kv_caches: Mapping[str, torch.Tensor]) -> None:
    """Have backends fill the scales in their pages now: those with a scale per token and head do so
    when they are first called, which may be after a load.
    """
    layers = vllm_config.compilation_config.static_forward_context
    for name, view in kv_caches.items():
        backend: Any = getattr(layers.get(name), "impl", None)
        if getattr(backend, "_is_per_token_head_quant", False):
            backend._ensure_scale_caches(view)
