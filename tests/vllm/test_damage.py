"""Damaged files are refused; and without the check the damage shows, so the check is what helps."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from vllm_engine import difference, engine, prompt

HEADER_BYTES = 4096


def damage(directory: str) -> int:
    """Flip the highest exponent bit of every float of every object."""
    files = list(Path(directory).rglob("*.kv"))
    for file in files:
        data = bytearray(file.read_bytes())
        for at in range(HEADER_BYTES + 3, len(data), struct.calcsize("f")):
            data[at] ^= 0x40
        file.write_bytes(data)
    return len(files)


@pytest.mark.parametrize("checksum", ["on", "off"])
def test_flipped_exponents(places: dict[str, str], checksum: str) -> None:
    tokens = prompt(300, 5)
    with engine({**places, "checksum": checksum}) as cached:
        cold = cached.generate([tokens])[0]
        assert damage(places["cache_dir"]) == 4
        cached.forget_gpu()
        cached.forget_memory()
        got = cached.generate([tokens])[0]
        if checksum == "on":
            assert difference(cold, got) == 0
            assert cached.half.total("loads_failed") > 0
        else:
            assert difference(cold, got) > 0.1
