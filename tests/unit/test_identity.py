"""The namespace's digest: stable where nothing changed, and changed by what changes bytes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fakes import core as fake
from lakecache import identity


def write_safetensors(path: Path, tensors: dict[str, bytes], experts: int = 0) -> None:
    header, at = {}, 0
    for name, data in tensors.items():
        shape = [experts, 1, len(data) // experts] if experts else [len(data)]
        header[name] = {"dtype": "U8", "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


@pytest.fixture
def digest(monkeypatch: pytest.MonkeyPatch) -> Any:
    import lakecache

    monkeypatch.setitem(__import__("sys").modules, "lakecache._core", fake)
    monkeypatch.setattr(lakecache, "_core", fake, raising=False)
    return lambda *paths: identity.files_digest(list(paths))


def test_names_and_times_do_not_count(tmp_path: Path, digest: Any) -> None:
    one, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    write_safetensors(one, {"w": b"1" * 100})
    write_safetensors(other, {"w": b"1" * 100})
    assert digest(one) == digest(other)
    write_safetensors(other, {"w": b"1" * 99 + b"2"})
    assert digest(one) != digest(other)


def test_large_files_are_sampled(
    tmp_path: Path, digest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "WHOLE_FILE_BYTES", 1)
    path = tmp_path / "a.safetensors"

    def with_change(name: str, at: int) -> str:
        tensors = {"model.embed_tokens.weight": bytearray(20_000), "layer.w": bytearray(20_000)}
        if at >= 0:
            tensors[name][at] = 1
        write_safetensors(path, {key: bytes(data) for key, data in tensors.items()})
        return str(digest(path))

    base = with_change("layer.w", -1)
    assert with_change("model.embed_tokens.weight", 19_999) != base  # whole
    assert with_change("layer.w", 4_095) != base  # its first 4 KiB
    assert with_change("layer.w", 4_096) == base  # what sampling cannot see
    sampled = sum(size for _, size in identity.file_ranges(path) or ())
    assert sampled < path.stat().st_size


@pytest.mark.parametrize(("experts", "tells"), [(0, [0, 8 << 20]), (4, [0, 3 << 20, 9 << 20])])
def test_every_part_of_a_large_tensor_has_its_sample(
    experts: int, tells: list[int], tmp_path: Path, digest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "WHOLE_FILE_BYTES", 1)
    path = tmp_path / "a.safetensors"
    digests = set()
    for at in (-1, *tells):
        data = bytearray(12 << 20)
        if at >= 0:
            data[at] = 1
        write_safetensors(path, {"layer.w": bytes(data)}, experts)
        digests.add(digest(path))
    assert len(digests) == 1 + len(tells)
    sampled = sum(size for _, size in identity.file_ranges(path) or ())
    assert sampled < 32 << 10


def test_small_filters_are_read_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "WHOLE_FILE_BYTES", 1)
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"conv.w": bytes(20_000), "none": b""}, experts=1000)
    (_, data), *rest = identity.file_ranges(path) or ()
    assert rest == [(data, 20_000)]


def test_canonical_json_has_no_addresses_and_no_order() -> None:
    one = identity.canonical_json({"b": {3, 1, 2}, "a": object()})
    two = identity.canonical_json({"a": object(), "b": {2, 3, 1}})
    assert one == two
    assert b"0x" not in one


@pytest.mark.parametrize(
    ("algorithm", "seed", "stable"),
    [("sha256", None, True), ("xxhash", None, False), ("xxhash", "7", True)],
)
def test_random_hash_seeds_share_nothing(
    algorithm: str, seed: str | None, stable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm),
        load_config=SimpleNamespace(load_format="dummy"),
    )
    assert (identity.unstable_reason(config) is None) == stable


def test_weights_that_are_not_files(tmp_path: Path) -> None:
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
        load_config=SimpleNamespace(load_format="tensorizer"),
        model_config=SimpleNamespace(model=str(tmp_path), revision=None),
    )
    assert "tensorizer" in (identity.unstable_reason(config) or "")
    config.load_config.load_format = "auto"
    assert "local directory" in (identity.unstable_reason(config) or "")
    write_safetensors(tmp_path / "model.safetensors", {"w": b"1"})
    assert identity.unstable_reason(config) is None
