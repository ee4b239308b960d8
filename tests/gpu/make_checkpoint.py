"""Make a small random checkpoint: make_checkpoint.py {qwen3|mla|hybrid|mtp} FOLDER

In a process of its own: once a process has used CUDA, vLLM can no longer fork from it. The weights
are spread so that every token depends on the whole context and log-probabilities differ clearly.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

VOCABULARY = 2048
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def make(kind: str) -> Any:
    """The model, on the CPU."""
    if kind == "qwen3":
        from transformers import Qwen3Config, Qwen3ForCausalLM

        return Qwen3ForCausalLM(
            Qwen3Config(num_hidden_layers=6, num_key_value_heads=4, head_dim=128, **COMMON)
        )
    if kind in {"hybrid", "mtp"}:
        from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

        return Qwen3_5ForCausalLM(
            Qwen3_5TextConfig(
                num_hidden_layers=8,
                layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
                num_key_value_heads=2, head_dim=128, linear_num_key_heads=4,
                linear_num_value_heads=8, linear_key_head_dim=128, linear_value_head_dim=128,
                **COMMON,
            )
        )  # fmt: skip
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    # DeepSeek-V2-Lite's attention; all layers dense, so that no expert kernels are needed.
    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            num_hidden_layers=4, num_key_value_heads=8, first_k_dense_replace=4,
            n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
            moe_intermediate_size=256, n_group=1, topk_group=1, q_lora_rank=None,
            kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, **COMMON,
        )
    )  # fmt: skip


def main() -> int:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    import torch

    torch.manual_seed(7)
    model = make(kind).to(torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # A slow decay: a recurrent state remembers the whole prompt.
            if name.endswith("A_log"):
                weight.uniform_(-3.0, 0.0)
            elif name.endswith("dt_bias"):
                weight.uniform_(-2.0, 0.0)
            if weight.ndim < 2 or "conv1d" in name:
                continue
            spread = 1.0 if "embed_tokens" in name else weight.shape[1] ** -0.5
            weight.normal_(0.0, spread * (2.0 if "lm_head" in name else 1.0))
    model.to(torch.bfloat16).save_pretrained(str(folder))
    if kind == "mtp":
        sys.path.insert(0, str(Path(__file__).parents[1]))
        import mtp_model

        mtp_model.add_head(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
