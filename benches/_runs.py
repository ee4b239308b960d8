"""What the runs of the engine benches share: options, one model after the other, samples."""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from _disk import disk_bandwidth
from _engines import ROOT, Host, start_hosts, stop_all
from _samples import interval, median, table
from _stages import launching_ms, planned_ms
from _workplace import GIB, Turn, Workplace, progress

LINK_BYTES = GIB
# Prompts of alternating pairs have seeds from here on, so many for each pair.
PAIR_SEED, SEEDS_PER_PAIR = 10_000, 8


def make_parser(
    description: str, *, models: Sequence[str], arms: Sequence[str]
) -> argparse.ArgumentParser:
    """A parser with the options that every engine bench has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--models", default=",".join(models))
    parser.add_argument("--arms", default=",".join(arms))
    parser.add_argument("--output", type=Path, help="JSON record, written as the run goes")
    parser.add_argument("--scratch", type=Path, help="where the disk tiers lie (default: TMPDIR)")
    parser.add_argument("--cpu-gib", type=float, default=24.0, help="memory tier of each arm")
    parser.add_argument("--disk-gib", type=float, default=24.0, help="disk tier of each arm")
    parser.add_argument("--kv-gib", type=float, help="KV cache on the GPU (default: by model)")
    parser.add_argument("--gpu-share", type=float, default=0.1, help="gpu_memory_utilization")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--rival-block", type=int, help="tokens per chunk of OffloadingConnector")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--keep-logs", type=Path, help="file to append the engines' logs to")
    parser.add_argument(
        "--stages", action="store_true", help="record what the engine core did for each request"
    )
    parser.add_argument(
        "--turn", type=Path, help="file whose lock is held while this bench measures"
    )
    parser.add_argument(
        "--lakecache", type=json.loads, default={}, help="further LakeCache settings, JSON"
    )
    parser.add_argument("--engine", type=json.loads, default={}, help="further vllm.LLM settings")
    return parser


def split(text: str, convert: Any = str) -> list[Any]:
    """Values of a comma-separated option."""
    return [convert(part) for part in text.split(",") if part]


def pair_seed(number: int, place: int) -> int:
    """The seed of the prompt that comes at this place within a pair."""
    return PAIR_SEED + number * SEEDS_PER_PAIR + place


def describe_machine() -> dict[str, Any]:
    """What a record has to say about where it was made."""
    versions: dict[str, Any] = {}
    for name in ("vllm", "torch", "triton", "lmcache"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _said_by("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
        "gpu": _said_by(
            "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"
        ),
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
        "shm_bytes": shutil.disk_usage("/dev/shm").total,
    }  # fmt: skip


def _said_by(*command: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return done.stdout.strip() or None
    return None


def new_record(bench: str, **results: Any) -> dict[str, Any]:
    """A record that says where and how it was made, with nothing measured yet."""
    return {
        "bench": bench, "machine": describe_machine(), "arguments": sys.argv[1:], **results
    }  # fmt: skip


class Run:
    """One model's measurements. A bench adds `measure` and `report`."""

    def __init__(
        self, model: str, options: argparse.Namespace, record: dict[str, Any],
        kv_gib: dict[str, float],
    ) -> None:  # fmt: skip
        """`kv_gib` is the size of the GPU's KV cache by model, unless an option says another."""
        self.model, self.record = model, record
        self.options = copy.copy(options)
        if self.options.kv_gib is None:
            self.options.kv_gib = kv_gib[model]
        self.place = Workplace(options.output, options.scratch)
        self.turn_taking = Turn(options.turn)
        self.arms = split(options.arms)
        self.result: dict[str, Any] = {"model": model, "starts": {}}
        record["models"][model] = self.result

    def measure(self) -> None:
        """Everything that the options ask for."""
        raise NotImplementedError

    def report(self) -> None:
        """Print the tables of what was measured."""
        raise NotImplementedError

    def save(self) -> None:
        """Write the record as far as it goes."""
        self.place.save(self.record)

    def start_engines(self, hosts: Sequence[Host], *, one_by_one: bool) -> dict[str, Host]:
        """Start engines, wait for our turn, and return which engine serves which arm."""
        self.turn_taking.leave()
        start_hosts(hosts, one_by_one=one_by_one)
        serving: dict[str, Host] = {}
        for host in hosts:
            self.note_start(host)
            serving |= dict.fromkeys(host.arms, host)
        self.turn_taking.take()
        return serving

    def note_start(self, host: Host) -> None:
        """Keep what an engine told of its start."""
        known = self.result["starts"].get(host.name, {})
        self.result["starts"][host.name] = known | host.started | {"ready_s": host.ready_s}

    def end(self) -> None:
        """Save, end every engine, and leave nothing but the record and the logs asked for."""
        self.save()
        stop_all()
        self.place.keep_logs(self.options.keep_logs)
        self.place.remove()
        self.turn_taking.leave()

    def in_turn(self, number: int) -> list[str]:
        """The arms; another one is the first each time."""
        first = number % len(self.arms)
        return self.arms[first:] + self.arms[:first]

    def bandwidths(self, host: Host) -> None:
        """The ceilings of this run."""
        size = int(self.options.disk_probe_gib * GIB)
        self.result["disk_gb_s"] = disk_bandwidth(self.place.scratch, size)
        size = LINK_BYTES if self.options.device == "cuda" else LINK_BYTES >> 6
        self.result["link_gb_s"] = host.call("link", nbytes=size)
        progress(f"link {self.result['link_gb_s']}, disk {self.result['disk_gb_s']}")

    def print_table(
        self, name: str, title: str, header: Sequence[str], rows: Iterable[Sequence[Any]]
    ) -> None:
        """Print a table, if it has rows, and keep it in the record."""
        kept = [dict(zip(header, row, strict=True)) for row in rows]
        if kept:
            print(f"\n{title}\n{table(header, [list(row.values()) for row in kept])}")
            self.result[name] = kept


class SampledRun(Run):
    """A run whose samples are requests: an arm, a prompt of some length, and a cell."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.lengths = split(self.options.lengths, int)
        self.result["samples"] = []

    def note(self, arm: str, length: int, seed: int, cell: str, seen: dict[str, Any]) -> None:
        """Keep a sample."""
        self.result["samples"].append(
            {"arm": arm, "length": length, "cell": cell, "seed": seed, **seen}
        )

    def chosen(self, arm: str, length: int, cell: str) -> list[dict[str, Any]]:
        """The samples of a cell."""
        return [
            sample
            for sample in self.result["samples"]
            if (sample["arm"], sample["length"], sample["cell"]) == (arm, length, cell)
        ]

    def times(self, arm: str, length: int, cell: str) -> list[float]:
        """Times of a cell in ms."""
        return [sample["ms"] for sample in self.chosen(arm, length, cell)]

    def line(self, length: int) -> str:
        """The medians of a length so far."""
        seen = [sample for sample in self.result["samples"] if sample["length"] == length]
        cells = dict.fromkeys((sample["arm"], sample["cell"]) for sample in seen)
        return "; ".join(
            f"{arm} {cell} {median(samples):.1f}"
            for arm, cell in cells
            if (samples := self.times(arm, length, cell))
        )

    def report_pairs(self, cells: Sequence[str]) -> None:
        """Differences within pairs, with the interval of their median."""
        rows, beside = [], []
        for length, cell in itertools.product(self.lengths, cells):
            base = self.paired("none", length, cell)
            for arm in (arm for arm in self.arms if arm != "none"):
                with_it = self.paired(arm, length, cell)
                # One of the two may have failed.
                pairs = [(base[number], with_it[number]) for number in base if number in with_it]
                if not pairs:
                    continue
                times = [(a["ms"], b["ms"]) for a, b in pairs]
                ratios = [b / a for a, b in times]
                low, high = interval(ratios)
                rows.append(
                    [length, cell, arm, len(pairs), f"{median([a for a, _ in times]):.3f}",
                     f"{median([b for _, b in times]):.3f}", f"{median(ratios):.4f}",
                     f"{low:.4f}-{high:.4f}"]
                )  # fmt: skip
                if self.options.stages:
                    more = [b["ms"] - launching_ms(b) - a["ms"] + launching_ms(a) for a, b in pairs]
                    low, high = interval(more)
                    beside.append(
                        [length, cell, arm, f"{median(more):.2f}", f"{low:.2f}-{high:.2f}"]
                    )
        header = ["tokens", "cell", "arm", "pairs", "none ms", "arm ms", "ratio", "95 % interval"]
        self.print_table("pairs", "pairs, median of ratios", header, rows)
        header = ["tokens", "cell", "arm", "ms more than none", "95 % interval"]
        self.print_table("pairs_beside_launches", "pairs, without launches", header, beside)

    def paired(self, arm: str, length: int, cell: str) -> dict[int, dict[str, Any]]:
        """A cell's samples of paired prompts, by the number of the pair."""
        return {
            (sample["seed"] - PAIR_SEED) // SEEDS_PER_PAIR: sample
            for sample in self.chosen(arm, length, cell)
            if sample["seed"] >= PAIR_SEED
        }

    def report_stages(self, cells: Sequence[str]) -> None:
        """Medians of what a request waited for, where stages were recorded."""
        rows = []
        for length, cell, arm in itertools.product(self.lengths, cells, self.arms):
            seen = [sample for sample in self.chosen(arm, length, cell) if planned_ms(sample)]
            if not seen:
                continue
            planned = [planned_ms(sample) or 0.0 for sample in seen]
            launching = [launching_ms(sample) for sample in seen]
            rest = [s["ms"] - a - b for s, a, b in zip(seen, planned, launching, strict=True)]
            rows.append(
                [length, cell, arm, len(seen), f"{median(planned):.2f}", f"{median(launching):.2f}",
                 f"{median(rest):.2f}"]
            )  # fmt: skip
        header = ["tokens", "cell", "arm", "requests", "until planned", "launching", "rest"]
        self.print_table("stages", "stages, ms, medians", header, rows)

    def report_tokens(self) -> None:
        """Every cell of every arm has to answer a prompt with the same token."""
        answers: dict[tuple[int, int], dict[tuple, list[str]]] = {}
        for sample in self.result["samples"]:
            who = f"{sample['arm']} {sample['cell']}"
            prompt = answers.setdefault((sample["length"], sample["seed"]), {})
            prompt.setdefault(tuple(sample["tokens"]), []).append(who)
        differing = {prompt: said for prompt, said in answers.items() if len(said) > 1}
        self.result["prompts_with_other_tokens"] = [
            {"prompt": prompt, "tokens": [{"tokens": t, "said": w} for t, w in said.items()]}
            for prompt, said in differing.items()
        ]
        print(f"\ntokens: {len(answers)} prompts, {len(differing)} answered in more than one way")
        for prompt, said in list(differing.items())[:5]:
            print(f"  {prompt}: {said}")


def run_models(
    bench: str, options: argparse.Namespace, make: Callable[[str, dict[str, Any]], Run]
) -> list[Run]:
    """Measure one model after the other, and report each also where it broke off."""
    record = new_record(bench, models={})
    runs = []
    for model in split(options.models):
        run = make(model, record)
        runs.append(run)
        try:
            run.measure()
        finally:
            run.report()
            run.save()
    return runs
