"""A second connector for vLLM's `MultiConnector`, for the tests in `vllm/`: it keeps whole prompts'
pages in its process, and does what connectors between hosts do.

Its settings: `mode` is `async` (vLLM waits for its loads, whose pages come some steps later),
`sync` (they come in the step that needs them) or `idle` (it loads and keeps nothing); `handshake`
is whether its workers tell its scheduler something, which takes nothing else; `fails` is how many
of its loads leave garbage and say so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)

# Steps between the start of a load and its pages.
STEPS = 3


@dataclass
class PeerHandshake(KVConnectorHandshakeMetadata):
    """What only this connector understands."""


@dataclass
class PeerPlan(KVConnectorMetadata):
    """Prompts to load: of which request, from which block on, and into which blocks."""

    loads: list[tuple[str, tuple[int, ...], int, list[int]]] = field(default_factory=list)


class PeerConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module's text. Of a prompt it has the whole blocks, on one rank."""

    kept: ClassVar[dict[tuple[int, ...], list[torch.Tensor]]] = {}
    loaded: ClassVar[int] = 0
    # Of the engine in this process, whose two halves are here.
    pages: ClassVar[list[torch.Tensor]] = []

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = self._kv_transfer_config.kv_connector_extra_config
        self.mode = settings["mode"]
        self.shakes_hands = settings.get("handshake", False)
        self.fails = settings.get("fails", 0)
        self.block = vllm_config.cache_config.block_size
        self.plan = PeerPlan()
        self.under_way: list[list[Any]] = []
        self.invalid: set[int] = set()
        self.met = False

    # Worker side

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return PeerHandshake() if self.shakes_hands else None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        type(self).pages = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request_id, key, first, ids in self._connector_metadata.loads:
            if self.mode == "async":
                self.under_way.append([STEPS, request_id, key, first, ids])
            else:
                self._fill(key, first, ids)

    def _fill(self, key: tuple[int, ...], first: int, ids: list[int]) -> None:
        type(self).loaded += 1
        garbage, self.fails = self.fails > 0, max(0, self.fails - 1)
        for page, kept in zip(self.pages, self.kept[key], strict=True):
            page[ids] = torch.full_like(kept[first:], 0.5) if garbage else kept[first:]
        if garbage:
            self.invalid.update(ids)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        for load in self.under_way:
            load[0] -= 1
        over = [load for load in self.under_way if load[0] == 0]
        self.under_way = [load for load in self.under_way if load[0] > 0]
        for _, _, *load in over:
            self._fill(*load)
        return None, {load[1] for load in over} or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self.invalid = self.invalid, set()
        return invalid

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    # Scheduler side

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        if self.shakes_hands:
            assert {type(told) for told in metadata.values()} == {PeerHandshake}
            self.met = True

    def _key(self, prompt: list[int]) -> tuple[int, ...]:
        return tuple(prompt[: (len(prompt) - 1) // self.block * self.block])

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        key = self._key(request.prompt_token_ids)
        if self.mode == "idle" or key not in self.kept:
            return 0, False
        return max(0, len(key) - num_computed_tokens), self.mode == "async"

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            key = self._key(request.prompt_token_ids)
            first = (len(key) - num_external_tokens) // self.block
            ids = list(blocks.get_block_ids()[0][first : len(key) // self.block])
            self.plan.loads.append((request.request_id, key, first, ids))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        plan, self.plan = self.plan, PeerPlan()
        return plan

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        key = self._key(request.prompt_token_ids)
        if self.mode != "idle" and request.num_output_tokens and key not in self.kept:
            ids = list(block_ids[0][: len(key) // self.block])
            self.kept[key] = [page[ids].clone() for page in self.pages]
        return False, None
