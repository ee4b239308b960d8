"""Bring everything that tests and demo need into .venv, once.

The environment is keyed by a digest of the lock files and of the scripts that shape it: with the
same digest a second run returns at once. Each finished step is recorded, so an interrupted run
goes on where it stopped. Every command has a time limit; downloads are tried three times.

Only the standard library is used, because this runs before anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"
STATE = ".lakecache-setup"
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")


class SetupError(RuntimeError):
    """The environment cannot be made; the message says what to do."""


@dataclass(frozen=True)
class Step:
    """One resumable step: skipped while `inputs` have the digest that was recorded."""

    name: str
    inputs: tuple[Path, ...]
    action: Callable[[], None]


def digest(paths: Sequence[Path], extra: str = "") -> str:
    """Digest of names and contents; changes when any file does."""
    total = hashlib.sha256(extra.encode())
    for path in paths:
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:32]


def run(
    command: Sequence[str | Path],
    *,
    limit_s: float,
    attempts: int = 1,
    env: dict[str, str] | None = None,
) -> None:
    """Run a command to its end; its output is shown only when it fails."""
    shown = " ".join(str(part) for part in command)
    for attempt in range(1, attempts + 1):
        try:
            done = subprocess.run(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=limit_s,
                env=env,
            )
            problem = f"exit status {done.returncode}" if done.returncode else ""
            output = done.stdout
        except subprocess.TimeoutExpired as late:
            problem = f"no end after {limit_s:.0f} s"
            output = (late.stdout or b"").decode(errors="replace")
        if not problem:
            return
        print(f"{shown}: {problem}\n{output[-4000:]}", file=sys.stderr, flush=True)
        if attempt < attempts:
            time.sleep(2 * attempt)
    raise SetupError(f"this command failed: {shown}")


class Environment:
    """The virtual environment and the steps that fill it."""

    def __init__(self, path: Path, python: str, *, bench: bool = False) -> None:
        self.path = path
        self.bench = bench
        self.base_python = python
        self.python = path / "bin" / "python"
        self.state = path / STATE

    def steps(self) -> list[Step]:
        scripts = ROOT / "scripts"
        standins, alias = scripts / "cuda_standins.py", scripts / "vllm_alias.py"
        names = ("bootstrap", "torch", "vllm", "dev", "triton", "bench")
        lock = {name: LOCKS / f"{name}.txt" for name in names}
        steps = [
            Step("uv", (lock["bootstrap"],), self._install_uv),
            Step("dev", (lock["dev"],), lambda: self._install(lock["dev"])),
            Step("torch", (lock["torch"],), lambda: self._install(lock["torch"])),
            Step("vllm", (lock["vllm"],), lambda: self._install(lock["vllm"])),
            Step("cuda stand-ins", (lock["torch"], standins), lambda: self._script(standins)),
            Step("vllm alias", (lock["vllm"], alias), lambda: self._script(alias)),
            Step("triton", (lock["triton"],), lambda: self._install_beside(lock["triton"])),
            Step("check", (lock["torch"], lock["vllm"], standins), self._check),
        ]
        if self.bench:
            steps.append(Step("bench", (lock["bench"],), lambda: self._install(lock["bench"])))
        return steps

    def key(self) -> str:
        """What a complete environment was made from."""
        return digest([path for step in self.steps() for path in step.inputs])

    def complete_mark(self) -> Path:
        """The file that says so; with benches it is another one, so neither undoes the other."""
        return self.state / ("complete-bench" if self.bench else "complete")

    def is_complete(self) -> bool:
        mark = self.complete_mark()
        return self.python.exists() and mark.exists() and mark.read_text() == self.key()

    def make(self) -> None:
        if self.is_complete():
            return
        self._create()
        self.complete_mark().unlink(missing_ok=True)
        for step in self.steps():
            mark, want = self.state / step.name.replace(" ", "-"), digest(step.inputs)
            if mark.exists() and mark.read_text() == want:
                continue
            started = time.monotonic()
            mark.unlink(missing_ok=True)
            step.action()
            mark.write_text(want)
            print(f"setup: {step.name}: {time.monotonic() - started:.1f} s", flush=True)
        self.complete_mark().write_text(self.key())

    def _create(self) -> None:
        usable = self.state.exists() and self.python.exists()
        if not usable:
            shutil.rmtree(self.path, ignore_errors=True)
            run([self.base_python, "-m", "venv", self.path], limit_s=180)
            self.state.mkdir()

    def _install_uv(self) -> None:
        pip: list[str | Path] = [
            self.python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]
        run([*pip, "-r", LOCKS / "bootstrap.txt"], limit_s=300, attempts=3)

    def _install_beside(self, lock: Path) -> None:
        """Install into a folder of its own, which only those who name it import from."""
        target = self.path / lock.stem
        shutil.rmtree(target, ignore_errors=True)
        self._install(lock, "--target", target)

    def _install(self, lock: Path, *more: str | Path) -> None:
        # The lock files are complete, so nothing is resolved (see their comments).
        command: list[str | Path] = [self.path / "bin" / "uv", "pip", "install"]
        command += ["--quiet", "--no-deps"]
        command += ["--compile-bytecode", "--python", self.python, "-r", lock, *more]
        run(command, limit_s=900, attempts=3, env=self.uv_environment())

    def uv_environment(self) -> dict[str, str]:
        env = dict(os.environ)
        # Without byte code each import of vLLM would take twice as long.
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        env.setdefault("UV_HTTP_TIMEOUT", "120")
        if CA_BUNDLE.exists():
            env.setdefault("SSL_CERT_FILE", str(CA_BUNDLE))
        # uv does not read pip's configuration: hand a configured package index over.
        index = os.environ.get("PIP_INDEX_URL") or self._pip_setting("global.index-url")
        if index and "UV_INDEX_URL" not in env:
            env.setdefault("UV_DEFAULT_INDEX", index)
        return env

    def _pip_setting(self, name: str) -> str:
        command = [str(self.python), "-m", "pip", "config", "get", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    def _script(self, script: Path) -> None:
        run([self.python, script], limit_s=300)

    def _check(self) -> None:
        code = "import torch, torchvision, vllm; from vllm import LLM; print(vllm.__version__)"
        env = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        run([self.python, "-c", code], limit_s=300, env=env)


@contextlib.contextmanager
def only_one(path: Path, limit_s: float) -> Iterator[None]:
    """Hold a file lock: of two runs at once the second one finds the work done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + limit_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SetupError(f"another setup holds {path}") from None
                time.sleep(0.5)
        yield


def has_library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def install_system_packages(*, bench: bool) -> None:
    """libnuma for vLLM's CPU kernels, fio for benches: by apt where that is allowed.

    Without fio the benches run, and say that they had nothing to compare with.
    """
    missing = [] if has_library("libnuma.so.1") else ["libnuma1"]
    wanted = ["fio"] if bench and shutil.which("fio") is None else []
    if not missing and not wanted:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        if missing:
            names = " ".join(missing + wanted)
            raise SetupError(f"missing system packages; install them first (Debian: {names})")
        print("setup: fio is not installed; reads will not be compared with it", flush=True)
        return
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    apt = ["apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=120"]
    try:
        run([*apt, "update"], limit_s=300, attempts=3, env=env)
        run([*apt, "install", "--no-install-recommends", *missing, *wanted],
            limit_s=300, attempts=2, env=env)  # fmt: skip
    except SetupError:
        if missing:
            raise
        print("setup: fio cannot be installed; reads will not be compared with it", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Create or refresh the virtual environment.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--python", default=sys.executable, help="base interpreter")
    parser.add_argument("--bench", action="store_true", help="also what benches need")
    options = parser.parse_args()
    try:
        with only_one(ROOT / ".ci-cache" / "setup.lock", limit_s=1800):
            install_system_packages(bench=options.bench)
            venv = options.venv.absolute()
            Environment(venv, options.python, bench=options.bench).make()
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
