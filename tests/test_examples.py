"""Every example holds what it shows, on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lakecache._core")
pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parent.parent


def start(name: str, *arguments: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "PYTHONUNBUFFERED": "1"}
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run(name: str, *arguments: str) -> str:
    done = start(name, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


def test_attention():
    assert "outputs equal: yes" in run("attention.py", "--tokens", "128")


def test_demo():
    assert "every byte came back" in run("demo.py")


@pytest.mark.parametrize(
    "arguments", [(), pytest.param(("--shared",), marks=pytest.mark.multiprocess)]
)
def test_two_level(arguments):
    said = run("two_level.py", *arguments)
    assert "first read from disk, second from memory" in said
    assert "disk payload reads: 1" in said


def test_host_kv():
    assert "lakecache" in run("host_kv.py")


@pytest.mark.vllm
def test_a_device_that_vllm_is_not_for_is_refused(tiny_model):
    pytest.importorskip("vllm")
    from vllm.platforms import current_platform

    other = "cpu" if current_platform.is_cuda() else "cuda"
    done = start("vllm_demo.py", "--device", other, "--model", str(tiny_model), timeout=120)
    assert done.returncode == 1
    assert f"--device {other}: this vLLM runs on" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("attention.py", "--tokens", "0"), "less than 1"),
        (("demo.py", "--kv-snapshot", "/nowhere"), "kv_snapshot.py makes one"),
        (("main_demo.py", "--tokens", "256"), "nothing would be restored"),
        (("vllm_demo.py", "--model", "/nowhere"), "`make models`"),
        (("kv_snapshot.py", "--layers", "a", "--output", "x"), "invalid layers value: 'a'"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments, says):
    done = start(*arguments, timeout=120)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.vllm
@pytest.mark.slow
def test_snapshot_of_real_kv(tiny_model, tmp_path):
    pytest.importorskip("vllm")
    file = str(tmp_path / "kv.safetensors")
    arguments = ["--layers", "0,1", "--tokens", "96", "--output", file]
    assert "layer 1" in run("kv_snapshot.py", "--model", str(tiny_model), *arguments)
    run("host_kv.py", "--kv-snapshot", file)
    run("demo.py", "--kv-snapshot", file)


@pytest.mark.vllm
@pytest.mark.slow
def test_hybrid_demo_refuses_prompts_without_a_state(models):
    pytest.importorskip("vllm")
    model = models / "qwen35-moe-tiny"
    if not (model / "config.json").exists():
        pytest.skip(f"{model} is missing: make test makes it")
    arguments = ["--tokens", "300,16", "--prefix-match-unit", "16"]
    done = start("hybrid_demo.py", "--model", str(model), *arguments)
    assert done.returncode == 1
    assert "nothing is restored of 16 tokens or fewer" in done.stderr


@pytest.mark.vllm
@pytest.mark.slow
def test_hybrid_demo(models, tmp_path):
    pytest.importorskip("vllm")
    model = models / "qwen35-moe-tiny"
    if not (model / "config.json").exists():
        pytest.skip(f"{model} is missing: make test makes it")
    outputs = []
    for mode in ("native", "checkpoint"):
        outputs.append(tmp_path / f"{mode}.json")
        arguments = ["--mode", mode, "--tokens", "100,300", "--prefix-match-unit", "16"]
        said = run(
            "hybrid_demo.py", "--model", str(model), *arguments,
            "--tier-phases", "warm,cold,rewarm", "--full-logprobs",
            "--cache-dir", str(tmp_path / "kv"), "--output", str(outputs[-1]),
        )  # fmt: skip
        assert "outputs equal, tiers as claimed" in said
    native, checkpoint = (json.loads(file.read_text())["outputs"] for file in outputs)
    assert [one["restored_tokens"] for one in checkpoint] == [96] * 3 + [288] * 3
    for one, other in zip(native, checkpoint, strict=True):
        assert one["restored_tokens"] == other["restored_tokens"]
        # Over the whole vocabulary, and to the last bit.
        assert one["full_logprobs"] == other["full_logprobs"]
    compare = [sys.executable, str(ROOT / "tests" / "compare_outputs.py"), *map(str, outputs)]
    assert subprocess.run(compare, timeout=60, check=False).returncode == 0


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_demo(tiny_model, tmp_path):
    pytest.importorskip("vllm")
    outputs = []
    for mode in ("native", "pinned"):
        outputs.append(str(tmp_path / f"{mode}.json"))
        arguments = ["--mode", mode, "--tokens", "600", "--output", outputs[-1]]
        run("vllm_demo.py", "--model", str(tiny_model), *arguments)
    compare = [sys.executable, str(ROOT / "tests" / "compare_outputs.py"), *outputs]
    assert subprocess.run(compare, timeout=60, check=False).returncode == 0
