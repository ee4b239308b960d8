"""From computed chunks to stores: whose prompts are saved, as far as they are computed.

A step that completes chunks pins their blocks. They wait in the backlog for slots, which they get
in later steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lakecache._backlog import Backlog, is_late
from lakecache._objects import KEY_BYTES, Geometry

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from lakecache._keys import RequestKeys
    from lakecache._metadata import StepPlan, Tally
    from lakecache._records import Tracked
    from lakecache._saves import Saves

__all__ = ["ChunkSaver"]


class ChunkSaver:
    """The requests whose chunks are still to be pinned, and the backlog of those that are.

    A request's chunks stay in the backlog when it ends.
    """

    def __init__(
        self, cache: Any, saves: Saves, keys: RequestKeys, *, groups: Sequence[int],
        geometry: Geometry, counts: Tally, chunk_bytes: Callable[[], int], save_decode: bool,
        prompt_end: Callable[[Request], int],
    ) -> None:  # fmt: skip
        """Take the groups of attention. `prompt_end` gives up to which token of a prompt chunks
        have a use; with `save_decode` chunks beyond that are saved, too.
        """
        self._cache = cache
        self._keys = keys
        self._groups = groups
        self._chunk, self._block, self._unit = geometry
        self._counts = counts
        self._save_decode = save_decode
        self._prompt_end = prompt_end
        self._requests: dict[str, Tracked] = {}
        self.backlog = Backlog(
            cache, saves, chunk=self._chunk, counts=counts, chunk_bytes=chunk_bytes
        )

    def __bool__(self) -> bool:
        """Whether `plan` has something to do."""
        return bool(self._requests or self.backlog.runs)

    def __contains__(self, tracked: Tracked) -> bool:
        """Whether more chunks of this request may get slots."""
        return tracked.request.request_id in self._requests or tracked in self.backlog

    def begin(self, tracked: Tracked, computed: int) -> None:
        """Save the chunks that are not stored, and those from `computed` on that are on disk alone,
        if its client lets it be stored; refresh what is stored. Nothing changes for a request that
        was begun before.

        `computed` is the first chunk that the request does not find in the GPU, nor loads as a
        whole.
        """
        if tracked.next_save >= 0 or tracked.request.resumable:
            return
        if tracked.stores:
            self._requests[tracked.request.request_id] = tracked
        keys = self._keys.chunks(tracked)[: self._limit(tracked) * KEY_BYTES]
        # Should the look-up raise, all is saved.
        tracked.next_save = tracked.pinned = 0
        if keys:
            stored, in_memory = self._cache.lookup(keys)
            if stored and tracked.load is None:
                self._cache.touch(keys[: stored * KEY_BYTES])
            if computed < stored and in_memory < stored:
                again, in_memory = self._cache.lookup(keys[computed * KEY_BYTES :])
                if in_memory < again:
                    # Its next reader shall not have to compute it, too, where the disk is slow.
                    stored = computed
            tracked.next_save = tracked.pinned = stored

    def _limit(self, tracked: Tracked) -> int:
        request = tracked.request
        if self._save_decode:
            return len(request.block_hashes) * self._unit // self._chunk
        return self._prompt_end(request) // self._chunk

    def plan(
        self, plan: StepPlan, output: SchedulerOutput, tokens_before: int, *, short: bool,
        begin: bool,
    ) -> None:  # fmt: skip
        """Pin the chunks that this step completes; where stores may `begin`, give slots to some of
        the backlog.

        `tokens_before` are those of the step before; `short` is whether vLLM lacks blocks.
        """
        tokens = output.total_num_scheduled_tokens
        if begin and self.backlog and (most := self.backlog.allowed(tokens, tokens_before)):
            for tracked in self.backlog.plan(plan, most, short=short):
                if self._requests.get(tracked.request.request_id) is tracked:
                    del self._requests[tracked.request.request_id]
        if self._requests:
            plan.pinned = self._pin_computed(output)

    def _pin_computed(self, output: SchedulerOutput) -> bool:
        """Pin the blocks of the chunks that this step completes; whether there are any."""
        pinned = False
        for request_id, tracked in list(self._requests.items()):
            scheduled = output.num_scheduled_tokens.get(request_id)
            if scheduled is None:
                continue
            request = tracked.request
            computed = request.num_computed_tokens + scheduled
            if self._save_decode:
                settled = request.num_tokens - 1 - request.num_output_placeholders
                computed = min(computed, max(settled, request.num_prompt_tokens))
            else:
                computed = min(computed, request.num_prompt_tokens)
            ready = min(computed // self._chunk, self._limit(tracked))
            if 0 <= tracked.pinned < ready:
                pinned |= self._pin(tracked, ready, output)
            finished = not self._save_decode and tracked.pinned >= self._limit(tracked)
            if not finished and is_late(tracked.put_off):
                finished = True
                self._counts["stores_dropped"] += 1
            if finished:
                del self._requests[request_id]
        return pinned

    def _pin(self, tracked: Tracked, ready: int, output: SchedulerOutput) -> bool:
        request_id, state = tracked.request.request_id, output.kv_connector_block_state
        table = state.get_block_ids(request_id) if state is not None else None
        if not self._keys.chunks(tracked) or table is None:
            return False
        tables = [table[group] for group in self._groups]
        pinned = self.backlog.pin(tracked, ready, tables, self._chunk // self._block)
        if pinned:
            # If it is not through, it goes on behind the others.
            self._requests[request_id] = self._requests.pop(request_id)
        return pinned

    def start_over(self, tracked: Tracked) -> None:
        """Have `begin` look anew at what is stored of a request."""
        self.backlog.drop(tracked)
        tracked.next_save = tracked.pinned = -1

    def stop_all(self) -> None:
        """Give up all chunks that are not on their way yet."""
        self._requests.clear()
        self.backlog.clear()

    def finished(self, request_id: str) -> None:
        """Expect no more chunks of a request that has ended."""
        self._requests.pop(request_id, None)
