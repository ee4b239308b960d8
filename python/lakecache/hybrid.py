"""The connector for hybrid models, such as Qwen3.5: attention and Gated DeltaNet.

    --kv-transfer-config '{"kv_connector": "HybridCheckpointConnector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"cache_dir": "/var/cache/lakecache", "cpu_bytes": "8GiB"}}'

`lakecache.connector.LakeCacheConnector` serves these models in the same way.
"""

from __future__ import annotations

from lakecache.connector import CacheConnector

__all__ = ["HybridCheckpointConnector"]


class HybridCheckpointConnector(CacheConnector):
    """Checkpoints of models with recurrent state, in shared memory and on disk.

    A checkpoint is the KV of the attention layers in chunks of one engine block, shared with other
    checkpoints, and the recurrent state after exactly so many tokens. vLLM decides where it keeps
    a state: at the last block boundary of a prompt and, with `--prefix-match-unit`, closer to its
    end.
    """

    _hybrid = True
