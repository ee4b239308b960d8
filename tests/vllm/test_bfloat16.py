"""In bfloat16 a hit is compared with a hit of vLLM's own cache that ends at the same token.

Cold answers differ there: their sums are made in another order.
"""

from __future__ import annotations

from vllm_engine import BLOCK, difference, engine, prompt

TOLERANCE = 1e-3


def test_restored_as_from_vllms_own_cache(places: dict[str, str]) -> None:
    with engine(places, dtype="bfloat16") as cached:
        for length in (300, 451):
            tokens = prompt(length, length)
            hit = length // 64 * 64
            # Primes both caches up to the same token.
            cached.generate([[*tokens[:hit], (tokens[hit] + 1) % 250]])
            native = cached.generate([tokens])[0]
            assert native[2] == hit // BLOCK * BLOCK
            loads = cached.half.total("loads")
            cached.forget_gpu()
            memory = cached.generate([tokens])[0]
            cached.forget_gpu()
            cached.forget_memory()
            disk = cached.generate([tokens])[0]
            assert cached.half.total("loads") == loads + 2
            assert memory[2] == disk[2] == hit
            assert difference(native, memory) <= TOLERANCE
            assert difference(native, disk) <= TOLERANCE
