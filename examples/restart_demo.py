"""A prompt survives the restart of vLLM, and then the loss of shared memory.

Three vLLM processes, one after the other, answer the same long prompt with a real model on the CPU:

1. the cache is empty: the prompt is computed, and kept;
2. a new process finds it in shared memory;
3. the shared memory is removed: a new process finds it on disk.

The answers must be the same, tokens and log-probabilities; else the exit status is 1.

usage: python examples/restart_demo.py [--model DIR] [--tokens N]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "\n\nIn one sentence: what does LakeCache keep, and where?\n"
ANSWER_TOKENS = 32
PROCESS_LIMIT_S = 600
# In float32 a restored answer differs from a computed one by rounding alone.
TOLERANCE = 1e-3

# vLLM on a CPU in one process, without compilation and without the network.
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TQDM_DISABLE": "1",
}


def answer(model: str, tokens: int, cache_dir: str, ram_dir: str, result: Path) -> None:
    """Start vLLM, answer the prompt once, write down what came out, and end."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=tokens + 256,
        max_num_seqs=4,
        kv_transfer_config={
            "kv_connector": "LakeCacheConnector",
            "kv_connector_module_path": "lakecache.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "cache_dir": cache_dir,
                "ram_dir": ram_dir,
                "cpu_bytes": "512MiB",
                "disk_capacity_bytes": "2GiB",
            },
        },
    )
    # Make the first real request pay for nothing but itself; shorter than a chunk, so not kept.
    llm.generate("Hello.", SamplingParams(max_tokens=1), use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    texts = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "docs/semantics.md")]
    text = tokenizer.encode("\n".join(path.read_text() for path in texts))
    message = tokenizer.decode(text[: tokens - 100]) + QUESTION
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False
    )
    prompt = tokenizer.encode(prompt)

    sampling = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=1)
    started = time.perf_counter()
    done = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0]
    seconds = time.perf_counter() - started
    output = done.outputs[0]
    tables = [{str(t): v.logprob for t, v in step.items()} for step in output.logprobs]
    record = {
        "outputs": [{"token_ids": list(output.token_ids), "logprobs": tables}],
        "text": output.text,
        "prompt_tokens": len(prompt),
        "restored_tokens": done.num_cached_tokens or 0,
        "seconds": seconds,
    }
    llm.llm_engine.engine_core.shutdown()
    result.write_text(json.dumps(record))


def run_process(name: str, arguments: list[str], work: Path) -> dict:
    """One vLLM process from start to end; its log is shown only when it fails."""
    result, log = work / f"{name}.json", work / f"{name}.log"
    command = [sys.executable, __file__, "--answer", str(result), *arguments]
    with log.open("w") as file:
        done = subprocess.run(
            command,
            env={**VLLM_ENVIRONMENT, **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=PROCESS_LIMIT_S,
            check=False,
        )
    if done.returncode or not result.exists():
        print(log.read_text(errors="replace")[-6000:], file=sys.stderr)
        raise SystemExit(f"demo: vLLM ended with status {done.returncode}")
    return json.loads(result.read_text())


def same_answer(a: Path, b: Path) -> bool:
    compare = [sys.executable, str(ROOT / "tests" / "compare_outputs.py")]
    limit = ["--tolerance", str(TOLERANCE)]
    return (
        subprocess.run([*compare, str(a), str(b), *limit], timeout=60, check=False).returncode == 0
    )


def demonstrate(model: str, tokens: int) -> int:
    work = Path(tempfile.mkdtemp(prefix="lakecache-demo-"))
    ram = Path(tempfile.mkdtemp(prefix="lakecache-demo-", dir="/dev/shm"))
    arguments = ["--model", model, "--tokens", str(tokens)]
    arguments += ["--cache-dir", str(work / "cache"), "--ram-dir", str(ram / "pools")]
    steps = [
        ("computed", "empty cache"),
        ("memory", "vLLM restarted"),
        ("disk", "shared memory removed, vLLM restarted"),
    ]
    try:
        records = {}
        for name, what in steps:
            if name == "disk":
                shutil.rmtree(ram / "pools")
            print(f"{what} ...", flush=True)
            record = records[name] = run_process(name, arguments, work)
            restored, total = record["restored_tokens"], record["prompt_tokens"]
            print(f"  {restored} of {total} prompt tokens restored, {record['seconds']:.2f} s")
        print(f"\nanswer: {records['computed']['text'].strip()}\n")
        good = records["computed"]["restored_tokens"] == 0
        for name in ("memory", "disk"):
            print(f"{name} against computed: ", end="", flush=True)
            good &= same_answer(work / "computed.json", work / f"{name}.json")
            if records[name]["restored_tokens"] == 0:
                print(f"{name}: nothing was restored")
                good = False
        print("demo: passed" if good else "demo: FAILED")
        return 0 if good else 1
    finally:
        shutil.rmtree(ram, ignore_errors=True)
        shutil.rmtree(work, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=str(ROOT / ".models" / "SmolLM2-135M"))
    parser.add_argument("--tokens", type=int, default=1500, help="length of the prompt")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cache-dir", help=argparse.SUPPRESS)
    parser.add_argument("--ram-dir", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        answer(options.model, options.tokens, options.cache_dir, options.ram_dir, options.answer)
        return 0
    return demonstrate(options.model, options.tokens)


if __name__ == "__main__":
    sys.exit(main())
