"""A hybrid model (attention and Gated DeltaNet): checkpoints from memory, from disk, from memory.

usage: python examples/hybrid_demo.py [--model DIR] [--mode native|checkpoint]
           [--tier-phases warm,cold,rewarm] [--tokens N,N] [--prefix-match-unit N]
           [--full-logprobs] [--cpu-bytes SIZE] [--disk-bytes SIZE] [--cache-dir DIR]
           [--output FILE.json]

Every prompt is computed first. Then the phases follow, each after vLLM's own prefix cache was
emptied: `warm` finds the checkpoint in memory, `cold` empties the memory tier too and reads it from
disk, `rewarm` finds in memory what `cold` has read. `--mode native` is vLLM alone: for each phase
the prompt is computed again, and then continued from vLLM's own prefix cache, which holds the same
number of tokens. So the outputs of both modes can be compared, one by one:
python tests/compare_outputs.py A.json B.json

With --full-logprobs the file has, for each token of an answer, the log-probabilities of the whole
vocabulary in the order of the token ids: float32 in base64.
"""

from __future__ import annotations

import argparse
import array
import base64
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import serving

# Where a phase must find the checkpoint.
SOURCES = {"warm": "memory", "cold": "disk", "rewarm": "memory"}


def row(table: dict[str, float]) -> str:
    """A whole vocabulary's log-probabilities, in the order of the token ids."""
    values = array.array("f", (table[str(token)] for token in range(len(table))))
    return base64.b64encode(values.tobytes()).decode()


def ask(server: serving.Server, options: argparse.Namespace, prompt: list[int]) -> dict[str, Any]:
    logprobs = -1 if options.full_logprobs else 1
    server.events()
    answer = server.answer(prompt, options.answer_tokens, logprobs=logprobs)
    grown = answer["counters"]
    answer["events"] = [
        {"tier": event["tier"], "op": event["op"], "bytes": event["bytes"]}
        for event in server.events()
        if event["op"] in {"hit", "read", "promote"}
    ]
    answer["disk_payload_reads"] = grown["disk_payload_reads"]
    answer["promotions"] = grown["promotions"]
    if options.full_logprobs:
        # The chosen tokens' alone stay readable; the rest is packed.
        tables = answer["logprobs"]
        answer["full_logprobs"] = [row(table) for table in tables]
        answer["logprobs"] = [
            {str(token): table[str(token)]}
            for token, table in zip(answer["token_ids"], tables, strict=True)
        ]
    return answer


def good(phase: str, answer: dict[str, Any], expected: dict[str, Any], *, native: bool) -> bool:
    """Whether the checkpoint came from where it must, and the answer is that of the first phase."""
    same = all(
        answer[name] == expected[name]
        for name in ("token_ids", "logprobs", "full_logprobs", "restored_tokens")
        if name in expected
    )
    reads, promotions = answer["disk_payload_reads"], answer["promotions"]
    if native:
        return same
    if SOURCES[phase] == "disk":
        return same and answer["source"] == "disk" and reads == promotions > 0
    return same and answer["source"] == "memory" and reads == promotions == 0


def refuse_short(server: serving.Server, options: argparse.Namespace) -> None:
    """End where vLLM keeps no state of a prompt: it does at whole blocks, or units of one."""
    group = server.core.scheduler.kv_cache_config.kv_cache_groups[0]
    step = options.prefix_match_unit or group.kv_cache_spec.block_size
    if min(options.tokens) <= step:
        raise SystemExit(
            f"--tokens {min(options.tokens)}: nothing is restored of {step} tokens or fewer with "
            "this model; ask for more, or for a smaller --prefix-match-unit"
        )


def run(options: argparse.Namespace, cache_dir: str, ram_dir: str) -> tuple[dict[str, Any], bool]:
    native = options.mode == "native"
    extra = {
        "cache_dir": cache_dir,
        "ram_dir": ram_dir,
        "cpu_bytes": options.cpu_bytes,
        "disk_capacity_bytes": options.disk_bytes,
    }
    server = serving.Server(
        options.model, None if native else extra,
        dtype="bfloat16", max_model_len=max(options.tokens) + 64, max_logprobs=-1,
        prefix_match_unit=options.prefix_match_unit,
    )  # fmt: skip
    computed, answers, well = [], [], True
    try:
        refuse_short(server, options)
        for tokens in options.tokens:
            # No prompt is the beginning of another.
            head = server.llm.get_tokenizer().encode(f"{tokens} tokens. ")
            prompt = (head + server.prompt(tokens))[:tokens]
            server.forget_pages()
            computed.append(ask(server, options, prompt))
            expected = None
            for phase in options.tier_phases:
                server.forget_pages()
                if native:
                    server.answer(prompt, 1)
                elif phase == "cold":
                    server.cache.clear_memory()
                answer = ask(server, options, prompt)
                fine = good(phase, answer, expected or answer, native=native)
                expected = expected or answer
                answers.append({"phase": phase, "as_promised": fine, **answer})
                well &= fine
                source = "vLLM's own cache" if native else SOURCES[phase]
                print(
                    f"{tokens:6} tokens, {phase:7}{answer['restored_tokens']:6} from {source}, "
                    f"first token after {answer['ttft_seconds'] * 1000:.0f} ms, "
                    f"{answer['disk_payload_reads']} reads, {answer['promotions']} promotions"
                    f"{'' if fine else '  NOT as promised'}"
                )
        return {"mode": options.mode, "computed": computed, "outputs": answers}, well
    finally:
        server.close()


def phases(text: str) -> list[str]:
    found = text.split(",")
    for phase in found:
        if phase not in SOURCES:
            raise argparse.ArgumentTypeError(f"{phase!r} is not warm, cold or rewarm")
    return found


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    serving.add_model(parser, "qwen35-tiny")
    parser.add_argument(
        "--mode", choices=["native", "checkpoint"], default="checkpoint",
        help="vLLM alone, or with LakeCache",
    )  # fmt: skip
    parser.add_argument(
        "--tier-phases", type=phases, default="warm,cold,rewarm",
        help="from memory, from disk, from memory again",
    )  # fmt: skip
    parser.add_argument("--tokens", type=numbers, default="300", help="lengths of the prompts")
    parser.add_argument("--prefix-match-unit", type=int, help="vLLM's, for states within a block")
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--full-logprobs", action="store_true", help="of the whole vocabulary")
    parser.add_argument("--cpu-bytes", default="512MiB")
    parser.add_argument("--disk-bytes", default="2GiB")
    parser.add_argument("--cache-dir", help="default: a folder that is removed in the end")
    parser.add_argument("--output", type=Path, help="the answers, for tests/compare_outputs.py")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="lakecache-example-") as files,
        tempfile.TemporaryDirectory(prefix="lakecache-example-", dir="/dev/shm") as memory,
    ):
        record, well = run(options, options.cache_dir or f"{files}/cache", memory)
    if options.output:
        options.output.write_text(json.dumps(record))
    print("outputs equal, tiers as claimed" if well else "NOT as promised")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
