"""The scheduler half for hybrid models, driven step by step against a stand-in cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

from fakes import core as fake
from fakes import scheduler
from lakecache._hybrid import HybridSchedulerHalf
from lakecache._objects import KIND_CHUNK, KIND_STATE, KIND_TAIL, Geometry
from lakecache._pages import Groups

BLOCK, UNIT = 32, 16
ATTENTION, STATES = 1, (0, 2)
# Block tables: those of attention, and one block per column for each group of state.
TABLES = ([*range(101, 120)], [*range(1, 20)], [*range(201, 220)])


class Request(scheduler.Request):
    def __init__(self, tokens: int, *, seed: int = 0, **more: Any) -> None:
        hashes = [bytes([seed, i]) * 16 for i in range(tokens // UNIT)]
        super().__init__(tokens, **{"block_hashes": hashes, "shared_prefix_boundary": 0, **more})


class Bench(scheduler.Bench):
    half: HybridSchedulerHalf
    half_type = HybridSchedulerHalf
    groups = Groups((ATTENTION,), STATES)
    geometry = Geometry(BLOCK, BLOCK, UNIT)
    part_bytes: ClassVar[dict[int, int]] = {KIND_CHUNK: 64, KIND_STATE: 128, KIND_TAIL: 192}

    def step(
        self, request: Any = None, tokens: int = 0, offers: tuple[int, ...] = (), **more: Any
    ) -> Any:
        """One step that computes `tokens` and hands the states at `offers` over."""
        scheduled = {} if request is None else {request.request_id: tokens}
        offered = {} if request is None or not offers else {request.request_id: entries(*offers)}
        state = SimpleNamespace(
            get_block_ids=lambda _: more.get("tables", TABLES), boundary_state_offloads=offered
        )
        plan = self.half.plan_step(
            SimpleNamespace(  # type: ignore[arg-type]
                num_scheduled_tokens=scheduled,
                kv_connector_block_state=state,
                total_num_scheduled_tokens=self.total(scheduled),
            )
        )
        if request is not None:
            request.num_computed_tokens += tokens
        return plan

    def allocate(self, request: Any, external: int) -> None:
        blocks = SimpleNamespace(get_block_ids=lambda: TABLES)
        self.half.allocated(request, blocks, external)  # type: ignore[arg-type]

    def begin(self, tokens: int, **more: Any) -> Request:
        request = Request(tokens, **more)
        hit = self.half.matched(request, 0)[0]
        self.allocate(request, hit or 0)
        return request

    def finish(self, request: Request) -> None:
        self.half.finished(request.request_id)

    def store(self, tokens: int, *offers: int, **more: Any) -> list[int]:
        """Compute a prompt in one step; gives the kinds of what was stored."""
        request = self.begin(tokens, **more)
        plan = self.compute(request, tokens, offers=offers)
        self.acknowledge(plan)
        self.half.report(None, [request.request_id], ())
        self.finish(request)
        return sorted(kind for _, kind, *_ in plan.stores)

    def hit(self, tokens: int, local: int = 0) -> int:
        request = Request(tokens)
        answer = self.half.matched(request, local)
        self.finish(request)
        assert answer[1] == bool(answer[0])
        return answer[0] or 0

    def leaks(self) -> list[str]:
        return super().leaks() + (["offers"] if self.half.state_saver else [])

    def key(self, kind: int, tokens: int) -> bytes:
        space = self.half.spaces.of(None)
        assert space is not None
        return fake.derive_keys(space.digest, kind, [Request(tokens).block_hashes[-1]])

    def drop(self, kind: int, tokens: int) -> None:
        pool, key = self.cache.pool, self.key(kind, tokens)
        pool.drop(pool.by_key[key])
        file = pool.file(key)
        assert file is not None
        file.unlink()

    def touched(self) -> set[tuple[int, int]]:
        names = {
            self.key(kind, tokens): (kind, tokens)
            for kind in (KIND_CHUNK, KIND_STATE, KIND_TAIL)
            for tokens in range(UNIT, 257, UNIT)
        }
        found = {names[key] for key in self.cache.pool.touched}
        self.cache.pool.touched.clear()
        return found


def entries(*boundaries: int) -> list[tuple[int, int, int]]:
    return [
        (group, TABLES[group][(boundary - 1) // BLOCK], boundary)
        for boundary in boundaries
        for group in STATES
    ]
