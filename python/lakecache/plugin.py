"""vLLM's plugin: makes the connectors known by name, without `kv_connector_module_path`.

vLLM calls `register` in each of its processes (front end, engine core, workers, and the one that
inspects a model), whether or not LakeCache is used there. So it imports nothing of LakeCache, and
of vLLM only the factory; the connector is imported when an engine asks for it by name.
"""

from __future__ import annotations

import contextlib

__all__ = ["register"]

MODULES = {
    "LakeCacheConnector": "lakecache.connector",
    "MiniCacheConnector": "lakecache.connector",
    "HybridCheckpointConnector": "lakecache.hybrid",
}


def register() -> None:
    """Register the connectors with vLLM's factory. Once more changes nothing.

    Raises nothing where vLLM has no such factory: an error here would end a vLLM that may not want
    LakeCache at all, and one that does says that it does not know the connector.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError:
        return
    for name, module in MODULES.items():
        # What vLLM raises for a name that it has already.
        with contextlib.suppress(ValueError):
            KVConnectorFactory.register_connector(name, module, name)
