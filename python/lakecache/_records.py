"""What the scheduler half remembers: requests, loads and stores under way."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.request import Request

    from lakecache._policy import Choice

__all__ = ["Load", "Space", "Store", "Tracked"]


class Space(NamedTuple):
    """A namespace: the digest that goes into keys, and its number in the pool."""

    digest: bytes
    number: int


class Load:
    """One load of one request: between steps, or within the step that admits the request. One
    between steps may be reported early, when its copies are queued.

    `objects` are the lease's: the shape of each, and the packed 32-bit ids of the blocks that it
    goes to.
    """

    __slots__ = (
        "copied", "early", "failed", "ident", "lease", "left", "moved", "objects", "same_step",
    )  # fmt: skip

    def __init__(
        self,
        ident: int,
        lease: Any,
        objects: Sequence[tuple[int, bytes]],
        *,
        same_step: bool = False,
        early: bool = False,
    ) -> None:
        self.ident = ident
        self.lease = lease
        self.objects = objects
        self.left = len(objects)
        self.copied: Counter[int] = Counter()
        self.failed = False
        self.same_step = same_step
        self.early = early
        self.moved = time.monotonic()


class Store:
    """One object on its way from the GPU's blocks, computed in a step, into a slot."""

    __slots__ = (
        "blocks", "distrusted", "entry", "generation", "ranks_bad", "ranks_good", "step",
    )  # fmt: skip

    def __init__(self, entry: int, generation: int, blocks: list[Any], step: int) -> None:
        self.entry = entry
        self.generation = generation
        self.blocks = blocks
        self.step = step
        self.ranks_good = 0
        self.ranks_bad = 0
        self.distrusted = False


class Tracked:
    """What is known about one request of the engine."""

    __slots__ = (
        "asked",
        "choice",
        "early",
        "end",
        "failures",
        "first",
        "from_memory",
        "junction",
        "kept",
        "keys",
        "lease",
        "load",
        "loads",
        "local",
        "next_save",
        "no_room",
        "objects",
        "pinned",
        "put_off",
        "request",
        "same_step",
        "short_leases",
        "space",
        "states",
        "states_begin",
        "stores",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        # Whether the client lets it be stored, and loaded.
        self.stores = self.loads = True
        self.space: Space | None = None
        self.keys = b""
        self.lease: Any = None
        self.first = 0
        self.asked: float | None = None
        self.choice: Choice | None = None
        self.local = 0
        self.load: Load | None = None
        # Tokens of the load that lie in memory.
        self.from_memory = 0
        self.same_step = False
        self.early = False
        self.failures = 0
        # Since when no chunk could be pinned, and since when none got a slot; the next chunk to
        # pin, and the next to get a slot.
        self.put_off: float | None = None
        self.no_room: float | None = None
        self.pinned = 0
        self.next_save = -1
        # Of models with recurrent state: keys of states, and behind how many hash units they begin;
        # where the leased checkpoint ends, its objects, and how often one was incomplete; the
        # deepest boundary whose state is stored, or was there; and where another prompt parts.
        self.states = b""
        self.states_begin = 0
        self.end = 0
        self.objects = 0
        self.short_leases = 0
        self.kept = 0
        self.junction = 0
