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
    """One load of one request: between steps, or within the step that admits the request."""

    __slots__ = (
        "chunks",
        "copied",
        "failed",
        "first",
        "ident",
        "ids",
        "lease",
        "left",
        "local",
        "moved",
        "same_step",
    )

    def __init__(
        self,
        ident: int,
        lease: Any,
        *,
        first: int,
        chunks: int,
        local: int,
        ids: Sequence[int],
        same_step: bool = False,
    ) -> None:
        self.ident = ident
        self.lease = lease
        self.first = first
        self.chunks = chunks
        self.left = chunks
        self.local = local
        self.ids = ids
        self.copied: Counter[int] = Counter()
        self.failed = False
        self.same_step = same_step
        self.moved = time.monotonic()


class Store:
    """One chunk on its way from the GPU's blocks into a slot."""

    __slots__ = ("blocks", "entry", "generation", "ranks_bad", "ranks_good")

    def __init__(self, entry: int, generation: int, blocks: list[Any]) -> None:
        self.entry = entry
        self.generation = generation
        self.blocks = blocks
        self.ranks_good = 0
        self.ranks_bad = 0


class Tracked:
    """What is known about one request of the engine."""

    __slots__ = (
        "asked",
        "attempts",
        "choice",
        "failures",
        "first",
        "in_memory",
        "keys",
        "lease",
        "load",
        "local",
        "next_save",
        "request",
        "same_step",
        "space",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.space: Space | None = None
        self.keys = b""
        self.lease: Any = None
        self.first = 0
        self.in_memory = 0
        self.asked: float | None = None
        self.choice: Choice | None = None
        self.local = 0
        self.load: Load | None = None
        self.same_step = False
        self.failures = 0
        self.attempts = 0
        self.next_save = -1
