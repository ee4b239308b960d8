"""Shapes of the models that the engine benches run, and what a token takes in their caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_HYBRID_LAYERS = ["linear_attention"] * 3 + ["full_attention"]

# The shapes of the published models; the weights are made up by vLLM (load_format=dummy).
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    },
    "qwen3-tiny": _QWEN3
    | {
        "hidden_size": 128,
        "intermediate_size": 256,
        "head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "vocab_size": 512,
        "eos_token_id": 256,
        "bos_token_id": 257,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "qwen3.5-35b-a3b": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "attention_bias": False,
        "eos_token_id": 248044,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "layer_types": _HYBRID_LAYERS * 10,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 248320,
    },
}
MODELS["qwen3.5-tiny"] = MODELS["qwen3.5-35b-a3b"] | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "layer_types": _HYBRID_LAYERS,
    "max_position_embeddings": 4096,
    "vocab_size": 512,
    "eos_token_id": 256,
}


def kv_bytes_per_token(model: str) -> int:
    """Bytes of attention KV that one token takes in all layers, in two-byte numbers."""
    shape = MODELS[model]
    layers = shape.get("layer_types", ["full_attention"] * shape["num_hidden_layers"])
    full = sum(kind == "full_attention" for kind in layers)
    return full * 2 * shape["num_key_value_heads"] * shape["head_dim"] * 2


def state_bytes(model: str) -> int:
    """Bytes of one recurrent state of all linear-attention layers (conv bf16, recurrent fp32)."""
    shape = MODELS[model]
    layers = shape.get("layer_types", []).count("linear_attention")
    if not layers:
        return 0
    keys = shape["linear_num_key_heads"] * shape["linear_key_head_dim"]
    values = shape["linear_num_value_heads"] * shape["linear_value_head_dim"]
    conv = (shape["linear_conv_kernel_dim"] - 1) * (2 * keys + values) * 2
    return layers * (conv + values * shape["linear_key_head_dim"] * 4)


def write_model(model: str, folder: Path) -> Path:
    """Make a model folder that holds nothing but its shape."""
    place = folder / model
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(MODELS[model], indent=1))
    return place
