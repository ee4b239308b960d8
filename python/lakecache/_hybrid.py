"""The scheduler half for models with recurrent state: chunks of attention and checkpoints.

A checkpoint at N tokens is the chunks of the full blocks before N and one state object: the
recurrent state of all layers after exactly N tokens and, where N lies inside of a block, what the
pages of attention hold of that block. A state serves only its own N; chunks are shared by all
checkpoints of a chain. vLLM says where there are states: it hands the blocks over that hold one, in
the step that computes it, and nobody writes to such a block again.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any

from lakecache._boundaries import Boundaries
from lakecache._metadata import IDLE, StepPlan
from lakecache._objects import KEY_BYTES, KIND_CHUNK, KIND_STATE, Geometry
from lakecache._policy import Choice, Hit
from lakecache._scheduler import LOAD_ATTEMPTS, SchedulerHalf
from lakecache._state_saver import StateSaver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from lakecache._records import Tracked

__all__ = ["HybridSchedulerHalf"]

# Complete checkpoints that a look-up gives to choose from.
CANDIDATES = 4
# States remembered as worth keeping.
REUSED_MAX = 4096


# A complete checkpoint: its place among the multiples of the hash unit, the chunks it needs, how
# many of those are in memory, and whether the state is.
Candidate = tuple[int, int, int, bool]


class HybridSchedulerHalf(SchedulerHalf):
    """See the module's text; what is not here is as with full attention."""

    def __init__(
        self, vllm_config: VllmConfig, *args: Any, geometry: Geometry, **kwargs: Any
    ) -> None:
        """Take what `SchedulerHalf` takes."""
        super().__init__(vllm_config, *args, geometry=geometry, **kwargs)
        self._shape_at = geometry.state_shape
        # States that were hit, and junctions: more than one prompt continues them.
        self._reused: OrderedDict[bytes, None] = OrderedDict()
        self.boundaries = Boundaries(vllm_config, geometry)
        self.state_saver = StateSaver(
            self._cache, self.saves, self.chunk_saver, self.keys, self.boundaries,
            groups=self._groups, geometry=geometry, counts=self.counts, config=self._config,
            object_bytes=self._bytes, note_reused=self._note_reused,
        )  # fmt: skip

    # Lookup

    def matched(self, request: Request, local: int) -> tuple[int | None, bool]:
        """Answer how far beyond `local` the deepest checkpoint is; hold a lease on all of it."""
        tracked = self._asking(request, local)
        # vLLM asks behind whole blocks, and which chunks a state needs is counted from there.
        if tracked is None or local % self.block:
            return 0, False
        answer = self._lease_checkpoint(tracked, local)
        # Before it cuts the prompt into steps: have vLLM keep the state here, too.
        request.shared_prefix_boundary = max(request.shared_prefix_boundary, tracked.junction)
        return answer

    def _lease_checkpoint(self, tracked: Tracked, local: int) -> tuple[int | None, bool]:
        while tracked.short_leases < LOAD_ATTEMPTS and self._take_checkpoint(tracked, local):
            held = self._held(tracked)
            if held is None:
                return None, False
            if held >= tracked.objects:
                tracked.early = self._fits_step(tracked, tracked.objects)
                return tracked.end - local, True
            # A part is gone since the lookup: without it the rest is of no use.
            tracked.short_leases += 1
            self._drop_lease(tracked)
        self._drop_lease(tracked)
        return 0, False

    def _take_checkpoint(self, tracked: Tracked, local: int) -> bool:
        first = local // self.block
        if tracked.lease is not None:
            if tracked.first == first:
                return True
            self._drop_lease(tracked)
        chunks = self.keys.chunks(tracked)[first * KEY_BYTES :]
        present, per_block = self._cache.lookup(chunks)[0], self.block // self.unit
        # No state is of use beyond the block behind the chunks that are there: of a new prompt the
        # first few keys of hundreds are made.
        begin = local // self.unit
        last = begin + (present + 1) * per_block - 1
        last = min(last, (tracked.request.num_tokens - 1) // self.unit)
        states = self.keys.states(tracked, begin, last)
        if not states:
            return False
        found = self._cache.lookup_checkpoints(chunks, states, per_block, CANDIDATES)
        tracked.junction = self._junction(tracked, local, present, found)
        chosen = self._choose_checkpoint(tracked, local, found)
        if chosen is None:
            return False
        at, need, *_ = chosen
        state = states[at * KEY_BYTES : (at + 1) * KEY_BYTES]
        tracked.lease = self._cache.lease(chunks[: need * KEY_BYTES] + state)
        tracked.first = first
        tracked.objects = need + 1
        tracked.end = local + (at + 1) * self.unit
        return True

    def _junction(self, tracked: Tracked, local: int, present: int, found: list[Candidate]) -> int:
        """Give where a stored prompt parts from this one, if there is no state yet; else 0.

        vLLM sees that itself, and keeps a state there, for what it still has in its own cache.
        """
        deepest = local + (found[0][0] + 1) * self.unit if found else local
        parts = local + present * self.block
        # From its last block boundary on, the prompt has states anyway.
        return parts if deepest < parts < self.boundaries.last_block(tracked.request) else 0

    def _choose_checkpoint(
        self, tracked: Tracked, local: int, found: list[Candidate]
    ) -> Candidate | None:
        """Give the checkpoint worth loading of those found, the deepest first."""
        if self.policy is None or not found:
            return next(iter(found), None)
        ends = [local + (at + 1) * self.unit for at, *_ in found]
        blocks = [-(-(end - local) // self.block) for end in ends]
        choice = tracked.choice
        if choice is None or (choice.local, choice.offered) != (local, blocks[0]):
            memory, disk = [], []
            for end, (_, need, in_memory, state_in_memory) in zip(ends, found, strict=True):
                state = self._bytes(self._shape_at(end))
                memory.append(in_memory * self._bytes(KIND_CHUNK) + state * state_in_memory)
                disk.append(
                    (need - in_memory) * self._bytes(KIND_CHUNK) + state * (not state_in_memory)
                )
            number = self.policy.decide(
                Hit(
                    tracked.request.num_tokens, local, ends[::-1], memory[::-1], disk[::-1],
                    same_step=self._alone(), stops=partial(self.boundaries.stops, tracked.request),
                )
            )  # fmt: skip
            choice = Choice(local, blocks[0], blocks[-number] if number else 0)
            tracked.choice = choice
        chosen = (one for one, size in zip(found, blocks, strict=True) if size == choice.taken)
        return next(chosen, None)

    # Allocation

    def leaves_rest(self, request: Request) -> bool:
        """Whether the load that `matched` promised leaves bytes of its last block as they are."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.end % self.block == 0:
            return False
        whole = self._bytes(KIND_STATE) + self._bytes(KIND_CHUNK)
        return self._bytes(self._shape_at(tracked.end)) < whole

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """See `SchedulerHalf.allocated`."""
        super().allocated(request, blocks, external)
        tracked = self._track(request)
        tracked.kept = max(tracked.kept, tracked.local + external)

    def _first_computed(self, local: int, external: int) -> int:
        # A state inside of a block comes with the beginning of that block, and no chunk of it.
        return (local + external) // self.block

    def _start_load(self, tracked: Tracked, tables: Sequence[Sequence[int]], external: int) -> None:
        end, groups = tracked.end, self._groups
        if tracked.local + external != end:
            self._unplanned(tracked)
            return
        last = (end - 1) // self.block
        state = array("i", [tables[group][last] for group in groups.states])
        if end % self.block:
            state.extend(tables[group][last] for group in groups.attention)
        objects = [
            (KIND_CHUNK, self._chunk_blocks(tables, index, tracked.local))
            for index in range(tracked.first, end // self.block)
        ]
        objects.append((self._shape_at(end), state.tobytes()))
        if not all(state):
            self._unplanned(tracked)
            return
        if not self._start(tracked, objects, external):
            return
        key = self.keys.state(tracked, end)
        chunks = tracked.keys[: end // self.block * KEY_BYTES]
        # A state that is about to be continued by a deeper one may not be read again: it keeps its
        # age, until a second hit shows that several prompts continue it.
        again = key in self._reused or self.boundaries.last(tracked.request) <= end
        self._cache.touch(chunks + key if again else chunks)
        self._note_reused(key)

    def _note_reused(self, key: bytes) -> None:
        self._reused[key] = None
        self._reused.move_to_end(key)
        if len(self._reused) > REUSED_MAX:
            self._reused.popitem(last=False)

    def _prompt_end(self, request: Request) -> int:
        # Chunks behind the last state would have no reader.
        return self.boundaries.last(request)

    # Saves

    def plan_step(self, output: SchedulerOutput) -> StepPlan:
        """Say what the workers do in this step, what vLLM hands over in it included."""
        plan = super().plan_step(output)
        tables = output.kv_connector_block_state
        offered = {} if tables is None else tables.boundary_state_offloads
        if not offered and not self.state_saver:
            return plan
        # Where planning fails from here on, the workers are told of all that is in it.
        plan = self._plan = plan or StepPlan()
        if self.stores_begin():
            self.state_saver.plan(plan)
        for request_id, entries in offered.items():
            tracked = self._tracked.get(request_id)
            table = tables.get_block_ids(request_id)
            if tracked is not None and table is not None:
                self.state_saver.take(tracked, entries, table)
        self.state_saver.mark(plan)
        return plan if plan else IDLE

    def plan_rest(self) -> StepPlan:
        """See `SchedulerHalf.plan_rest`."""
        plan = super().plan_rest()
        self.state_saver.clear(self.saves.ended)
        self.state_saver.plan(plan)
        return plan

    def finished_tail(
        self,
        request: Request,
        table: Sequence[Sequence[int]],
        entries: Sequence[tuple[int, int, int]],
    ) -> None:
        """Take the state of a request that ends; it is stored in a later step."""
        tracked = self._tracked.get(request.request_id)
        if tracked is not None:
            self.state_saver.take(tracked, entries, table)

    # The rest

    def pending_stores(self) -> bool:
        """See `SchedulerHalf.pending_stores`."""
        return super().pending_stores() or bool(self.state_saver)

    def reset(self) -> bool:
        """See `SchedulerHalf.reset`."""
        self.state_saver.clear()
        self._reused.clear()
        return super().reset()
