"""vLLM engines in process groups of their own, driven by JSON lines, and their ends."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from _arms import engine_settings, transfer_config, watched_folder
from _models import MODELS, write_model
from _workplace import Workplace, progress

ROOT = Path(__file__).resolve().parent.parent
BENCHES = ROOT / "benches"
START_SECONDS = 420.0
CALL_SECONDS = 240.0


class Host:
    """An engine in a process group of its own, with one arm or several to switch between."""

    def __init__(
        self, arms: Sequence[str], model: str, place: Workplace, options: Any,
        lengths: Iterable[int], *, name: str | None = None, engine: dict[str, Any] | None = None,
        configs: dict[str, dict[str, Any]] | None = None, folder: Path | None = None,
    ) -> None:  # fmt: skip
        self.name = name or "+".join(arms)
        self.arms = list(arms)
        self.switched = len(arms) > 1
        self.process: subprocess.Popen | None = None
        configs = configs or {}
        settings = engine_settings(model, options, lengths) | (engine or {})
        settings["model"] = str(folder or write_model(model, place.scratch / "models"))
        wanted = {arm: configs.get(arm) or transfer_config(arm, place, options) for arm in arms}
        connected = {arm: config for arm, config in wanted.items() if config is not None}
        if self.switched:
            settings["kv_transfer_config"] = {
                "kv_connector": "SwitchConnector",
                "kv_connector_module_path": "_connectors",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"arms": connected},
            }
        elif connected:
            settings["kv_transfer_config"] = connected[arms[0]]
        self.engine_id = f"bench-{os.getpid()}-{next(_numbers)}"
        if "kv_transfer_config" in settings:
            settings["kv_transfer_config"] = settings["kv_transfer_config"] | {
                "engine_id": self.engine_id
            }
        key = (lambda arm: arm) if self.switched else (lambda arm: "")
        self.spec = {
            "engine": settings,
            "vocabulary": MODELS[model]["vocab_size"] if model in MODELS else 500,
            "switched": self.switched,
            "stages": options.stages,
            "watched": {key(arm): watched_folder(arm, place) for arm in arms},
            "dropped": {key(arm): [str(place.scratch / arm)] for arm in arms},
        }
        self.log = place.scratch / f"{self.name.replace('/', '_')}.log"
        self._specification = place.scratch / f"{self.name.replace('/', '_')}.json"
        self._options = options
        self.started: dict[str, Any] = {}
        self.spawned_at = time.perf_counter()
        self.ready_s = 0.0

    def spawn(self) -> Host:
        """Start the process; `wait` for it later."""
        self._specification.write_text(json.dumps(self.spec))
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT / 'python'}:{BENCHES}:{os.environ.get('PYTHONPATH', '')}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
        }
        if self._options.device == "cpu":
            environment |= {
                "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
            }  # fmt: skip
        else:
            environment.pop("TORCHDYNAMO_DISABLE", None)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(BENCHES / "_engine_host.py"), str(self._specification),
                 str(commands), str(answers)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                pass_fds=(commands, answers), start_new_session=True,
            )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self._buffer = b""
        self.spawned_at = time.perf_counter()
        _running.append(self)
        return self

    def wait(self) -> Host:
        """Wait until the engine is ready."""
        self.started = self._answer(START_SECONDS)
        self.ready_s = time.perf_counter() - self.spawned_at
        if not self.switched:
            self.call("settle", flush=False)
        for arm, reason in self.started["declined"].items():
            if reason:
                print(f"!! {arm or self.name} does nothing: {reason}", flush=True)
        return self

    def call(self, method: str, limit: float = CALL_SECONDS, **arguments: Any) -> Any:
        """Have the engine's process do something and return what it answers."""
        os.write(self._commands, json.dumps({"method": method, "with": arguments}).encode() + b"\n")
        return self._answer(limit)

    def activate(self, arm: str) -> None:
        """Switch to an arm, where there is a choice."""
        if self.switched:
            self.call("activate", name=None if arm == "none" else arm)

    def _answer(self, limit: float) -> Any:
        deadline = time.perf_counter() + limit
        while b"\n" not in self._buffer:
            left = deadline - time.perf_counter()
            if left <= 0 or not select.select([self._answers], [], [], min(left, 5.0))[0]:
                if left <= 0:
                    raise EngineError(self, f"no answer within {limit:.0f} s")
                # A child that outlives it would keep the pipe open.
                if self.process is not None and self.process.poll() is not None:
                    raise EngineError(self, "the engine's process ended")
                continue
            data = os.read(self._answers, 1 << 20)
            if not data:
                raise EngineError(self, "the engine's process ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        said = json.loads(line)
        if "error" in said:
            raise EngineError(self, said["error"], usable=True)
        return said["ok"]

    def stop(self) -> None:
        """Ask the engine to end; then end whatever is left of its process group."""
        if self.process is None:
            return
        with contextlib.suppress(EngineError, OSError):
            self.call("quit", limit=30.0)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        self.kill()

    def kill(self) -> None:
        """End the process group, also where its leader has gone already."""
        process, self.process = self.process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # The memory that OffloadingConnector leaves behind when it is killed.
        for left in Path("/dev/shm").glob(f"vllm_offload_{self.engine_id}*"):
            left.unlink(missing_ok=True)
        for descriptor in (self._commands, self._answers):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        _running.remove(self)


class EngineError(RuntimeError):
    """An engine failed; the end of its log is part of the message.

    `usable` says whether it was one command that failed, and the engine takes the next.
    """

    def __init__(self, host: Host, what: str, *, usable: bool = False) -> None:
        self.usable = usable
        lines = host.log.read_text(errors="replace").splitlines() if host.log.exists() else []
        telling = [line for line in lines if "Error" in line or "error" in line][-8:]
        tail = "\n".join([*telling, "...", *lines[-25:]])
        super().__init__(f"{host.name}: {what}\n{tail}")


_running: list[Host] = []
_numbers = itertools.count(1)


def stop_all() -> None:
    """End every engine that is still there."""
    for host in list(_running):
        host.kill()


atexit.register(stop_all)


def stop_on_signals() -> None:
    """Let a time limit's SIGTERM end the engines too."""

    def leave(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


def start_hosts(hosts: Sequence[Host], *, one_by_one: bool = False) -> None:
    """Start engines. The first fills the compile cache alone, the rest then start together."""
    for number, host in enumerate(hosts):
        host.spawn()
        if one_by_one or number == 0:
            host.wait()
            progress(f"{host.name}: ready after {host.ready_s:.1f} s")
    if not one_by_one:
        for host in hosts[1:]:
            host.wait()
            progress(f"{host.name}: ready after {host.ready_s:.1f} s")


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Largest difference of two answers' log-probabilities; infinite where their tokens differ."""
    if one["tokens"] != other["tokens"]:
        return math.inf
    return max(
        abs(a[token] - b[token])
        for a, b in zip(one["logprobs"], other["logprobs"], strict=True)
        for token in a
        if token in b
    )


def external_tokens(answer: dict[str, Any]) -> int:
    """Tokens of a prompt that vLLM says a connector brought."""
    return int(answer.get("counts", {}).get("external_prefix_cache_hits", 0))
