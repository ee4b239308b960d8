"""The stand-ins and the alias, each in a folder of its own."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

import cuda_standins
import make_models
import vllm_alias

ROOT = Path(__file__).resolve().parents[2]

gcc = pytest.mark.skipif(
    shutil.which("gcc") is None or shutil.which("readelf") is None, reason="no gcc or readelf"
)


def test_the_alias_is_the_distribution_vllm(tmp_path):
    folder = vllm_alias.write_alias(tmp_path, "0.32.0")
    found = PathDistribution(folder)
    assert found.metadata["Name"] == "vllm"
    assert found.version == "0.32.0+cpu"


@gcc
def test_a_library_loads_with_stand_ins_for_what_it_needs(tmp_path):
    # A library that needs a versioned function and a plain one, as torch's do.
    (tmp_path / "real.c").write_text(
        "int cufakeThing(void){return 1;} int ncclThing(void){return 1;}"
    )
    (tmp_path / "real.map").write_text("libcufake.so.1 { global: cufakeThing; };")
    real = tmp_path / "libcufake.so.1"
    build = ["gcc", "-shared", "-fPIC", "-o", str(real), str(tmp_path / "real.c")]
    build += ["-Wl,-soname,libcufake.so.1", f"-Wl,--version-script={tmp_path / 'real.map'}"]
    subprocess.run(build, check=True, timeout=60)
    (tmp_path / "user.c").write_text(
        "int cufakeThing(void); int ncclThing(void); int both(void)"
        "{return cufakeThing() + ncclThing();}"
    )
    user = tmp_path / "libuser.so"
    build = ["gcc", "-shared", "-fPIC", "-o", str(user), str(tmp_path / "user.c"), str(real)]
    subprocess.run([*build, f"-Wl,-rpath,{tmp_path}"], check=True, timeout=60)
    real.unlink()
    with pytest.raises(OSError, match="libcufake"):
        ctypes.CDLL(str(user))

    linkage = cuda_standins.inspect([user])
    assert linkage.versions["libcufake.so.1"] == {"libcufake.so.1"}
    code, script = cuda_standins.sources("libcufake.so.1", linkage, set())
    cuda_standins.build("libcufake.so.1", tmp_path, code, script)
    assert ctypes.CDLL(str(user)).both() == 2 * cuda_standins.NO_DEVICE


def test_a_model_appears_complete_or_not_at_all(tmp_path, monkeypatch):
    def broken(folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise RuntimeError("interrupted")

    def good(folder):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"a": 1}))

    monkeypatch.setitem(make_models.RECIPES, "m", broken)
    with pytest.raises(RuntimeError):
        make_models.make("m", tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setitem(make_models.RECIPES, "m", good)
    assert make_models.make("m", tmp_path)
    assert not make_models.make("m", tmp_path), "a finished model is made again"
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_the_tiny_model_varies(tiny_model):
    """A constant answer would hide wrong bytes in the cache."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(str(tiny_model)).eval()
    assert model.dtype == torch.float32
    prompt = torch.tensor([[(i * 7 + i // 13) % 250 for i in range(96)]])
    other = prompt.clone()
    other[0, 3] += 1
    with torch.no_grad():
        a, b = (model(p).logits[0, -1].log_softmax(-1) for p in (prompt, other))
        answer = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=511)
    assert (a - b).abs().max() > 0.01, "the first tokens do not reach the last answer"
    assert len(set(answer[0, 96:].tolist())) > 4


def test_every_target_of_the_makefile_is_listed():
    done = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    for target in ("demo", "test", "bench", "lint", "setup"):
        assert f"  {target} " in done.stdout
