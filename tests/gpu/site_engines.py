"""The engines of the GPU tests, in two generations, each started at once.

Starting an engine costs most of the time here. So one generation stores and is asked, then all of
it ends, and a second one finds what the first has left. Each engine is a process group of its own.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benches"))
# What engines import, too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT / "tests"), str(ROOT / "tests/gpu"), os.environ.get("PYTHONPATH", "")]
)

import _engines as engines  # noqa: E402
from _engine_host import tokens_of  # noqa: E402
from _engines import difference  # noqa: E402, F401
from _engines import external_tokens as external  # noqa: E402, F401
from _workplace import Workplace  # noqa: E402
from make_checkpoint import VOCABULARY  # noqa: E402

DEVICE = os.environ.get("LAKECACHE_GPU_TESTS_DEVICE", "cuda")
BLOCK = 16 if DEVICE == "cuda" else 32
CHUNK = 256
HEADER_BYTES = 4096
# Room for a few of the preemption test's prompts, and what a token of that checkpoint takes.
TIGHT_TOKENS = 1792
TOKEN_BYTES = 6 * 2 * 4 * 128 * 2
MIB = 1 << 20
Answer = dict[str, Any]


def prompt(seed: int, length: int) -> list[int]:
    """A prompt that differs from all others from its first token on."""
    return tokens_of(seed, length, VOCABULARY)


class Engine:
    """One engine, as the tests see it."""

    def __init__(self, host: engines.Host) -> None:
        self.host = host

    def ask(self, *prompts: list[int], tokens: int = 8) -> list[Answer]:
        """Answer prompts one after the other, then let everything stored settle."""
        given = self.host.call(
            "answers", prompts=list(prompts), max_tokens=tokens, logprobs=20, limit=120
        )
        self.host.call("settle")
        return given

    def call(self, method: str, **arguments: Any) -> Any:
        """Any other command of the engine's process."""
        return self.host.call(method, **arguments)

    def forget_gpu(self) -> None:
        """Empty vLLM's own prefix cache."""
        self.host.call("reset")

    def count(self, name: str) -> int:
        """A counter of the scheduler half."""
        return self.host.call("counters")["scheduler"].get(name, 0)


class Site:
    """Folders, checkpoints and engines."""

    def __init__(self) -> None:
        self.place = Workplace(None, None)
        self.answers: dict[str, list[Answer]] = {}
        self.generation = 0
        self.running: dict[str, Engine] = {}
        self.options = argparse.Namespace(
            device=DEVICE, max_num_seqs=32, kv_gib=0.25, gpu_share=0.05, cpu_gib=0.25,
            disk_gib=1.0, rival_block=None, lakecache={}, engine={}, stages=False,
            enforce_eager=bool(os.environ.get("LAKECACHE_GPU_TESTS_EAGER")),
        )  # fmt: skip

    def checkpoint(self, kind: str) -> Path:
        """A random checkpoint, made once."""
        folder = self.place.scratch / f"random-{kind}"
        if not folder.exists():
            maker = Path(__file__).with_name("make_checkpoint.py")
            subprocess.run([sys.executable, str(maker), kind, str(folder)], check=True, timeout=180)
        return folder

    def config(self, directory: str, **settings: Any) -> dict[str, Any]:
        """A KVTransferConfig for LakeCache in a directory that engines may share."""
        return {
            "kv_connector": "LakeCacheConnector",
            "kv_connector_module_path": "lakecache.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "cache_dir": str(self.place.scratch / directory),
                "ram_dir": str(self.place.ram / directory),
                "cpu_bytes": 256 * MIB,
                "disk_capacity_bytes": 1024 * MIB,
                "load_policy": "always",
                "chunk_size": CHUNK,
                **settings,
            },
        }

    def engine(
        self, name: str, kind: str, directory: str, engine: dict[str, Any] | None = None,
        **settings: Any,
    ) -> engines.Host:  # fmt: skip
        """Prepare an engine; the caller starts it."""
        host = engines.Host(
            [name], kind, self.place, self.options, [4096], name=name,
            configs={name: self.config(directory, **settings)}, folder=self.checkpoint(kind),
            engine={"load_format": "auto", **(engine or {})},
        )  # fmt: skip
        host.spec["vocabulary"] = VOCABULARY
        return host

    def start(self, generation: int) -> dict[str, Engine]:
        """The engines of a generation, started when the first test asks for it."""
        if self.generation == generation:
            return self.running
        assert generation == self.generation + 1, "tests of an earlier generation come first"
        self.stop()
        few = {"kv_cache_memory_bytes": TIGHT_TOKENS * TOKEN_BYTES, "max_model_len": 1024}
        if generation == 1:
            hosts = [
                self.engine("pinned", "qwen3", "qwen3", verify_load=True),
                self.engine("tight", "qwen3", "tight", few, save_decode=True, verify_load=True),
            ]
        else:
            hosts = [
                # What is not verified is loaded within the step where it can be.
                self.engine("pinned", "qwen3", "qwen3"),
                self.engine("sync", "qwen3", "qwen3", transfer="sync"),
            ]
        hosts.append(self.engine("mla", "mla", "mla", verify_load=True))
        for host in hosts:
            host.spawn()
        self.generation = generation
        self.running = {host.name: Engine(host.wait()) for host in hosts}
        return self.running

    def stop(self) -> None:
        """End the engines, and remove the pools: the next generation reads files."""
        for engine in self.running.values():
            engine.host.stop()
        self.running = {}
        shutil.rmtree(self.place.ram, ignore_errors=True)
        self.place.ram.mkdir(exist_ok=True)

    def close(self) -> None:
        """End everything, and keep the logs where asked to."""
        self.stop()
        if kept := os.environ.get("LAKECACHE_GPU_TESTS_LOGS"):
            self.place.keep_logs(Path(kept))
        self.place.remove()

    def files(self, directory: str) -> list[Path]:
        """The object files of a directory."""
        return sorted((self.place.scratch / directory).rglob("*.kv"))

    def flip_in_memory(self, directory: str) -> int:
        """Flip a byte of every object that lies both on disk and in the pool."""
        (pool,) = (self.place.ram / directory).rglob("pool")
        flipped = 0
        with pool.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            for path in self.files(directory):
                data = path.read_bytes()
                begin = memory.find(data[HEADER_BYTES : HEADER_BYTES + 512])
                if begin >= 0:
                    memory[begin + 300] ^= 0x40
                    flipped += 1
        return flipped

    def flip_on_disk(self, directory: str) -> int:
        """Flip a byte of every object's file."""
        paths = self.files(directory)
        for path in paths:
            with path.open("r+b") as file:
                file.seek(HEADER_BYTES + 4321)
                byte = file.read(1)
                file.seek(HEADER_BYTES + 4321)
                file.write(bytes([byte[0] ^ 0x40]))
        return len(paths)
