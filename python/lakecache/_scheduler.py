"""The scheduler half: what to load, what to save, and for how long to hold on to it.

It runs on the engine core's only thread, so nothing here blocks: lookups are lock-free, disk opens
happen on I/O threads while vLLM is told to ask again, and an idle step costs one test.

Life of a load: lookup, lease (`matched`), allocation starts it (`allocated`), slots stream to the
workers (`plan_step`), ranks acknowledge chunks and report the request (`report`), the lease closes.
Life of a store: the step that computes a chunk pins its blocks, a later one reserves a slot
(`plan_step`), all ranks acknowledge (`report`), commit or abandon, the pins go. What is not done in
the step itself costs its request nothing: the GPU is at work meanwhile, or nobody waits.
"""

from __future__ import annotations

import logging
import sys
import time
from array import array
from bisect import bisect_left
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lakecache._chunk_saver import ChunkSaver
from lakecache._keys import RequestKeys
from lakecache._loads import Loads
from lakecache._metadata import IDLE, CacheStats, Handshake, StepPlan, Tally, WorkerReport
from lakecache._objects import KEY_BYTES, KIND_CHUNK, Geometry
from lakecache._policy import LoadPolicy
from lakecache._records import Tracked
from lakecache._request_params import ParamsReader
from lakecache._saves import Saves
from lakecache._spaces import Namespaces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from lakecache._pages import Groups
    from lakecache.config import CacheConfig

__all__ = ["SchedulerHalf"]

log = logging.getLogger("vllm.lakecache")

# How long a request may be told to ask again while files are opened.
OPEN_SECONDS = 1.0
# A request whose loads failed this often is computed.
LOAD_ATTEMPTS = 2
DRAIN_SECONDS = 5.0


class SchedulerHalf:
    """See the module's text. Methods may raise: the connector turns that into a miss."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        config: CacheConfig,
        cache: Any,
        *,
        groups: Groups,
        geometry: Geometry,
        unstable: str | None,
    ) -> None:
        """Take an open cache; `unstable` says why keys must not outlive this process."""
        self._config = config
        self._to_disk = not unstable
        self._cache = cache
        self._groups = groups
        self.chunk, self.block, self.unit = geometry
        if self.chunk != config.chunk_size:
            log.info(
                "LakeCache: chunk_size %d becomes %d, a multiple of the engine's block of %d",
                config.chunk_size, self.chunk, self.block,
            )  # fmt: skip
        parallel = vllm_config.parallel_config
        self.ranks: int = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        # Bytes of one rank's part of an object, by shape.
        self.part_bytes: dict[int, int] = {}
        self.declined: str | None = None
        self._tracked: dict[str, Tracked] = {}
        # Of the step before, which the GPU may still be computing.
        self._tokens_before = 0
        # Steps in a row, with the one that is planned, in which no stores begin.
        self._held_back = 0
        self._same_step = False
        # Since the last step was planned: whether vLLM had no blocks for a request that runs, and
        # for the last one that was to begin.
        self.short_of_blocks = False
        self.unplaced = False
        self._plan = IDLE
        # Counted since the last report to vLLM, and reported before that.
        self.counts = Tally()
        self._params = ParamsReader(self.counts)
        self.loads = Loads(ranks=self.ranks, counts=self.counts)
        self.saves = Saves(
            cache, ranks=self.ranks, num_blocks=kv_cache_config.num_blocks, counts=self.counts,
            write_first=config.transfer == "sync",
        )  # fmt: skip
        self.spaces = Namespaces(
            vllm_config, kv_cache_config, cache,
            chunk=self.chunk, counts=self.counts, unstable=unstable,
        )  # fmt: skip
        self.keys = RequestKeys(self.spaces, geometry)
        self.chunk_saver = ChunkSaver(
            cache, self.saves, self.keys, groups=groups.attention, geometry=geometry,
            counts=self.counts, chunk_bytes=lambda: self._bytes(KIND_CHUNK),
            save_decode=config.save_decode, prompt_end=self._prompt_end,
        )  # fmt: skip
        self.policy: LoadPolicy | None = None
        if config.load_policy == "auto":
            self.policy = LoadPolicy.of(vllm_config, config)
            if config.cache_dir and not unstable:
                self.spaces.when_known = partial(self.policy.file.keep_in, Path(config.cache_dir))

    # Start-up

    def handshake(self, workers: dict[tuple[int, int], Handshake]) -> None:
        """Compare the workers' answers; any disagreement declines caching for good."""
        told = [workers[place] for place in sorted(workers)]
        refused = Handshake.disagreement(told, self.ranks, self._cache.pool_id)
        if refused:
            self._decline(refused)
        else:
            self.part_bytes = told[0].part_bytes
            self.spaces.ranks = [worker.identity for worker in told]
            # A load within the step cannot be taken back, and what is verified may be refused.
            verifies = self._config.verify_load
            self._same_step = all(worker.same_step for worker in told) and not verifies
            log.info(
                "LakeCache keeps prompts in chunks of %d tokens in %s",
                self.chunk, self._config.tiers(disk=self._to_disk),
            )  # fmt: skip
            if told[0].failure_policy != "recompute":
                log.warning(
                    "LakeCache: kv_load_failure_policy is %r, so a request whose load fails is "
                    'failed by vLLM; set "kv_load_failure_policy": "recompute" (with '
                    "MultiConnector: beside its name) to have it computed instead.",
                    told[0].failure_policy,
                )

    def _decline(self, reason: str) -> None:
        self.declined, self.spaces.ranks = reason, None
        log.warning("LakeCache does nothing in this engine: %s.", reason)

    def wait_ready(self, timeout: float) -> bool:
        """Wait for the weights' digest, and say whether keys can be made; for tests and tools,
        never called by the engine.
        """
        self.spaces.wait(timeout)
        return self.spaces.of(None) is not None

    # Lookup

    def matched(self, request: Request, local: int) -> tuple[int | None, bool]:
        """Answer how many tokens beyond `local` can be loaded; hold a lease on them."""
        tracked = self._asking(request, local)
        if tracked is None:
            return 0, False
        first, held = local // self.chunk, self._leased(tracked, local)
        if held is None:
            return None, False
        end = min((first + held) * self.chunk, request.num_tokens - 1)
        if end - local < self.block:
            self._drop_lease(tracked)
            return 0, False
        tracked.same_step = self._fits_step(tracked, -(-end // self.chunk) - first)
        return end - local, not tracked.same_step

    def _leased(self, tracked: Tracked, local: int) -> int | None:
        """Lease the chunks beyond `local` that are worth loading, and give how many they are; None
        while files are being opened.
        """
        # Less than a block is computed faster than it is loaded, and is what remains of a prompt
        # that the GPU holds up to its last block.
        if tracked.request.num_tokens - 1 - local < self.block:
            return 0
        keys = self.keys.chunks(tracked)
        if len(keys) <= local // self.chunk * KEY_BYTES:
            return 0
        if not self._take_lease(tracked, keys, local):
            return 0
        held = self._held(tracked)
        if held is not None and tracked.choice is not None and held < tracked.choice.taken:
            # Less than was hoped for.
            tiers = tracked.lease.tiers()[:held]
            leading = held - len(tiers.lstrip(b"\0"))
            held = self._choose(tracked, local, held, tiers.count(0), leading)
            tracked.lease.truncate(held)
        return held

    def _asking(self, request: Request, local: int) -> Tracked | None:
        """Track a request that asks what lies beyond `local`; None if it may not load."""
        if request.skip_reading_prefix_cache or request.resumable:
            return None
        tracked = self._track(request)
        tracked.local = local
        loads = tracked.loads and tracked.load is None and tracked.failures < LOAD_ATTEMPTS
        return tracked if loads else None

    def _fits_step(self, tracked: Tracked, objects: int) -> bool:
        """Whether a step's forward may wait for the load: all in memory, and nobody to be held up.

        The objects are pinned, so the copies cannot fail, and the request need not wait for the
        engine to take notice of them.
        """
        return self._alone() and not any(tracked.lease.tiers()[:objects])

    def _alone(self) -> bool:
        return self._same_step and len(self._tracked) == 1 and not self.loads.between_steps()

    def _take_lease(self, tracked: Tracked, keys: bytes, local: int) -> bool:
        first = local // self.chunk
        if tracked.lease is not None:
            if tracked.first == first:
                return True
            self._drop_lease(tracked)
        wanted = keys[first * KEY_BYTES :]
        present, in_memory = self._cache.lookup(wanted)
        leading = self._leading(wanted, present, in_memory)
        present = self._choose(tracked, local, present, in_memory, leading)
        if not present:
            return False
        tracked.lease = self._cache.lease(keys[first * KEY_BYTES : (first + present) * KEY_BYTES])
        tracked.first = first
        return True

    def _leading(self, keys: bytes, present: int, in_memory: int) -> int:
        """Give how many of the chunks in memory come before the first on disk alone: what the GPU
        held is not put into memory when what follows it is computed.
        """

        def on_disk(count: int) -> bool:
            return self._cache.lookup(keys[: count * KEY_BYTES])[1] < count

        # Only the policy needs it, and mostly all of them come first.
        if self.policy is None or in_memory in (0, present) or not on_disk(in_memory):
            return in_memory
        return bisect_left(range(1, in_memory), True, key=on_disk)

    def _choose(
        self, tracked: Tracked, local: int, present: int, in_memory: int, leading: int
    ) -> int:
        """Give how many of the chunks that are present are worth loading; so many are in memory,
        and so many of those come first.
        """
        if self.policy is None or not present:
            return present
        tracked.choice = self.policy.choose(
            tracked.choice, tokens=tracked.request.num_tokens, local=local, present=present,
            in_memory=in_memory, leading=leading, chunk=self.chunk,
            chunk_bytes=self._bytes(KIND_CHUNK), same_step=self._alone(),
        )  # fmt: skip
        return tracked.choice.taken

    def _held(self, tracked: Tracked) -> int | None:
        """Give how many leading objects are leased; None while files are being opened."""
        held: int | None = tracked.lease.poll()
        if held is None:
            now = time.monotonic()
            tracked.asked = tracked.asked or now
            if now - tracked.asked < OPEN_SECONDS:
                return None
            # The disk is slow: take what is held by now, or compute.
            self.counts["open_timeouts"] += 1
            held = tracked.lease.settle()
        return held

    def _drop_lease(self, tracked: Tracked) -> None:
        lease, tracked.lease, tracked.asked = tracked.lease, None, None
        if lease is not None:
            lease.close()

    def _track(self, request: Request) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = Tracked(request)
            if request.kv_transfer_params is not None:
                self._params.apply(tracked, request.kv_transfer_params)
            self._tracked[request.request_id] = tracked
        return tracked

    # Allocation

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Start the load that `matched` promised, or let go of it; watch the prompt for saving."""
        self.unplaced = False
        tracked = self._track(request)
        if external > 0:
            self._start_load(tracked, blocks.get_block_ids(), external)
        else:
            self._drop_lease(tracked)
        choice, tracked.choice = tracked.choice, None
        if choice is not None:
            self.counts.update(choice.counters(self.chunk, loads=external > 0))
        self.chunk_saver.begin(tracked, self._first_computed(tracked.local, external))

    def _first_computed(self, local: int, external: int) -> int:
        """Give the first chunk that is neither in the GPU nor loaded as a whole."""
        end = local + external
        # Whole chunks are loaded, also where vLLM computes the last token again.
        return -(-end // self.chunk) if external else end // self.chunk

    def _start_load(self, tracked: Tracked, tables: Sequence[Sequence[int]], external: int) -> None:
        first, end = tracked.first, tracked.local + external
        chunks = -(-end // self.chunk) - first
        ids = tables[self._groups.attention[0]]
        if chunks <= 0 or (first + chunks) * self.chunk // self.block > len(ids):
            self._unplanned(tracked)
            return
        objects = [
            (KIND_CHUNK, self._chunk_blocks(tables, first + index, tracked.local))
            for index in range(chunks)
        ]
        if self._start(tracked, objects, external):
            self._cache.touch(tracked.keys[: (first + chunks) * KEY_BYTES])

    def _unplanned(self, tracked: Tracked) -> None:
        self.counts["unplanned_loads"] += 1
        if tracked.same_step:
            raise RuntimeError("a load within the step was not allocated as it was answered")
        self.fail_load(tracked.request.request_id)

    def _start(self, tracked: Tracked, objects: list[tuple[int, bytes]], external: int) -> bool:
        """Begin to load the leading objects of the lease."""
        lease = tracked.lease
        if lease is None:
            self._unplanned(tracked)
            return False
        self._note_sources(tracked, external)
        load = self.loads.start(tracked, objects)
        if self.policy is not None:
            memory, disk = self._bytes_by_tier(objects, lease.tiers())
            self.policy.load_started(
                load.ident, memory, disk, same_step=load.same_step, early=load.early
            )
        return True

    def _bytes(self, shape: int) -> int:
        """Give the size of an object: the parts of all ranks."""
        return self.ranks * self.part_bytes[shape]

    def _bytes_by_tier(self, objects: Sequence[tuple[int, bytes]], tiers: bytes) -> tuple[int, int]:
        """Give the bytes to load from memory and from disk."""
        sizes = [self._bytes(shape) for shape, _ in objects]
        disk = sum(size for size, tier in zip(sizes, tiers, strict=False) if tier)
        return sum(sizes) - disk, disk

    def fail_load(self, request_id: str) -> None:
        """Have the workers report a load that cannot take place, so that vLLM computes it."""
        self.loads.fail(request_id, self._tracked.get(request_id))

    def promised_this_step(self, request_id: str) -> bool:
        """Whether this request's hit was answered as a load within the step."""
        tracked = self._tracked.get(request_id)
        return tracked is not None and tracked.same_step

    def owes_this_step(self) -> bool:
        """Whether there is a load within the step that the workers have not been told of."""
        return self.loads.owed(self._plan)

    def _note_sources(self, tracked: Tracked, external: int) -> None:
        chunks = -(-(tracked.local + external) // self.chunk) - tracked.first
        tiers = tracked.lease.tiers()[:chunks]
        disk = min((len(tiers) - tiers.count(0)) * self.chunk, external)
        self.counts["loaded_tokens_disk"] += disk
        self.counts["loaded_tokens_memory"] += external - disk
        tracked.from_memory = external - disk

    def sources(self, request: Request, external: int) -> tuple[int, int]:
        """Split a hit that was just allocated into (tokens from memory, tokens from disk)."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.load is None or tracked.load.failed:
            return 0, 0
        memory = min(tracked.from_memory, external)
        return memory, external - memory

    def _prompt_end(self, request: Request) -> int:
        """Give up to which token the chunks of a prompt are worth saving."""
        return int(request.num_prompt_tokens)

    # Each step

    def plan_step(self, output: SchedulerOutput) -> StepPlan:
        """Say what the workers do in this step."""
        self._plan = IDLE
        self.saves.planned += 1
        if self.policy is not None:
            self.policy.step_planned(output)
        tokens, tokens_before = output.total_num_scheduled_tokens, self._tokens_before
        self._tokens_before = tokens
        # Somebody waits for the first step with tokens to begin, and the first without is launched
        # before vLLM takes in the tokens of the one before. But of three such steps in a row, as of
        # steps of either kind by turns, the last one lets stores begin.
        changes = bool(tokens) != bool(tokens_before)
        self._held_back = (self._held_back + 1) % 3 if changes else 0
        short = self.short_of_blocks or self.unplaced
        self.short_of_blocks = self.unplaced = False
        if not self.chunk_saver and not self.loads.to_plan():
            return IDLE
        plan = self._plan = StepPlan()
        self.loads.plan(plan)
        self.chunk_saver.plan(plan, output, tokens_before, short=short, begin=self.stores_begin())
        return plan if plan else IDLE

    def stores_begin(self) -> bool:
        """Whether stores may begin in the step that is planned."""
        return not self._held_back

    def abandon_plan(self) -> StepPlan:
        """Give what a `plan_step` that raised planned itself, all loads failed and no more saves:
        the workers must hear of it, as vLLM waits for the loads, and the stores hold blocks.
        """
        plan, self._plan = self._plan or StepPlan(), IDLE
        self.chunk_saver.stop_all()
        self.loads.fail_all()
        self.loads.tell(plan)
        return plan if plan else IDLE

    def _chunk_blocks(self, tables: Sequence[Sequence[int]], index: int, local: int) -> bytes:
        """Give the blocks of a chunk; those that the GPU holds already are left out (0)."""
        begin = index * self.chunk
        held = min(max(0, local - begin), self.chunk) // self.block
        ids = array("i")
        for group in self._groups.attention:
            ids.extend([0] * held)
            ids.extend(
                tables[group][begin // self.block + held : (begin + self.chunk) // self.block]
            )
        return ids.tobytes()

    # What came back

    def report(
        self, report: WorkerReport | None, received: Iterable[str], failed: Iterable[str]
    ) -> None:
        """Take the workers' acknowledgements and the requests whose loads are over."""
        error: Exception | None = None
        failed = set(failed)
        told: list[Callable[[], None]] = []
        if report is not None:
            self._same_step &= report.same_step
            for job, (good, bad) in report.stores.items():
                told.append(partial(self.saves.copied, job, good, bad))
            for (ident, index), ranks in report.copied.items():
                told.append(partial(self.loads.copied, ident, index, ranks))
        for request_id in received:
            told.append(partial(self._received, request_id, good=request_id not in failed))
        for take in told:
            # Each is said only once, so an error with one must not lose the others.
            try:
                take()
            except Exception as raised:
                error = raised
        if error is not None:
            raise error

    def _received(self, request_id: str, *, good: bool) -> None:
        load = self.loads.received(request_id)
        if load is None:
            return
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.load = None
        if not good:
            self.counts["loads_failed"] += 1
            if tracked is not None:
                tracked.failures += 1
                # It is computed now, so what turned out to be lost can be stored anew.
                self.chunk_saver.start_over(tracked)
        if load.lease is not None:
            load.lease.close()
        if self.policy is not None:
            self.policy.load_ended(load.ident, good=good)

    def distrust(self) -> None:
        """Store nothing of what is computed up to now and not stored yet.

        Another connector could not load some blocks, and says so when a step has read them: what
        that step computed from them is wrong, and so is what a step launched behind it goes on to.
        """
        self.saves.distrust()
        self.chunk_saver.backlog.clear()
        for tracked in self._tracked.values():
            # Without a namespace since a reset, it may have been computed with other weights.
            if tracked.next_save >= 0 and tracked.space is not None:
                self.chunk_saver.start_over(tracked)
                # Not again what is on disk alone: it may be much, of all requests that run.
                self.chunk_saver.begin(tracked, sys.maxsize)

    def finished_tail(
        self,
        request: Request,
        table: Sequence[Sequence[int]],
        entries: Sequence[tuple[int, int, int]],
    ) -> None:
        """Take (group, block, tokens) of a state that vLLM hands over as the request ends; models
        without recurrent state have none.
        """

    def finished(self, request_id: str) -> None:
        """Forget a request. A load under way keeps its lease until the workers report it."""
        tracked = self._tracked.pop(request_id, None)
        self.chunk_saver.finished(request_id)
        if tracked is not None:
            self._drop_lease(tracked)

    # The rest

    def pending_stores(self) -> bool:
        """Whether blocks are pinned for copies that the workers have not acknowledged."""
        return bool(self.saves or self.chunk_saver.backlog)

    def pending_frees(self) -> bool:
        """Whether pins will soon go. Those that wait for room in the store may take seconds."""
        return bool(self.saves) or self.chunk_saver.backlog.moves()

    def pending(self) -> bool:
        """Whether an acknowledgement of the workers is awaited that vLLM knows nothing of."""
        return self.pending_stores() or self.loads.within_step()

    def reset(self) -> bool:
        """Begin an epoch that shares nothing with what is stored: the weights may have changed."""
        for tracked in self._tracked.values():
            self._drop_lease(tracked)
            # What these requests have computed so far may belong to the old weights.
            self.keys.forget(tracked)
            tracked.next_save = max(tracked.next_save, 0)
        self.chunk_saver.stop_all()
        self.loads.fail_all()
        self.spaces.reset()
        self.counts["resets"] += 1
        return True

    def stats(self) -> CacheStats | None:
        """Give the counters at most once a second. vLLM asks once for every step that came back."""
        self.saves.ended += 1
        if self.policy is not None:
            self.policy.step_ended()
        return self.counts.interval() if self.counts else None

    def total(self, name: str) -> int:
        """Give a counter since the start."""
        return self.counts.since_start()[name]

    def explain(self) -> dict[str, Any]:
        """Give the estimates that decide between loading and computing, and the last decision."""
        return {} if self.policy is None else self.policy.explain()

    def plan_rest(self) -> StepPlan:
        """Plan all that waits for slots and is of steps that came back: others may have failed."""
        plan = StepPlan()
        self.chunk_saver.backlog.clear(self.saves.ended)
        self.chunk_saver.backlog.plan(plan, sys.maxsize)
        return plan

    def drained(self, report: WorkerReport | None) -> None:
        """Take the last acknowledgements; what is not of steps that came back is given up."""
        self.saves.abandon(self.saves.ended)
        self.report(report, (), ())

    def shutdown(self) -> None:
        """Give up what is under way, write back what is stored, within a bound; then close."""
        self.saves.abandon()
        self.loads.close()
        for tracked in self._tracked.values():
            self._drop_lease(tracked)
        if self.policy is not None:
            self.policy.file.close()
        self._cache.flush(DRAIN_SECONDS)
        self._cache.close()
