"""What the benches run inside vLLM's engine: a worker extension.

vLLM imports this module (`worker_extension_cls`) before it makes any connector, and with one rank
the worker lives in the engine core's process, so the extension reaches both halves. Its methods
are called by name through `LLM.collective_rpc`, between engine steps.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

from _connectors import SwitchConnector
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector import factory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.scheduler import Scheduler

# Connectors made in this process: (role, seconds in the constructor, connector).
created: list[tuple[KVConnectorRole, float, Any]] = []
registering: list[float] = []
schedulers: list[Any] = []
cores: list[Any] = []
SEARCH_DEPTH = 4
# What the engine calls in every step, in the scheduler and in the model runner.
STEP_CALLS = (
    "build_connector_meta", "update_connector_output", "take_events", "get_kv_connector_stats",
    "has_pending_push_work", "has_pending_block_frees", "handle_preemptions",
    "bind_connector_metadata", "start_load_kv", "finish_forward", "wait_for_save",
    "get_transfer_results", "get_block_ids_with_load_errors", "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta", "clear_connector_metadata", "wait_for_layer_load",
    "save_kv_layer",
)  # fmt: skip


def _watch_creation() -> None:
    make = factory.KVConnectorFactory.create_connector.__func__
    begin = Scheduler.__init__

    def create_connector(cls, *args, **kwargs):
        started = time.perf_counter()
        connector = make(cls, *args, **kwargs)
        role = kwargs.get("role", args[1] if len(args) > 1 else None)
        created.append((role, time.perf_counter() - started, connector))
        register = connector.register_kv_caches

        def timed_register(*caches, **named):
            started = time.perf_counter()
            register(*caches, **named)
            registering.append(time.perf_counter() - started)

        connector.register_kv_caches = timed_register
        return connector

    def init(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        schedulers.append(self)
        # The engine core makes the scheduler and keeps no reference to itself anywhere.
        frame = sys._getframe(1)
        while frame is not None:
            caller = frame.f_locals.get("self")
            if any(base.__name__ == "EngineCore" for base in type(caller).__mro__):
                cores.append(caller)
                break
            frame = frame.f_back

    factory.KVConnectorFactory.create_connector = classmethod(create_connector)
    Scheduler.__init__ = init


_watch_creation()


def _find(root: Any, wanted: Any, depth: int = SEARCH_DEPTH) -> Any:
    """Look through an object's attributes for the first that `wanted` accepts."""
    if wanted(root):
        return root
    if depth == 0 or type(root).__module__.split(".")[0] != "lakecache":
        return None
    for value in list(getattr(root, "__dict__", {}).values()):
        if (found := _find(value, wanted, depth - 1)) is not None:
            return found
    return None


def _is_cache(thing: Any) -> bool:
    return type(thing).__name__ == "Cache" and hasattr(thing, "flush")


def _is_half(thing: Any) -> bool:
    return hasattr(thing, "counts") and hasattr(thing, "explain")


def _measured(half: Any) -> dict[str, Any]:
    """The measurements that a load policy keeps."""
    policy = getattr(half, "policy", None)
    if policy is None:
        return {}
    fits = {"prefill": policy.prefill.fit, "memory": policy.memory.fit, "step": policy.step.fit,
            "disk": policy.disk.fit}  # fmt: skip
    return {name: fit.samples() for name, fit in fits.items()}


class Extension:
    """Mixed into vLLM's worker class; every method is a remote call of the benches."""

    def bench_started(self) -> dict[str, Any]:
        """Say how long the connectors took to make, and what the engine runs with."""
        scheduler = schedulers[-1]
        runner = self.model_runner
        return {
            "constructor_s": {str(role): spent for role, spent, _ in created},
            "register_s": sum(registering),
            "runner": type(runner).__module__,
            "layout": str(getattr(scheduler.kv_cache_config, "kv_cache_layout", None)),
            "num_gpu_blocks": scheduler.kv_cache_config.num_blocks,
            "block_tokens": [
                group.kv_cache_spec.block_size
                for group in scheduler.kv_cache_config.kv_cache_groups
            ],
            "declined": self._bench_declined(),
        }

    def _bench_declined(self) -> dict[str, str | None]:
        arms = self._bench_arms(KVConnectorRole.SCHEDULER)
        said = {}
        for name, arm in arms.items():
            half = getattr(arm, "scheduler", None) if "LakeCache" in type(arm).__name__ else None
            said[name] = getattr(arm, "declined", None) or getattr(half, "declined", None)
        return said

    def _bench_arms(self, role: KVConnectorRole) -> dict[str, Any]:
        for known, _, connector in created:
            if known == role:
                if isinstance(connector, SwitchConnector):
                    return connector.arms
                return {"": connector}
        return {}

    def bench_activate(self, name: str | None) -> None:
        """Give the engine an arm's connector, none (None), or all of them back ("*").

        Blocks are freed behind the step in flight in every arm: switching that too would leave
        vLLM's count of steps behind.
        """
        scheduler, runner = schedulers[-1], self.model_runner
        if not hasattr(self, "_bench_original"):
            self._bench_original = (
                scheduler.connector,
                kv_transfer_state._KV_CONNECTOR_AGENT,
                getattr(runner, "kv_connector", None),
            )
        connector, agent, wrapper = self._bench_original
        if name is None:
            scheduler.connector = kv_transfer_state._KV_CONNECTOR_AGENT = None
        else:
            if name != "*":
                connector = self._bench_arms(KVConnectorRole.SCHEDULER)[name]
                agent = self._bench_arms(KVConnectorRole.WORKER)[name]
            scheduler.connector = connector
            kv_transfer_state._KV_CONNECTOR_AGENT = agent
            scheduler.requires_kv_delivery = connector.requires_kv_delivery
        if wrapper is not None:
            from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR

            runner.kv_connector = NO_OP_KV_CONNECTOR if name is None else wrapper
            wrapper.kv_connector = agent

    def bench_pending(self) -> bool:
        """Whether requests run or copies to the host are under way."""
        scheduler = schedulers[-1]
        if scheduler.has_requests() or scheduler.has_finished_requests():
            return True
        return any(core.batch_queue for core in cores)

    def bench_wait_ready(self, seconds: float) -> bool:
        """Wait until the identity of the weights is known (LakeCache)."""
        half = _find(schedulers[-1].connector, lambda thing: hasattr(thing, "wait_ready"))
        return half is None or bool(half.wait_ready(seconds))

    def bench_flush(self, seconds: float) -> bool:
        """Wait until what is in memory is also on disk (LakeCache)."""
        cache = _find(schedulers[-1].connector, _is_cache)
        return cache is None or bool(cache.flush(seconds))

    def bench_counters(self) -> dict[str, Any]:
        """Counters of LakeCache's scheduler half since its start."""
        half = _find(schedulers[-1].connector, _is_half)
        return {} if half is None else dict(half.counts.since_start())

    def bench_estimates(self) -> dict[str, Any]:
        """What LakeCache's load policy believes, and its last decision."""
        half = _find(schedulers[-1].connector, _is_half)
        return {} if half is None else half.explain() | {"measured": _measured(half)}

    def bench_cache_stats(self) -> dict[str, Any]:
        """The core's own counters and gauges (LakeCache)."""
        cache = _find(schedulers[-1].connector, _is_cache)
        if cache is None or not hasattr(cache, "stats"):
            return {}
        stats = cache.stats() if callable(cache.stats) else cache.stats
        return {
            name: value for name, value in dict(stats).items() if isinstance(value, int | float)
        }

    def bench_clear_memory(self) -> int:
        """Empty the memory tier, so that only files are left (LakeCache)."""
        cache = _find(schedulers[-1].connector, _is_cache)
        return 0 if cache is None else int(cache.clear_memory())

    def bench_events(self) -> list[dict[str, Any]]:
        """What the store has done since the last call (LakeCache)."""
        cache = _find(schedulers[-1].connector, _is_cache)
        events = [] if cache is None else cache.events()
        return [{name: event[name] for name in ("tier", "op", "bytes")} for event in events]

    def bench_burn(self, seconds: float) -> None:
        """Keep the GPU busy, so that what follows finds its clocks up."""
        import torch

        if not torch.cuda.is_available():
            return
        matrix = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            for _ in range(10):
                torch.mm(matrix, matrix)
            torch.cuda.synchronize()

    def bench_link(self, nbytes: int, repeats: int) -> dict[str, float]:
        """Bandwidth of one large copy each way, registered memory, GB/s (median)."""
        import statistics

        import torch

        if not torch.cuda.is_available():
            source, target = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes).byte()
            started = time.perf_counter()
            target.copy_(source)
            rate = nbytes / (time.perf_counter() - started) / 1e9
            return {"h2d": rate, "d2h": rate}
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        rates = {}
        for name, target, source in (("h2d", device, host), ("d2h", host, device)):
            seen = []
            for _ in range(repeats + 1):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                target.copy_(source, non_blocking=True)
                end.record()
                end.synchronize()
                seen.append(nbytes / begin.elapsed_time(end) / 1e6)
            rates[name] = statistics.median(seen[1:])
        del host, device
        torch.cuda.empty_cache()
        return rates

    def bench_time_calls(self, on: bool) -> dict[str, Any]:
        """Time the active connector's calls from now on; or stop, and give (calls, seconds)."""
        halves = [schedulers[-1].connector, kv_transfer_state._KV_CONNECTOR_AGENT]
        halves = [half for half in halves if half is not None]
        if not on:
            for half in halves:
                for name in STEP_CALLS:
                    half.__dict__.pop(name, None)
            return self._bench_timed
        self._bench_timed: dict[str, list[float]] = {}
        for half in dict.fromkeys(halves):
            for name in STEP_CALLS:
                setattr(half, name, self._bench_wrapped(name, getattr(half, name)))
        return {}

    def _bench_wrapped(self, name: str, method: Any) -> Any:
        seen = self._bench_timed.setdefault(name, [0, 0.0])
        clock = time.perf_counter

        def timed(*args, **kwargs):
            started = clock()
            try:
                return method(*args, **kwargs)
            finally:
                seen[0] += 1
                seen[1] += clock() - started

        return timed

    def bench_stages(self) -> list[list[Any]]:
        """What the engine core did since the last call: [what, tokens of the step, begin, end], as
        perf_counter() gives it in any process; nothing before the first call.
        """
        if not hasattr(self, "_bench_stages"):
            self._bench_stages: list[list[Any]] = []
            core, scheduler = cores[-1], schedulers[-1]
            for owner, names in (
                (core, ["add_request"]),
                (scheduler, ["schedule", "update_from_output"]),
                (core.model_executor, ["execute_model", "sample_tokens"]),
            ):
                for name in names:
                    setattr(owner, name, self._bench_noted(name, getattr(owner, name)))
        seen, self._bench_stages[:] = list(self._bench_stages), []
        return seen

    def _bench_noted(self, name: str, method: Any) -> Any:
        seen, clock = self._bench_stages, time.perf_counter

        def noted(*args, **kwargs):
            started = clock()
            result = method(*args, **kwargs)
            ended = clock()
            tokens = [
                step.total_num_scheduled_tokens
                for step in (result, *args)
                if hasattr(step, "total_num_scheduled_tokens")
            ]
            seen.append([name, tokens[0] if tokens else None, started, ended])
            return result

        return noted

    def bench_collect(self) -> None:
        """Collect garbage now rather than while something is measured."""
        gc.collect()
