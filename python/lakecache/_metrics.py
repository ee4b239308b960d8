"""The counters of an engine: what the connector counts and what its store does, for vLLM's log and
its Prometheus endpoint.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

__all__ = ["CacheMetrics", "StoreGrowth"]

# Of the store's own counters those that say whether a tier is too small, or fails.
STORE_COUNTERS = (
    "memory_evictions",
    "disk_evictions",
    "disk_read_bytes",
    "write_bytes",
    "write_errors",
    "writes_no_room",
    "read_errors",
    "damaged",
)
COUNTERS = (
    "stores",
    "stores_failed",
    "stores_put_off",
    "stores_dropped",
    "states",
    "states_dropped",
    "loads",
    "loads_failed",
    "loads_broken",
    "loads_stalled",
    "unplanned_loads",
    "loads_same_step",
    "loads_early",
    "loaded_tokens_memory",
    "loaded_tokens_disk",
    "hits_taken",
    "hits_shortened",
    "hits_declined",
    "tokens_declined",
    "requests_not_stored",
    "requests_not_loaded",
    "params_refused",
    "open_timeouts",
    "namespace_full",
    "resets",
    "errors",
    *STORE_COUNTERS,
)


class StoreGrowth:
    """What the scheduler's store has counted since it was last asked."""

    def __init__(self, cache: Any) -> None:
        """Begin with what is counted already: evictions from memory are those of the pool."""
        self._cache = cache
        self._before = self._now()

    def take(self) -> dict[str, int]:
        """Give the growth of each counter that has grown."""
        now = self._now()
        grown = {name: now[name] - self._before[name] for name in STORE_COUNTERS}
        self._before = now
        return {name: count for name, count in grown.items() if count}

    def _now(self) -> dict[str, int]:
        # Without a disk there are no counters of it.
        stats = self._cache.stats()
        return {name: stats.get(name, 0) for name in STORE_COUNTERS}


class CacheMetrics(KVConnectorPromMetrics):
    """One metric of vLLM's front end, `vllm:lakecache_total`, with the counters' names as label."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Register it, every counter at zero, so that the first event is a growth."""
        super().__init__(*arguments, **named)
        # By the beginning of a name vLLM knows what an earlier engine of the process has left.
        self._metric = self._counter_cls(
            name="vllm:lakecache",
            documentation="What LakeCache counts, by name: its docs/operations.md explains each.",
            labelnames=[*self._labelnames, "counter"],
        )
        for engine in self.per_engine_labelvalues:
            self.observe(dict.fromkeys(COUNTERS, 0), engine)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counters."""
        values = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            self._metric.labels(*values, name).inc(count)
