"""Save the KV of one prompt, as real vLLM holds it, to a safetensors file.

usage: python examples/kv_snapshot.py --model PATH --layers 0,1 --output FILE.safetensors

Each tensor is the pages of one layer in vLLM's own layout; the file's metadata says which.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import serving


def snapshot(options: argparse.Namespace) -> tuple[dict, dict[str, str]]:
    from vllm import SamplingParams

    server = serving.Server(options.model, None, max_model_len=options.tokens + 64)
    try:
        prompt = server.prompt(options.tokens)
        sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        server.engine.add_request("snapshot", {"prompt_token_ids": prompt}, sampling)
        scheduler = server.core.scheduler
        made = False
        while not made:  # until the first token: then the prompt's KV is complete
            made = any(done.outputs[0].token_ids for done in server.engine.step())
        request = next(iter(scheduler.requests))
        (blocks,) = scheduler.kv_cache_manager.get_block_ids(request)
        config = scheduler.kv_cache_config
        caches = server.llm.collective_rpc(lambda worker: worker.model_runner.kv_caches)[0]
        block_size = config.kv_cache_groups[0].kv_cache_spec.block_size
        blocks = blocks[: -(-options.tokens // block_size)]
        tensors = {}
        for layer in options.layers:
            cache = caches[layer]
            axis = next(at for at, size in enumerate(cache.shape) if size == config.num_blocks)
            tensors[f"layer {layer}"] = (
                cache.movedim(axis, 0)[blocks].movedim(0, axis).contiguous().cpu()
            )
        about = {
            "model": Path(options.model).name,
            "prompt_tokens": str(len(prompt)),
            "block_tokens": str(block_size),
            "block_axis": str(axis),
            "layout": str(getattr(config, "kv_cache_layout", "unknown")),
            "token_ids": json.dumps(prompt),
        }
        return tensors, about
    finally:
        server.close()


def layers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    serving.add_model(parser, "SmolLM2-135M")
    parser.add_argument("--layers", type=layers, default="0,1", help="numbers of layers")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: what vLLM is for")
    parser.add_argument("--tokens", type=int, default=512, help="length of the prompt")
    parser.add_argument("--output", type=Path, required=True, help="the safetensors file to make")
    options = parser.parse_args()
    serving.require_device(options.device)
    tensors, about = snapshot(options)
    from safetensors.torch import load_file, save_file

    save_file(tensors, options.output, metadata=about)
    back = load_file(options.output)
    for name, tensor in tensors.items():
        print(f"{name}: {tuple(tensor.shape)} {tensor.dtype}, {tensor.nbytes:,} bytes")
    print(f"layout {about['layout']}, blocks of {about['block_tokens']} tokens: {options.output}")
    good = all(tensor.equal(back[name]) and tensor.any() for name, tensor in tensors.items())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
