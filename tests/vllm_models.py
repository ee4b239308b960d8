"""Tiny random models of families that the chunk connector does not serve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from make_models import save_random

COMMON: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "max_position_embeddings": 4096, "bos_token_id": None,
    "eos_token_id": 256, "pad_token_id": 257,
}  # fmt: skip
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
WINDOW = 64


def sliding(folder: Path) -> None:
    """Every layer sees the last 64 tokens only."""
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        **COMMON, **HEADS, intermediate_size=256, num_hidden_layers=2, sliding_window=WINDOW
    )
    save_random(MistralForCausalLM(config), folder, torch.float32)


def interleaved(folder: Path) -> None:
    """Layers with a window and layers without take turns."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **COMMON, **HEADS, intermediate_size=256, num_hidden_layers=4, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    save_random(Gemma3ForCausalLM(config), folder, torch.float32)


def hybrid(folder: Path) -> None:
    """Three layers of Gated DeltaNet, then one of attention."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        **COMMON, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, head_dim=64, linear_num_key_heads=1, linear_num_value_heads=2,
        linear_key_head_dim=64, linear_value_head_dim=64,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )  # fmt: skip
    save_random(Qwen3_5ForCausalLM(config), folder, torch.bfloat16)


def encoder_decoder(folder: Path) -> None:
    """A speech model: an encoder whose output the decoder's layers look at."""
    import json

    import torch
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=512, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=80,
        max_source_positions=1500, max_target_positions=448, bos_token_id=256, eos_token_id=256,
        pad_token_id=257, decoder_start_token_id=258, begin_suppress_tokens=None,
        suppress_tokens=None,
    )  # fmt: skip
    save_random(WhisperForConditionalGeneration(config), folder, torch.float32)
    features = {
        "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80,
        "sampling_rate": 16000, "hop_length": 160, "chunk_length": 30, "n_fft": 400,
        "processor_class": "WhisperProcessor",
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(features))


RECIPES: dict[str, Callable[[Path], None]] = {
    "sliding": sliding,
    "interleaved": interleaved,
    "hybrid": hybrid,
    "encoder_decoder": encoder_decoder,
}
