"""LakeCache's KV connectors for vLLM 0.32.

    --kv-transfer-config '{"kv_connector": "LakeCacheConnector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"cache_dir": "/var/cache/lakecache", "cpu_bytes": "8GiB"}}'

The import is cheap, as vLLM does it in its front end too, and makes the names known as the plugin
does. Wrong settings and a cache that cannot be opened are errors at start-up. After that nothing
raised in here reaches the engine: it is logged once, counted, and becomes a miss.

In vLLM's `MultiConnector` some of what is passed on is another connector's: its handshakes, its
loads and their failures.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from lakecache import _messages, plugin
from lakecache._hybrid import HybridSchedulerHalf
from lakecache._metadata import IDLE, CacheStats, Handshake, StepPlan, WorkerReport
from lakecache._metrics import CacheMetrics, StoreGrowth
from lakecache._opening import open_cache
from lakecache._scheduler import SchedulerHalf
from lakecache._support import cache_groups, chunk_geometry, declined_reason, is_hybrid
from lakecache._worker import WorkerHalf
from lakecache.config import CacheConfig
from lakecache.identity import unstable_reason

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["CacheConnector", "LakeCacheConnector", "MiniCacheConnector"]

log = logging.getLogger("vllm.lakecache")

# vLLM's MultiConnector finds the class of a connector's counters by this alone, also where the
# connector was given by its module.
plugin.register()

Answer = TypeVar("Answer")
NOTHING = KVConnectorTransferResults()

# By a worker's name. With the engine in one process vLLM shuts the worker down first: its last
# acknowledgements would be lost, and what it has still to copy.
_drained_workers: dict[str, WorkerHalf] = {}
_schedulers: WeakValueDictionary[str, SchedulerHalf] = WeakValueDictionary()


def _guarded(
    otherwise: Callable[[], Any],
) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Make a method answer `otherwise()` where it would raise, log the first time and count."""

    def wrap(method: Callable[..., Answer]) -> Callable[..., Answer]:
        @functools.wraps(method)
        def call(self: CacheConnector, *args: Any, **kwargs: Any) -> Answer:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                self._failed(method.__name__)
                return otherwise()

        return call

    return wrap


class CacheConnector(KVConnectorBase_V1, SupportsHMA):
    """What the connectors have in common.

    vLLM makes one in the scheduler and one in each worker; each has the half for its role, or none
    where this engine is not served.
    """

    # Whether models with recurrent state are served, or those without; None: both.
    _hybrid: bool | None = None

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        """Open the cache, or decline with one sentence. Wrong settings raise."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.errors = 0
        self.scheduler: SchedulerHalf | None = None
        self.worker: WorkerHalf | None = None
        transfer = self._kv_transfer_config
        config = CacheConfig.from_extra_config(transfer.kv_connector_extra_config)
        self._workers: list[str] = []
        # Whether this rank's handshake is on its way.
        self._told = False
        self._growth: StoreGrowth | None = None
        scheduling = role == KVConnectorRole.SCHEDULER
        unstable = unstable_reason(vllm_config)
        self._loaded_groups = kv_cache_config.prefix_cacheable_group_ids
        hybrid = is_hybrid(kv_cache_config) if self._hybrid is None else self._hybrid
        self.declined = declined_reason(vllm_config, kv_cache_config, hybrid=hybrid)
        if self.declined is None and unstable is not None and config.cpu_bytes == 0:
            self.declined = f"{unstable}, and there is no memory tier (cpu_bytes is 0)"
        if self.declined is not None:
            if scheduling:
                log.warning("LakeCache does nothing in this engine: %s.", self.declined)
            return
        if scheduling and unstable is not None:
            log.warning(
                "LakeCache keeps nothing on disk and shares nothing between processes: %s.",
                unstable,
            )
        cache = open_cache(config, worker=not scheduling, disk=unstable is None)
        _messages.pass_on(log)
        groups = cache_groups(kv_cache_config, hybrid=hybrid)
        self._loaded_groups = tuple(sorted((*groups.attention, *groups.states)))
        self._state_groups = groups.states
        geometry = chunk_geometry(kv_cache_config, groups, config.chunk_size)
        if scheduling:
            self._growth = StoreGrowth(cache)
            self.scheduler = (HybridSchedulerHalf if hybrid else SchedulerHalf)(
                vllm_config, kv_cache_config, config, cache,
                groups=groups, geometry=geometry, unstable=unstable,
            )  # fmt: skip
        else:
            self.worker = WorkerHalf(
                vllm_config, kv_cache_config, config, cache,
                groups=groups, geometry=geometry, rank=_rank_of_worker(),
            )  # fmt: skip

    def _failed(self, where: str) -> None:
        self.errors += 1
        if self.scheduler is not None:
            self.scheduler.counts["errors"] += 1
        if self.errors == 1:
            log.exception("LakeCache: unexpected error in %s; further ones are counted", where)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is only a later miss."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whole CUDA graphs are fine. vLLM asks before it starts any process, so wrong settings are
        refused here, in one short error; where it does not ask, the workers refuse them.
        """
        CacheConfig.from_extra_config(extra_config)
        return False

    # Worker side

    @_guarded(lambda: None)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Note where the pages lie."""
        if self.worker is not None:
            self.worker.register(kv_caches)

    @_guarded(lambda: None)
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Tell the scheduler half about this rank's pages and pool.

        vLLM's MultiConnector passes on the handshake of one connector only, the first that has one.
        Where another one has one, ours goes with the report of the first step instead.
        """
        if self.worker is None:
            return None
        # Another entry of ours would ask back.
        self._told = not any(
            other.get_handshake_metadata() is not None
            for other in self._others()
            if not isinstance(other, CacheConnector)
        )
        return self._introduction(self.worker) if self._told else None

    def _others(self) -> list[KVConnectorBase_V1]:
        """Give the connectors beside this one, in a worker."""
        return [one for one in getattr(_outermost(self), "sub_connectors", ()) if one is not self]

    def _introduction(self, worker: WorkerHalf) -> Handshake:
        told = worker.handshake()
        # It is vLLM's own setting, which an entry of a MultiConnector does not change.
        told.failure_policy = _outermost(self)._kv_transfer_config.kv_load_failure_policy
        if any(isinstance(other, CacheConnector) and other.worker for other in self._others()):
            told.declined = "MultiConnector has it more than once; keep one entry"
        return told

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin this step's loads; they are polled, never waited for.

        Raises only where this step's forward would read pages that were promised and not loaded.
        """
        plan = self._connector_metadata
        if plan and self.worker is not None and isinstance(plan, StepPlan):
            try:
                self.worker.start_loads(plan)
            except Exception:
                self._failed("start_load_kv")
                if plan.same_step:
                    raise

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: whole requests are loaded between steps."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Nothing to do: whole blocks are saved after the step."""

    @_guarded(lambda: None)
    def wait_for_save(self) -> None:
        """Begin this step's stores. Their blocks are pinned, so there is nothing to wait for."""
        plan = self._connector_metadata
        if plan and self.worker is not None and isinstance(plan, StepPlan):
            self.worker.start_stores(plan)

    @_guarded(lambda: NOTHING)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Report each load exactly once, when no copy of it is under way any more."""
        worker = self.worker
        if worker is None or not worker.busy():
            return NOTHING
        worker.poll()
        received, failed = worker.take_results()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    @_guarded(lambda: None)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Acknowledge copies to the scheduler half."""
        if self.worker is None:
            return None
        if not self._told:
            self._told = True
            self.worker.report_handshake(self._introduction(self.worker))
        return self.worker.take_report()

    # Scheduler side

    @_guarded(lambda: None)
    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take the pool whose blocks are pinned while they are saved."""
        if self.scheduler is not None:
            self.scheduler.saves.bind(gpu_block_pool)

    @_guarded(lambda: None)
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Compare what the workers say; decline where they disagree.

        Where it is all another connector's, the workers' reports have ours.
        """
        workers = {rank: told for rank, told in metadata.items() if isinstance(told, Handshake)}
        if self.scheduler is not None and (workers or not metadata):
            self._meet(self.scheduler, workers)

    def _meet(self, scheduler: SchedulerHalf, workers: dict[tuple[int, int], Handshake]) -> None:
        if self._workers or scheduler.declined is not None:
            return
        scheduler.handshake(workers)
        if scheduler.declined is None:
            self._workers = [told.worker for told in workers.values()]
            _schedulers.update(dict.fromkeys(self._workers, scheduler))
        _messages.pass_on(log)

    @_guarded(tuple)
    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Tell whose blocks a load fills, so that vLLM need not zero them.

        Where it fills only part of the last block of attention, all of that group are zeroed, in
        the step that allocates them and before any copy to them.
        """
        half = self.scheduler
        if isinstance(half, HybridSchedulerHalf) and half.leaves_rest(request):
            return self._state_groups
        return self._loaded_groups

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Answer (tokens to load, True), or False for a load within this step; (None, False) while
        files are being opened.
        """
        if self.scheduler is None:
            return 0, False
        try:
            found = self.scheduler.matched(request, num_computed_tokens)
            # It wants blocks now, until it is told that it has them.
            self.scheduler.unplaced = found[0] is not None
            return found
        except Exception:
            self._failed("get_num_new_matched_tokens")
            return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Start the load, or let go of its lease. A failure to start is reported as a failed load,
        because vLLM now waits for one; only a load within this step has no other way than to raise.
        """
        if self.scheduler is None:
            return
        try:
            self.scheduler.allocated(request, blocks, num_external_tokens)
        except Exception:
            self._failed("update_state_after_alloc")
            if num_external_tokens > 0:
                if self.scheduler.promised_this_step(request.request_id):
                    raise
                self.scheduler.fail_load(request.request_id)

    @_guarded(dict)
    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Split a hit by tier."""
        memory = disk = 0
        if self.scheduler is not None and num_external_tokens:
            memory, disk = self.scheduler.sources(request, num_external_tokens)
        split = {CacheHitSource.HOST: memory, CacheHitSource.DISK: disk}
        return {source: tokens for source, tokens in split.items() if tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Plan this step's copies. Without work it is one test and one constant."""
        if self.scheduler is None:
            return IDLE
        try:
            return self.scheduler.plan_step(scheduler_output)
        except Exception:
            self._failed("build_connector_meta")
            if self.scheduler.owes_this_step():
                raise
        try:
            return self.scheduler.abandon_plan()
        except Exception:
            self._failed("build_connector_meta")
            return IDLE

    @_guarded(lambda: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take acknowledgements and finished loads, and notice other connectors' failed ones."""
        scheduler = self.scheduler
        if scheduler is None:
            return
        report = connector_output.kv_connector_worker_meta
        received = connector_output.finished_recving
        try:
            if report is not None or received:
                ours = report if isinstance(report, WorkerReport) else None
                if ours is not None and ours.handshakes:
                    self._meet(scheduler, ours.handshakes)
                scheduler.report(ours, received or (), connector_output.failed_recving)
        finally:
            if connector_output.invalid_block_ids:
                scheduler.distrust()

    @_guarded(lambda: (False, None))
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never keep a request's blocks: what is being saved is pinned block by block."""
        if self.scheduler is not None:
            self.scheduler.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never keep a request's blocks, also when it is aborted during a load."""
        return self.request_finished(request, [])

    @_guarded(lambda: False)
    def register_finished_partial_tail(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        """Pin the blocks of a state at the end of a request; the request's own may go."""
        if self.scheduler is not None:
            self.scheduler.finished_tail(request, block_ids, partial_tail_offloads)
        return False

    def has_pending_block_frees(self) -> bool:
        """Whether pins will soon go, so that waiting beats preempting."""
        if self.scheduler is None:
            return False
        # vLLM asks when it has no blocks for a request that runs.
        self.scheduler.short_of_blocks = True
        return self.scheduler.pending_frees()

    def has_pending_push_work(self) -> bool:
        """Whether the engine must go on stepping for the workers' acknowledgements."""
        return self.scheduler is not None and self.scheduler.pending()

    @_guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        """Begin an epoch that shares nothing with what is stored."""
        return self.scheduler is None or self.scheduler.reset()

    # Both sides

    @_guarded(lambda: None)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Give the counters of scheduler half and store, about once a second. vLLM asks in each
        step, so the store's messages are logged here.
        """
        if self.scheduler is not None or self.worker is not None:
            _messages.pass_on(log)
        stats = None if self.scheduler is None else self.scheduler.stats()
        if stats is not None and self._growth is not None:
            stats.data.update(self._growth.take())
        return stats

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Rebuild the counters in vLLM's front end."""
        return CacheStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any, **named: Any) -> CacheMetrics:
        """Make the counters part of vLLM's `/metrics`."""
        return CacheMetrics(*arguments, **named)

    @_guarded(lambda: None)
    def shutdown(self) -> None:
        """Finish copies, write back, leave the pool; each step is bounded. Safe to repeat."""
        worker, self.worker = self.worker, None
        if worker is not None:
            self._store_rest(worker)
            worker.shutdown()
            _drained_workers[worker.name] = worker
            _messages.pass_on(log)
        # Who still has us, as an engine's exception does, must not keep the pool in use.
        scheduler, self.scheduler, self._growth = self.scheduler, None, None
        if scheduler is not None:
            for name in self._workers:
                _schedulers.pop(name, None)
                drained = _drained_workers.pop(name, None)
                if drained is not None:
                    scheduler.drained(drained.take_report())
            scheduler.shutdown()
            _messages.pass_on(log)

    def _store_rest(self, worker: WorkerHalf) -> None:
        """Begin to copy what no step was left for, where no message to other ranks is needed."""
        scheduler = _schedulers.get(worker.name)
        if scheduler is not None and scheduler.ranks == 1:
            try:
                worker.mark_computed()
                worker.start_stores(scheduler.plan_rest())
            except Exception:
                self._failed("shutdown")


class MiniCacheConnector(CacheConnector):
    """KV of models with full attention in every layer, in chunks, in shared memory and on disk."""

    _hybrid = False


class LakeCacheConnector(CacheConnector):
    """The connector for every model: it serves those with full attention in every layer, and those
    with recurrent state besides attention, and declines others.
    """


def _outermost(connector: CacheConnector) -> Any:
    """The connector that vLLM's worker has, which may be one that holds several."""
    return get_kv_transfer_group() if has_kv_transfer_group() else connector


def _rank_of_worker() -> int:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())
