"""Connectors that the benches run in vLLM: one that does nothing, and one that holds several."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector import factory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)


class NullMetadata(KVConnectorMetadata):
    """Nothing to say."""


NULL_METADATA = NullMetadata()


class NullConnector(KVConnectorBase_V1, SupportsHMA):
    """Does nothing: what vLLM itself spends on having a best-effort connector."""

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        return NULL_METADATA

    def request_finished(self, request, block_ids):
        return False, None

    def request_finished_all_groups(self, request, block_ids):
        return False, None


@dataclass
class Handshakes(KVConnectorHandshakeMetadata):
    """The handshakes of a SwitchConnector's arms, by name."""

    arms: dict[str, KVConnectorHandshakeMetadata | None]


class SwitchConnector(NullConnector):
    """Makes one connector per arm; `Extension.bench_activate` puts one of them in its place.

    `kv_connector_extra_config["arms"]` maps a name to a KVTransferConfig. Only what happens at
    start-up passes through this class; afterwards the engine holds the arm's connector itself.
    """

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.arms: dict[str, Any] = {}
        transfer = vllm_config.kv_transfer_config
        for name, wanted in transfer.kv_connector_extra_config["arms"].items():
            config = copy.copy(vllm_config)
            config.kv_transfer_config = KVTransferConfig(
                **{"engine_id": f"{transfer.engine_id}-{name}", **wanted}
            )
            made = factory.KVConnectorFactory.get_connector_class(config.kv_transfer_config)
            self.arms[name] = made(config, role, kv_cache_config)

    def register_kv_caches(self, kv_caches):
        for arm in self.arms.values():
            arm.register_kv_caches(kv_caches)

    def bind_kv_cache_manager(self, kv_cache_manager):
        for arm in self.arms.values():
            arm.bind_kv_cache_manager(kv_cache_manager)

    def get_handshake_metadata(self):
        return Handshakes({name: arm.get_handshake_metadata() for name, arm in self.arms.items()})

    def set_xfer_handshake_metadata_pp_aware(self, metadata):
        for name, arm in self.arms.items():
            told = {rank: said.arms[name] for rank, said in metadata.items() if said.arms[name]}
            if told:
                arm.set_xfer_handshake_metadata_pp_aware(told)

    def shutdown(self):
        for arm in self.arms.values():
            arm.shutdown()
