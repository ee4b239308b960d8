"""One engine with `MultiConnector`: beside.py CHECKPOINT FOLDER {lakecache|offloading}

The name is that of the connector that comes first. Some prompts are answered twice and, behind an
emptied GPU, once more. Prints, as JSON, how many tokens of each were cached in each run, how far
the third answers are from the second ones, and LakeCache's counters.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm_engine import Engine, difference, prompt

MIB = 1 << 20
PROMPTS = [prompt(2048 + 10, 600), prompt(768 + 10, 601)]


def connectors(folder: Path, first: str) -> dict[str, Any]:
    """The settings of `MultiConnector`."""
    lake = {
        "kv_connector": "LakeCacheConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "lakecache.connector",
        "kv_connector_extra_config": {
            "cache_dir": str(folder / "files"), "ram_dir": f"/dev/shm/{folder.name}",
            "cpu_bytes": 256 * MIB, "disk_capacity_bytes": 1024 * MIB, "load_policy": "always",
        },
    }  # fmt: skip
    offloading = {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 256 * MIB},
    }  # fmt: skip
    found = [lake, offloading]
    return {"connectors": found if first == "lakecache" else found[::-1]}


def main() -> None:
    checkpoint, folder, first = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    engine = Engine(
        connectors(folder, first), connector="MultiConnector", module_path=None,
        model=str(checkpoint), dtype="bfloat16", block_size=16, kv_bytes=256 * MIB,
        max_model_len=4096, gpu_memory_utilization=0.05, skip_tokenizer_init=True,
    )  # fmt: skip
    runs = [[engine.generate([tokens])[0] for tokens in PROMPTS] for _ in range(2)]
    engine.forget_gpu()
    runs.append([engine.generate([tokens])[0] for tokens in PROMPTS])
    names = ("stores", "loads", "loads_failed", "stores_failed", "errors")
    seen = {
        "cached": [[answer[2] for answer in answers] for answers in runs],
        "differences": [difference(*pair) for pair in zip(*runs[1:], strict=True)],
        "counts": {name: engine.half.total(name) for name in names},
        "declined": engine.half.declined,
    }
    print(json.dumps(seen), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
