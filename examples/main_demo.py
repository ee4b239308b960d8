"""A prompt survives restarts of vLLM, and the loss of shared memory.

usage: python examples/main_demo.py [--model DIR] [--tokens N]

Real vLLM with a real model on the CPU, three processes one after the other:

1. the prompt is computed and kept; asked again, it comes from memory;
2. vLLM restarts and the shared memory is gone: it comes from disk;
3. vLLM restarts again and adopts the shared memory: it comes from memory.

A source counts only if the store's counters show it; all answers must be the same, tokens and
log-probabilities. Otherwise the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import serving

ANSWER_TOKENS = 24
PROCESS_LIMIT_S = 600
# float32 repeats exactly when the shapes are equal; a restored prompt is a shorter batch.
TOLERANCE = 1e-3

# What each process is asked for: (name of the request, where it must come from).
PROCESSES = [
    [("first time", "computed"), ("again", "memory")],
    [("restarted, memory gone", "disk")],
    [("restarted, memory adopted", "memory")],
]
SHOWN = {
    ("restarted, memory gone", "disk"): "disk after restart",
    ("restarted, memory adopted", "memory"): "memory after restart",
}


def serve(options: argparse.Namespace) -> None:
    """One vLLM process: answer the prompt as often as asked, and write down what came out."""
    places = json.loads(options.serve)
    server = serving.Server(
        options.model,
        {**places, "cpu_bytes": "512MiB", "disk_capacity_bytes": "2GiB"},
        max_model_len=options.tokens + 64,
    )
    try:
        # So that the first request pays for itself alone; shorter than a chunk, so not kept.
        server.answer(server.prompt(8, "Hello."), 1)
        prompt = server.prompt(options.tokens)
        answers = []
        for _ in range(options.times):
            server.forget_pages()
            answers.append(server.answer(prompt, ANSWER_TOKENS))
        options.result.write_text(json.dumps(answers))
    finally:
        server.close()


def run_process(options: argparse.Namespace, number: int, places: dict, work: Path) -> list[dict]:
    """Start such a process and wait for its end; its log is shown only when it fails."""
    result, log = work / f"{number}.json", work / f"{number}.log"
    command = [sys.executable, __file__, "--model", options.model, "--tokens", str(options.tokens)]
    command += ["--serve", json.dumps(places), "--result", str(result)]
    command += ["--times", str(len(PROCESSES[number]))]
    with log.open("w") as file:
        done = subprocess.run(
            command,
            env={**serving.ENVIRONMENT, **os.environ, "OMP_NUM_THREADS": "1"},
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


def equal(one: dict, other: dict) -> bool:
    """The same tokens, and log-probabilities that differ by rounding alone."""
    if one["token_ids"] != other["token_ids"]:
        return False
    return all(
        abs(a[token] - b[token]) <= TOLERANCE
        for a, b in zip(one["logprobs"], other["logprobs"], strict=True)
        for token in a.keys() & b.keys()
    )


def demonstrate(options: argparse.Namespace) -> int:
    work = Path(tempfile.mkdtemp(prefix="lakecache-demo-"))
    memory = Path(tempfile.mkdtemp(prefix="lakecache-demo-", dir="/dev/shm"))
    places = {"cache_dir": str(work / "cache"), "ram_dir": str(memory / "pools")}
    rows, good, first = [], True, None
    try:
        for number, requests in enumerate(PROCESSES):
            if requests[0][1] == "disk":
                shutil.rmtree(places["ram_dir"])
            print(f"vLLM, process {number + 1} of {len(PROCESSES)} ...", flush=True)
            answers = run_process(options, number, places, work)
            for (name, wanted), answer in zip(requests, answers, strict=True):
                first = first or answer
                same = equal(first, answer)
                restored = answer["restored_tokens"]
                good &= same and answer["source"] == wanted
                good &= (restored == 0) == (wanted == "computed")
                source = SHOWN.get((name, answer["source"]), answer["source"])
                rows.append((name, restored, answer, source, "yes" if same else "NO"))
    finally:
        shutil.rmtree(memory, ignore_errors=True)
        shutil.rmtree(work, ignore_errors=True)
    print(f"\nanswer: {first['text'].strip()}\n")
    print(f"{'request':26} {'tokens restored':>15}  {'source':21} {'TTFT':>8}  output equal")
    for name, restored, answer, source, same in rows:
        tokens = f"{restored} of {answer['prompt_tokens']}"
        ttft = f"{answer['ttft_seconds'] * 1000:.0f} ms"
        print(f"{name:26} {tokens:>15}  {source:21} {ttft:>8}  {same}")
    print("\ndemo: passed" if good else "\ndemo: FAILED")
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    serving.add_model(parser, "SmolLM2-135M")
    parser.add_argument(
        "--tokens", type=serving.prompt_tokens, default=1500, help="length of the prompt"
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--times", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return 0
    return demonstrate(options)


if __name__ == "__main__":
    sys.exit(main())
