"""What a request costs with LakeCache that finds nothing, and what one costs that finds all.

    python benches/bench_cold_overhead.py [--model DIR] [--pairs 15] [--lengths 512,1024,1500]

Real vLLM on the CPU, one engine, one thread. For each prompt, which is new:

- off     computed, with the connector taken out of the engine
- cold    computed, with the connector: looked up, not found, saved
- memory  found in memory
- disk    found on disk, memory emptied; read with O_DIRECT
- gpu     found by vLLM itself, in its own pages, without the connector: what no hit can beat

`off` and `cold` change places from prompt to prompt, so a disturbance meets both, and every ratio
is one of neighbours. Counters prove where each answer came from; another source is an error.
Beside the time, which a busy machine blurs, stands the time without what the engine's thread spent
waiting for a processor (`alone`), and the processor time of that thread.
`LAKECACHE_BENCH_QUICK=1` takes two prompts of each length; `LAKECACHE_BENCH_DIR` is where the files
go.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import _record
from _samples import interval, median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "python")]

from serving import Server  # noqa: E402

TOKENS = 8
SOURCES = {
    "off": "computed", "cold": "computed", "memory": "memory", "disk": "disk", "gpu": "gpu",
}  # fmt: skip
COLD_BAR = 1.02


def queued() -> float:
    """Seconds that this thread has waited for a processor, ready to run."""
    text = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text()
    return int(text.split()[1]) / 1e9


class Switched(Server):
    """An engine whose connector can be taken out and put back, while nothing runs."""

    def __init__(self, model: str, extra: dict[str, Any], **settings: Any) -> None:
        super().__init__(model, extra, **settings)
        from vllm.distributed.kv_transfer import kv_transfer_state

        self.state = kv_transfer_state
        self.scheduler = self.core.scheduler
        self.parts = (
            self.scheduler.connector,
            self.state._KV_CONNECTOR_AGENT,
            self.scheduler.defer_block_free,
        )

    def connect(self, on: bool) -> None:
        assert not self.scheduler.has_requests()
        connector, agent, defer = self.parts if on else (None, None, False)
        self.scheduler.connector = connector
        self.state._KV_CONNECTOR_AGENT = agent
        self.scheduler.defer_block_free = defer

    def forget_memory(self) -> None:
        deadline = time.monotonic() + 30
        while self.cache.clear_memory():
            assert time.monotonic() < deadline

    def ask(self, prompt: list[int], case: str) -> dict[str, float]:
        """Times of one request, in seconds; raises where its answer had another source."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        if case != "gpu":
            self.forget_pages()
        self.connect(case not in ("off", "gpu"))
        before, first = self.counters(), None
        started, thread, waited = time.perf_counter(), time.thread_time(), queued()
        whole = time.process_time()
        self.engine.add_request(f"{case} {started}", {"prompt_token_ids": prompt}, sampling)
        while self.engine.has_unfinished_requests():
            for done in self.engine.step():
                if first is None and done.outputs and done.outputs[0].token_ids:
                    first = time.perf_counter() - started
                    first_thread = time.thread_time() - thread
                    first_queued = queued() - waited
        total = time.perf_counter() - started
        grown = {name: value - before[name] for name, value in self.counters().items()}
        self.settle()
        whole = time.process_time() - whole
        self.connect(True)
        restored = done.num_cached_tokens or 0
        expected = SOURCES[case]
        proved = {
            "computed": not restored and not grown["memory_hits"] and not grown["disk_hits"],
            "memory": restored and grown["memory_hits"] and not grown["disk_payload_reads"],
            "disk": restored and grown["disk_payload_reads"] and not grown["memory_hits"],
            "gpu": restored and not grown["memory_hits"] and not grown["disk_hits"],
        }
        if not proved[expected]:
            raise SystemExit(f"{case}: {restored} tokens restored, counted {grown}")
        return {
            "ttft": first, "total": total, "ttft_alone": first - first_queued,
            "ttft_thread": first_thread, "process": whole, "restored": restored,
            "tokens": list(done.outputs[0].token_ids),
        }  # fmt: skip


def measure(server: Switched, length: int, pairs: int, seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    vocabulary = server.llm.get_tokenizer().vocab_size
    rounds = []
    for number in range(pairs + 1):
        prompt = [chance.randrange(vocabulary // 2) for _ in range(length)]
        order = ["off", "cold"] if number % 2 else ["cold", "off"]
        asked = {}
        for case in [*order, "memory", "disk", "gpu"]:
            if case == "disk":
                server.forget_memory()
            asked[case] = server.ask(prompt, case)
        answers = [asked[case].pop("tokens") for case in asked]
        asked["same_answer"] = all(answer == answers[0] for answer in answers)
        # The first round warms up what is made once.
        if number:
            rounds.append(asked)
    return rounds


def summary(length: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians in milliseconds, and ratios to `off` with their 95 % intervals."""
    cells: dict[str, Any] = {}
    for case in SOURCES:
        cells[case] = {"restored_tokens": rounds[0][case]["restored"]}
        for what in ("ttft", "ttft_alone", "total", "ttft_thread", "process"):
            values = [one[case][what] for one in rounds]
            ratios = [one[case][what] / one["off"][what] for one in rounds]
            cells[case][what] = {
                "median_ms": round(statistics.median(values) * 1e3, 2),
                "of_off": [round(n, 4) for n in (median(ratios), *interval(ratios))],
                "all_ms": [round(value * 1e3, 2) for value in values],
            }
    same = sum(one["same_answer"] for one in rounds)
    return {"tokens": length, "pairs": len(rounds), "same_answers": same, "cells": cells}


def show(found: list[dict[str, Any]]) -> None:
    """Print the table: medians in milliseconds, and ratios to `off` with their intervals."""
    print(f"{'tokens':>6} {'case':<7} {'restored':>8} {'TTFT':>8} {'of off, 95 %':>22} "
          f"{'alone':>8} {'of off, 95 %':>22} {'request':>8} {'of off, 95 %':>22} "
          f"{'thread':>7} {'process':>7}")  # fmt: skip
    for one in found:
        for case, cell in one["cells"].items():
            print(f"{one['tokens']:>6} {case:<7} {cell['restored_tokens']:>8}", end=" ")
            for what in ("ttft", "ttft_alone", "total"):
                ratio = "{:.3f} ({:.3f} .. {:.3f})".format(*cell[what]["of_off"])
                print(f"{cell[what]['median_ms']:>8.1f} {ratio:>22}", end=" ")
            print(*(f"{cell[what]['of_off'][0]:>7.3f}" for what in ("ttft_thread", "process")))
    print(
        "(alone: TTFT without waiting for a processor; thread, process: ratios of processor time, "
        "of the engine's thread until the first token and of the process until all is on disk; "
        f"{TOKENS} tokens made)"
    )
    for one in found:
        cold = one["cells"]["cold"]["ttft"]["of_off"]
        hits = [one["cells"][case]["ttft"]["of_off"] for case in ("memory", "disk")]
        percent = [f"{(value - 1) * 100:+.1f} %" for value in cold]
        within = "within" if cold[0] <= COLD_BAR else "beyond"
        faster = "faster" if all(hit[2] < 1 for hit in hits) else "NOT faster"
        print(
            f"{one['tokens']} tokens: cold {percent[0]} ({within} {(COLD_BAR - 1):.0%}; interval "
            f"{percent[1]} .. {percent[2]}), hits {faster} than computing, "
            f"{one['same_answers']} of {one['pairs']} prompts with the same five answers"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    models = Path(os.environ.get("LAKECACHE_MODELS", ROOT / ".models"))
    parser.add_argument("--model", default=str(models / "SmolLM2-135M"))
    parser.add_argument("--lengths", default="512,1024,1500", help="tokens of the prompts")
    quick = os.environ.get("LAKECACHE_BENCH_QUICK", "0") not in ("", "0")
    parser.add_argument("--pairs", type=int, default=2 if quick else 15)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--no-record", action="store_true", default=quick)
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", VLLM_LOGGING_LEVEL="ERROR")
    disk = os.environ.get("LAKECACHE_BENCH_DIR")
    with (
        tempfile.TemporaryDirectory(prefix="lakecache-bench-", dir=disk) as files,
        tempfile.TemporaryDirectory(prefix="lakecache-bench-", dir="/dev/shm") as memory,
    ):
        extra = {
            "cache_dir": files, "ram_dir": memory, "cpu_bytes": "1GiB",
            "disk_capacity_bytes": "4GiB",
        }  # fmt: skip
        server = Switched(
            options.model, extra, dtype=options.dtype, max_model_len=2048,
            kv_cache_memory_bytes=512 << 20,
        )  # fmt: skip
        found = []
        for length in map(int, options.lengths.split(",")):
            rounds = measure(server, length, options.pairs, seed=length)
            found.append(summary(length, rounds))
            show(found[-1:])
            # After each length, so that a run cut short leaves what it has.
            if not options.no_record:
                setting = {"model": Path(options.model).name, "dtype": options.dtype, "threads": 1}
                _record.write("cold_overhead", {"setting": setting, "lengths": found})
        server.close()


if __name__ == "__main__":
    main()
