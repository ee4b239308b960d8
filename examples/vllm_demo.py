"""Real vLLM, one prompt three times: computed, restored from memory, restored from disk.

usage: python examples/vllm_demo.py --model PATH [--mode native|pinned|sync] [--output FILE.json]
           [--cpu-bytes SIZE] [--disk-bytes SIZE] [--cache-dir DIR] [--device cpu|cuda]

`native` is vLLM alone, for comparison; `pinned` and `sync` choose LakeCache's transfer. The output
file can be compared with that of another mode: python tests/compare_outputs.py A.json B.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import serving


def run(options: argparse.Namespace, cache_dir: str, ram_dir: str) -> tuple[list[dict], bool]:
    native = options.mode == "native"
    extra = {
        "cache_dir": cache_dir,
        "ram_dir": ram_dir,
        "cpu_bytes": options.cpu_bytes,
        "disk_capacity_bytes": options.disk_bytes,
        "transfer": options.mode,
    }
    server = serving.Server(
        options.model,
        None if native else extra,
        dtype=options.dtype,
        max_model_len=options.tokens + 64,
    )
    try:
        server.answer(server.prompt(8, "Hello."), 1)  # warm up; shorter than a chunk
        prompt = server.prompt(options.tokens)
        answers = []
        good = True
        for wanted in ("computed", "memory", "disk"):
            server.forget_pages()
            if wanted == "disk" and not native:
                server.cache.clear_memory()
            answers.append(server.answer(prompt, options.answer_tokens))
            got = answers[-1]
            print(
                f"{got['source']:10} {got['restored_tokens']:5} of {got['prompt_tokens']} tokens "
                f"restored, first token after {got['ttft_seconds'] * 1000:.0f} ms"
            )
            good &= got["source"] == ("computed" if native else wanted)
            good &= got["token_ids"] == answers[0]["token_ids"]
        return answers, good
    finally:
        server.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    serving.add_model(parser, "SmolLM2-135M")
    parser.add_argument(
        "--mode", choices=["native", "pinned", "sync"], default="pinned",
        help="vLLM alone, or how LakeCache copies",
    )  # fmt: skip
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: what vLLM is for")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cpu-bytes", default="512MiB")
    parser.add_argument("--disk-bytes", default="2GiB")
    parser.add_argument("--cache-dir", help="default: a folder that is removed in the end")
    parser.add_argument(
        "--tokens", type=serving.prompt_tokens, default=1024, help="length of the prompt"
    )
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--output", type=Path, help="the answers, for tests/compare_outputs.py")
    options = parser.parse_args()
    serving.require_device(options.device)
    with (
        tempfile.TemporaryDirectory(prefix="lakecache-example-") as files,
        tempfile.TemporaryDirectory(prefix="lakecache-example-", dir="/dev/shm") as memory,
    ):
        answers, good = run(options, options.cache_dir or f"{files}/cache", memory)
    if options.output:
        options.output.write_text(json.dumps({"mode": options.mode, "outputs": answers}))
    print("outputs equal, sources as claimed" if good else "NOT as promised")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
