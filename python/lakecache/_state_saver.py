"""From states that vLLM hands over to stores: which ones are kept, and when they get a slot.

A state is stored behind its chunks: without them it would not be found.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lakecache._backlog import PUT_OFF_SECONDS
from lakecache._objects import KEY_BYTES, KIND_STATE, KIND_TAIL, Geometry

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from lakecache._boundaries import Boundaries
    from lakecache._chunk_saver import ChunkSaver
    from lakecache._keys import RequestKeys
    from lakecache._metadata import StepPlan, Tally
    from lakecache._pages import Groups
    from lakecache._records import Tracked
    from lakecache._saves import Saves
    from lakecache.config import CacheConfig

__all__ = ["StateSaver"]


class Offer(NamedTuple):
    """A state that vLLM handed over; its blocks are pinned until it is stored or given up."""

    tracked: Tracked
    boundary: int
    kind: int
    shape: int
    key: bytes
    parent: bytes | None
    space: int
    ids: bytes
    blocks: list[Any]
    step: int
    since: float


class StateSaver:
    """States to be stored, those that were handed over since the last plan apart: the workers have
    to note first where the work ends that made them.
    """

    def __init__(
        self, cache: Any, saves: Saves, chunk_saver: ChunkSaver, keys: RequestKeys,
        boundaries: Boundaries, *, groups: Groups, geometry: Geometry, counts: Tally,
        config: CacheConfig, object_bytes: Callable[[int], int],
        note_reused: Callable[[bytes], None],
    ) -> None:  # fmt: skip
        """`object_bytes` gives the size of an object by its shape; `note_reused` takes the keys of
        states that more than one prompt continues.
        """
        self._cache = cache
        self._saves = saves
        self._chunk_saver = chunk_saver
        self._keys = keys
        self._boundaries = boundaries
        self._groups = groups
        self._block, self._unit = geometry.block, geometry.unit
        self._shape_at = geometry.state_shape
        self._counts = counts
        self._save_decode = config.save_decode
        self._tokens_apart = config.checkpoint_tokens
        self._object_bytes = object_bytes
        self._note_reused = note_reused
        self._offers: list[Offer] = []
        self._new_offers: list[Offer] = []
        # Keys of the states on their way, by job.
        self._jobs: dict[int, bytes] = {}

    def __bool__(self) -> bool:
        """Whether blocks are pinned here."""
        return bool(self._offers or self._new_offers)

    def take(
        self,
        tracked: Tracked,
        entries: Sequence[tuple[int, int, int]],
        table: Sequence[Sequence[int]],
    ) -> None:
        """Pin the states that are worth storing of (group, block, tokens) that vLLM hands over;
        `table` are the request's blocks.
        """
        if not tracked.stores:
            return
        boundaries: dict[int, dict[int, int]] = {}
        for group, block, boundary in entries:
            boundaries.setdefault(boundary, {})[group] = block
        for boundary in sorted(boundaries):
            blocks = [boundaries[boundary].get(group, 0) for group in self._groups.states]
            if all(blocks) and self._admits(tracked, boundary):
                self._pin(tracked, boundary, blocks, table)

    def _admits(self, tracked: Tracked, boundary: int) -> bool:
        """Whether a state is worth its bytes: the last of the prompt, a junction, or far enough
        from the one before.
        """
        request: Request = tracked.request
        if boundary % self._unit or boundary <= 0:
            return False
        if boundary > request.num_prompt_tokens and not self._save_decode:
            return False
        if boundary >= self._boundaries.last(request):
            return True
        if self._boundaries.is_junction(request, boundary):
            return True
        apart = self._tokens_apart
        return apart is not None and boundary - tracked.kept >= apart

    def _pin(
        self,
        tracked: Tracked,
        boundary: int,
        blocks: list[int],
        table: Sequence[Sequence[int]],
    ) -> None:
        keys, full = self._keys.chunks(tracked), boundary // self._block
        key = self._keys.state(tracked, boundary)
        self._jobs = {job: key for job, key in self._jobs.items() if job in self._saves}
        if not key or tracked.space is None or key in self._jobs.values():
            return
        if any(offer.key == key for offer in (*self._offers, *self._new_offers)):
            return
        kind, ids = KIND_STATE, blocks
        if boundary % self._block:
            kind = KIND_TAIL
            ids = blocks + [next(iter(table[group][full:]), 0) for group in self._groups.attention]
        if self._boundaries.is_junction(tracked.request, boundary):
            self._note_reused(key)
        tracked.kept = max(tracked.kept, boundary)
        stored, in_memory = self._cache.lookup(key)
        if in_memory:
            # It was just loaded, or computed again.
            return
        if not all(ids) or not self._saves.room_for(len(ids)):
            self._counts["states_dropped"] += not stored
            return
        self._new_offers.append(
            Offer(
                tracked, boundary, kind, self._shape_at(boundary), key,
                keys[(full - 1) * KEY_BYTES : full * KEY_BYTES] if full else None,
                tracked.space.number, array("i", ids).tobytes(), self._saves.pin(ids),
                self._saves.planned, time.monotonic(),
            )
        )  # fmt: skip

    def plan(self, plan: StepPlan) -> None:
        """Begin to store what was handed over before the last `mark`."""
        for _ in range(len(self._offers)):
            offer = self._offers.pop(0)
            try:
                waits = self._store(plan, offer)
            except Exception:
                self._saves.unpin(offer.blocks)
                raise
            if waits:
                self._offers.append(offer)

    def mark(self, plan: StepPlan) -> None:
        """Have the workers note where the work ends that made the new states."""
        if self._new_offers:
            plan.pinned = True
            self._offers += self._new_offers
            self._new_offers = []

    def _store(self, plan: StepPlan, offer: Offer) -> bool:
        """Begin to store a state, or give it up; whether it waits for the next step instead."""
        need = offer.boundary // self._block
        slot, early = None, offer.tracked.next_save < need
        if not early:
            slot = self._cache.reserve(
                offer.space, offer.key, offer.kind, offer.parent,
                # Deeper than its last chunk, which an eviction must find behind it.
                0, offer.boundary,
                self._saves.ranks, self._object_bytes(offer.shape),
            )  # fmt: skip
        if slot is not None:
            job = self._saves.start(plan, offer.shape, slot, offer.ids, offer.blocks, offer.step)
            self._jobs[job] = offer.key
            self._counts["states"] += 1
            return False
        stored, in_memory = self._cache.lookup(offer.key)
        # Without its chunks, of which no more come once the request has ended, it has no use.
        lost = early and offer.tracked not in self._chunk_saver
        waits = not lost and not (in_memory if early else stored)
        if waits and time.monotonic() - offer.since < PUT_OFF_SECONDS:
            return True
        self._counts["states_dropped"] += not stored
        self._saves.unpin(offer.blocks)
        return False

    def clear(self, after: int = 0) -> None:
        """Give up what was handed over after this step; of the rest nothing is under way."""
        offers, self._offers, self._new_offers = [*self._offers, *self._new_offers], [], []
        for offer in offers:
            if offer.step > after:
                self._saves.unpin(offer.blocks)
            else:
                self._offers.append(offer)
