"""Adapters: their content counts, and neither their name nor their path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from vllm_engine import MODEL, difference, engine, prompt

RANK = 8


def write_adapter(folder: Path, seed: int) -> str:
    """A random adapter of the attention's projections, at the same place for every seed."""
    from safetensors.torch import save_file

    model = json.loads((MODEL / "config.json").read_text())
    hidden, heads = model["hidden_size"], model["num_attention_heads"] * model["head_dim"]
    made = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(model["num_hidden_layers"]):
        for name, outputs in (
            ("q_proj", heads),
            ("v_proj", model["num_key_value_heads"] * model["head_dim"]),
        ):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(RANK, hidden, generator=made) * 0.1
            weights[f"{at}.lora_B.weight"] = torch.randn(outputs, RANK, generator=made) * 0.1
    folder.mkdir(exist_ok=True)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    settings = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": 16, "bias": "none",
        "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "x",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK, "max_cpu_loras": 2}


def test_content_of_the_adapter_counts(places: dict[str, str], tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    tokens = prompt(300, 21)
    place = tmp_path / "adapter"

    def ask(cached: Any, lora: Any) -> Any:
        cached.forget_gpu()
        return cached.generate([tokens], lora_request=lora)[0]

    write_adapter(place, 1)
    with engine(places, **LORA) as first:
        lora = LoRARequest("tuned", 1, str(place))
        # The first request only starts the reading of the adapter's files.
        cold = ask(first, lora)
        assert first.wait_adapter(lora)
        ask(first, lora)
        hit = ask(first, lora)
        assert (cold[2], hit[2]) == (0, 256)
        assert difference(cold, hit) == 0
        without = ask(first, None)
        assert without[2] == 0
        assert difference(without, cold) > 0.01
        # The same adapter under another name and number is the same adapter's content, but vLLM's
        # block hashes hold its name: a miss, never a mistake.
        other = ask(first, LoRARequest("other", 2, str(place)))
        assert difference(cold, other) == 0
    write_adapter(place, 2)
    with engine(places, **LORA) as second:
        assert second.wait_adapter(lora)
        changed = ask(second, lora)
        assert changed[2] == 0
        assert difference(changed, cold) > 0.01
        # What the second adapter stored is its own.
        assert difference(changed, ask(second, lora)) == 0
    write_adapter(place, 1)
    with engine(places, **LORA) as third:
        assert third.wait_adapter(lora)
        again = ask(third, lora)
        assert again[2] == 256
        assert difference(cold, again) == 0
