"""Two ranks, each with a half of every object and a process that learns the name by itself."""

from __future__ import annotations

import pytest

from vllm_engine import difference, engine, prompt


@pytest.mark.multiprocess
def test_two_ranks(places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    tokens = prompt(300, 6)
    with engine(places, tensor_parallel_size=2, module_path=None) as pair:
        cold = pair.generate([tokens])[0]
        pair.forget_gpu()
        memory = pair.generate([tokens])[0]
        pair.forget_gpu()
        pair.forget_memory()
        disk = pair.generate([tokens])[0]
        assert cold[2] == 0
        assert memory[2] == disk[2] == 256
        assert difference(cold, memory) == difference(cold, disk) == 0
