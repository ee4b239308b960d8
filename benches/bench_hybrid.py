"""Hybrid models (Gated DeltaNet): tiers, time to first token, bytes stored, chats restorable.

    bench_hybrid.py --output hybrid.json                     the shape of Qwen3.5-35B-A3B
    bench_hybrid.py --parts phases --unit 0 ...              parts of it

One engine serves all parts, and its connector is switched between measurements: the 35B shape
fills a GPU, and starting it takes a minute or more. Parts, in the order in which they are named:

phases    each prompt alone: computed and hit by vLLM itself; then restored from memory (warm),
          from disk with the memory tier emptied (cold_tier), and from memory again (rewarm)
bytes     what ten 8K prompts that share 6K tokens leave on disk, per prompt
capacity  50 chats of 4 turns through a small memory tier: how many tokens of them are restored
          while they go on, and how many can be restored in the end, per GiB
pairs     without and with LakeCache by turns, on prompts of their own: cold, gpu_hit
ttft      all arms prompt by prompt: cold, gpu_hit, warm, cold_tier (LakeCache), rewarm

What fails is noted in the record with its traceback, and the rest goes on, with another engine
where the first is gone. `--seconds` ends the repeats of ttft early.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import random
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

import _runs
from _arms import transfer_config
from _engines import ROOT, EngineError, Host, difference, external_tokens, stop_on_signals
from _models import kv_bytes_per_token, state_bytes
from _runs import PAIR_SEED, SampledRun, pair_seed, split
from _samples import median, summary, table
from _workplace import progress

sys.path.insert(0, str(ROOT / "examples"))

from serving import source_of

LENGTHS = (512, 1100, 8192, 32768)
WARM_SEED = 900_000
PHASE_SEED = 400_000
SHARED_SEED = 300_000
CHAT_SEED = 700_000
KV_GIB = {"qwen3.5-35b-a3b": 40.0, "qwen3.5-tiny": 0.125}
# Each with what it is measured with: LakeCache where a tier has to answer, though computing may be
# faster, and both memory tiers as small as each other, LakeCache's without a disk.
PHASES_ARM = "lakecache-always"
CAPACITY_ARMS = {"offloading": "offloading-small", "lakecache": "lakecache-small"}
STORED_CELLS = {
    "none": (),
    "offloading": ("warm", "rewarm"),
    "tiering": ("warm", "rewarm"),
    "lakecache": ("warm", "cold_tier", "rewarm"),
}
RIVALS = ("offloading", "tiering")
CELLS = ("cold", "gpu_hit", "warm", "cold_tier", "rewarm")
PAIRED_CELLS = ["cold", "gpu_hit"]
# Where each phase must find the checkpoint.
SOURCES = {"warm": "memory", "cold_tier": "disk", "rewarm": "memory"}


class StartError(RuntimeError):
    """No engine started, nor would the next."""


class Run(SampledRun):
    """All parts for one model."""

    def __init__(self, model: str, options: argparse.Namespace, record: dict[str, Any]) -> None:
        super().__init__(model, options, record, KV_GIB)
        self.parts = split(options.parts)
        self.result |= {"unit": options.unit, "errors": []}
        self.running: Host | None = None
        self.starts_left = 2

    # The engine

    def connectors(self) -> dict[str, dict[str, Any] | None]:
        """Every arm that the parts need, with its configuration (None: the usual one)."""
        wanted: dict[str, dict[str, Any] | None] = {"none": None}
        if {"ttft", "bytes", "pairs"} & set(self.parts):
            wanted |= dict.fromkeys(self.arms)
        small = copy.copy(self.options)
        small.cpu_gib = self.options.small_gib
        if "phases" in self.parts:
            wanted[PHASES_ARM] = transfer_config(PHASES_ARM, self.place, small)
        if "capacity" in self.parts:
            for arm in self.capacity_arms():
                wanted[CAPACITY_ARMS[arm]] = self.capacity_config(arm, small)
        return wanted

    def capacity_arms(self) -> list[str]:
        """The arms whose memory tiers are compared."""
        return [arm for arm in self.arms if arm in CAPACITY_ARMS]

    def capacity_config(self, arm: str, small: argparse.Namespace) -> dict[str, Any]:
        """A small memory tier; LakeCache's alone, as OffloadingConnector has no disk."""
        config = transfer_config(arm, self.place, small)
        assert config is not None
        if arm == "offloading":
            return config
        extra = dict(config["kv_connector_extra_config"])
        del extra["cache_dir"], extra["disk_capacity_bytes"]
        extra |= {"ram_dir": str(self.place.ram / "small"), "load_policy": "always"}
        return config | {"kv_connector_extra_config": extra}

    def host(self) -> Host:
        """The engine, started where there is none."""
        if self.running is not None:
            return self.running
        engine: dict[str, Any] = {"max_logprobs": self.options.logprobs}
        if self.options.unit:
            engine["prefix_match_unit"] = self.options.unit
        if self.options.device == "cuda":
            engine["additional_config"] = {"gdn_prefill_backend": "triton"}
        wanted = self.connectors()
        configs = {arm: config for arm, config in wanted.items() if config is not None}
        host = Host(list(wanted), self.model, self.place, self.options, self.lengths,
                    engine=engine, configs=configs,
                    name=f"{self.model}-{len(self.result['starts'])}")  # fmt: skip
        progress(f"{host.name}: starts with {', '.join(wanted)}")
        self.result["starts"][host.name] = {"arms": list(wanted)}
        self.turn_taking.leave()
        try:
            host.spawn().wait()
        except EngineError as error:
            host.kill()
            self.starts_left -= 1
            if not self.starts_left:
                raise StartError(host.name) from error
            self.note_error(f"start of {host.name}")
            # A rival's memory may be what it failed for.
            self.arms = [arm for arm in self.arms if arm not in RIVALS]
            return self.host()
        self.running = host
        progress(f"{host.name}: ready after {host.ready_s:.1f} s: {host.started}")
        self.note_start(host)
        self.save()
        self.turn_taking.take()
        return host

    def note_error(self, what: str) -> None:
        """Keep the traceback of what failed."""
        text = traceback.format_exc()
        self.result["errors"].append({"what": what, "traceback": text})
        self.save()
        progress(f"!! {what} FAILED\n{text}")

    @contextlib.contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Go on where one command failed and the engine takes the next."""
        try:
            yield
        except EngineError as error:
            if not error.usable:
                raise
            self.note_error(what)

    def measure(self) -> None:
        """The parts asked for, one after the other."""
        try:
            for part in self.parts:
                started = time.monotonic()
                try:
                    getattr(self, part)()
                except StartError:
                    self.note_error(part)
                    return
                except Exception as error:
                    self.note_error(part)
                    if not (isinstance(error, EngineError) and error.usable) and self.running:
                        self.running.kill()
                        self.running = None
                spent = time.monotonic() - started
                self.result.setdefault("part_s", {})[part] = spent
                self.save()
                progress(f"{part}: {spent:.1f} s")
            self.stop()
        finally:
            self.end()

    def stop(self) -> None:
        """Note what LakeCache counted, and end the engine."""
        host, self.running = self.running, None
        if host is None:
            return
        try:
            for arm in host.arms:
                if "lakecache" in arm:
                    host.activate(arm)
                    counters = self.result.setdefault("counters", {})
                    counters[arm] = host.call("counters")
        except EngineError:
            self.note_error("counters")
        host.stop()

    # Phases

    def phases(self) -> None:
        """Have every tier answer, and compare with vLLM's own hit at the same position."""
        self.result["phases"] = []
        for length in self.lengths:
            with self.guarded(f"phases at {length} tokens"):
                self.phases_of(length)

    def phases_of(self, length: int) -> None:
        """All phases of one prompt."""
        host, options = self.host(), self.options
        native: dict[str, Any] = {}
        for arm, cell in (
            ("none", "cold"), ("none", "gpu_hit"),
            (PHASES_ARM, "cold"), *((PHASES_ARM, phase) for phase in SOURCES),
        ):  # fmt: skip
            host.activate(arm)
            seen = host.call(
                "phase", seed=PHASE_SEED, length=length, cell=cell,
                max_tokens=options.answer_tokens, logprobs=options.logprobs,
            )  # fmt: skip
            native = native or {"cold": seen}
            if (arm, cell) == ("none", "gpu_hit"):
                native["gpu_hit"] = seen
            core = seen["core"]
            row = {
                "length": length, "arm": arm, "phase": cell, "ms": seen["ms"],
                "tokens": seen["tokens"], "cached": seen["cached"],
                "external": external_tokens(seen),
                "source": source_of(
                    {name: core.get(name, 0) for name in ("memory_hits", "disk_payload_reads")}
                ),
                "disk_payload_reads": core.get("disk_payload_reads", 0),
                "promotions": core.get("promotions", 0),
                "events": seen["events"],
                "tokens_equal_cold": seen["tokens"] == native["cold"]["tokens"],
            }  # fmt: skip
            if hit := native.get("gpu_hit"):
                row["same_position"] = seen["cached"] == hit["cached"]
                row["tokens_equal_hit"] = seen["tokens"] == hit["tokens"]
                row["logprob_difference"] = difference(seen, hit)
                row["logprob_difference_cold"] = difference(seen, native["cold"])
            row["as_promised"] = self.good(row, native.get("gpu_hit"))
            self.result["phases"].append(row)
            self.save()
            progress(f"phases: {self.phase_line(row)}")

    @staticmethod
    def good(row: dict[str, Any], hit: dict[str, Any] | None) -> bool:
        """Whether a phase found what it must, and answered as vLLM's own hit.

        Where vLLM itself has no checkpoint, the prompt is computed in every phase. Its hits within
        a block do not always answer as it did at first; then that is the measure.
        """
        tier = SOURCES.get(row["phase"])
        if row["arm"] == "none" or tier is None or hit is None:
            return row["external"] == 0
        reads, promotions = row["disk_payload_reads"], row["promotions"]
        if hit["cached"] == 0:
            found = row["external"] == row["cached"] == 0
            tier = "computed"
        else:
            found = row["same_position"] and row["external"] == row["cached"]
        moved = reads == promotions > 0 if tier == "disk" else reads == promotions == 0
        same = row["tokens_equal_hit"] or row["tokens_equal_cold"]
        return found and moved and row["source"] == tier and same

    @staticmethod
    def phase_line(row: dict[str, Any]) -> str:
        """One phase in words."""
        said = (
            f"{row['length']:6} {row['arm']:16} {row['phase']:9} {row['source']:8} "
            f"external {row['external']:6} of cached {row['cached']:6}, "
            f"{row['disk_payload_reads']} reads, {row['promotions']} promotions, "
            f"{row['ms']:.1f} ms, as cold {row['tokens_equal_cold']}"
        )
        if "tokens_equal_hit" in row:
            said += (
                f", as native hit {row['tokens_equal_hit']}, "
                f"log-probabilities {row['logprob_difference']:.2g} to the hit, "
                f"{row['logprob_difference_cold']:.2g} to the first run"
            )
        return said + ("" if row["as_promised"] else "  NOT as promised")

    # Time to first token

    def turn(self, arm: str, length: int, seed: int, cells: list[str]) -> None:
        """Measure one prompt in some cells."""
        host = self.host()
        host.activate(arm)
        for cell in cells:
            seen = host.call("turn", seed=seed, length=length, cells=[cell])
            self.note(arm, length, seed, cell, seen[cell])
        self.save()

    def warm_up(self, arms: list[str]) -> None:
        """Run every length in every arm once."""
        host = self.host()
        for length in self.lengths:
            for arm in arms:
                with self.guarded(f"warming up {arm} at {length} tokens"):
                    host.activate(arm)
                    cells = ["cold", "gpu_hit", *STORED_CELLS[arm][:1]]
                    host.call("turn", seed=WARM_SEED + length, length=length, cells=cells)

    def ttft(self) -> None:
        """All cells of all arms, as often as there is time for."""
        host, options = self.host(), self.options
        with self.guarded("link"):
            self.bandwidths(host)
        self.warm_up(self.arms)
        until = time.monotonic() + options.seconds
        for repeat in range(options.reps):
            for length in self.lengths:
                if time.monotonic() > until:
                    progress(f"ttft: no time for more than {repeat} repeats")
                    return
                for arm in self.in_turn(repeat):
                    with self.guarded(f"ttft of {arm} at {length} tokens"):
                        self.turn(arm, length, repeat, ["cold", "gpu_hit", *STORED_CELLS[arm]])
                progress(f"{repeat}: {length} tokens: {self.line(length)}")

    def pairs(self) -> None:
        """Alternate without and with LakeCache: what it costs where it brings nothing."""
        arms = [arm for arm in self.arms if arm in {"none", "lakecache"}]
        self.warm_up(arms)
        for number in range(self.options.pairs):
            for length in self.lengths:
                for place, arm in enumerate(arms if number % 2 == 0 else arms[::-1]):
                    with self.guarded(f"pair of {arm} at {length} tokens"):
                        self.turn(arm, length, pair_seed(number, place), PAIRED_CELLS)
            progress(f"pairs: {number + 1} of {self.options.pairs}")

    def unpaired(self, arm: str, length: int, cell: str) -> list[dict[str, Any]]:
        """The samples of a cell in the part ttft."""
        return [s for s in self.chosen(arm, length, cell) if s["seed"] < PAIR_SEED]

    # Bytes

    def bytes(self) -> None:
        """Send ten prompts that share most of their tokens, and see what each leaves on disk."""
        for arm in self.arms:
            if arm in {"tiering", "lakecache"}:
                with self.guarded(f"bytes of {arm}"):
                    self.bytes_of(arm)

    def bytes_of(self, arm: str) -> None:
        """One arm's bytes."""
        host, options = self.host(), self.options
        host.activate(arm)
        folder = str(self.place.scratch / arm)
        before, sizes = host.call("folder_bytes", folder=folder), []
        for number in range(options.shared_prompts):
            host.call(
                "turn", seed=SHARED_SEED + number, length=options.shared_length, cells=["cold"],
                shared=options.shared_tokens, family=1,
            )  # fmt: skip
            sizes.append(host.call("folder_bytes", folder=folder) - before)
            self.result.setdefault("bytes", {})[arm] = {
                "after_each": sizes, "per_prompt": sizes[-1] / len(sizes)
            }  # fmt: skip
            self.save()
        progress(f"bytes: {arm}: {self.result['bytes'][arm]}")

    # Capacity

    def capacity(self) -> None:
        """Let chats compete for a small memory tier; then see what of them is there."""
        for arm in self.capacity_arms():
            with self.guarded(f"capacity of {arm}"):
                self.capacity_of(arm)

    def capacity_of(self, arm: str) -> None:
        """One arm's chats.

        All chats take a turn, in an order of its own, before any takes its next; the GPU has
        forgotten a chat by then. In the end each prompt is asked once more, the latest first, so
        that what is missing and computed again pushes out nothing that is still to be asked for.
        """
        host, options = self.host(), self.options
        host.activate(CAPACITY_ARMS[arm])
        ends = list(itertools.accumulate(split(options.turn_tokens, int)))
        seen: dict[str, Any] = {"gib": options.small_gib, "chats": options.chats, "turns": []}
        self.result.setdefault("capacity", {})[arm] = seen
        chance, order, started = random.Random(1), list(range(options.chats)), time.monotonic()

        def play(end: int, chats: list[int]) -> dict[str, int]:
            restored = sum(self.chat(host, chat, end, ends[-1]) for chat in chats)
            return {"asked_tokens": end * len(chats), "restored_tokens": restored}

        for end in ends:
            chance.shuffle(order)
            seen["turns"].append(play(end, order))
            self.save()
        seen |= play(ends[-1], order[::-1])
        seen["tokens_per_gib"] = seen["restored_tokens"] / options.small_gib
        seen["s"] = time.monotonic() - started
        self.save()
        progress(f"capacity: {arm}: {seen}")

    @staticmethod
    def chat(host: Host, chat: int, tokens: int, longest: int) -> int:
        """One turn of a chat, the beginning of its longest prompt; how much was restored."""
        host.call("reset")
        seen = host.call(
            "chat_turn", seed=CHAT_SEED + chat, length=tokens, whole=longest, flush=False
        )
        return external_tokens(seen)

    # Reporting

    def report(self) -> None:
        """Print the tables."""
        print(f"\n{self.model}, prefix_match_unit {self.options.unit}, ms, median [range]")
        per_token = kv_bytes_per_token(self.model)
        state = state_bytes(self.model)
        bandwidths = {
            "warm": self.result.get("link_gb_s", {}).get("h2d"),
            "cold_tier": self.result.get("disk_gb_s", {}).get("read"),
        }
        bandwidths["rewarm"] = bandwidths["warm"]
        rows = []
        for length in self.lengths:
            bare, cold = (
                median([s["ms"] for s in self.unpaired("none", length, cell)])
                for cell in ("gpu_hit", "cold")
            )
            for cell in CELLS:
                base = cold if cell in {"cold", "cold_tier"} else bare
                row = [str(length), cell]
                for arm in self.arms:
                    seen = self.unpaired(arm, length, cell)
                    if not seen:
                        row.append("-")
                        continue
                    hits = median([external_tokens(sample) for sample in seen])
                    samples = [s["ms"] for s in seen]
                    said = f"{summary(samples)} x{median(samples) / base:.3f}"
                    row.append(said + (f" hit {hits:.0f}" if hits else ""))
                floor = ""
                if bandwidth := bandwidths.get(cell):
                    floor = f"{bare + (length * per_token + state) / bandwidth / 1e6:.2f}"
                if any(part != "-" for part in row[2:]):
                    rows.append([*row, floor])
        if rows:
            print(table(["tokens", "cell", *self.arms, "floor"], rows))
            self.report_tokens()
        self.report_pairs(PAIRED_CELLS)
        self.report_stages(CELLS)
        for name in ("bytes", "capacity"):
            for arm, seen in self.result.get(name, {}).items():
                print(f"{name}: {arm}: {seen}")
        for row in self.result.get("phases", []):
            print(self.phase_line(row))
        for failed in self.result["errors"]:
            print(f"FAILED: {failed['what']}: {failed['traceback'].strip().splitlines()[-1]}")
        print(f"seconds: {self.result.get('part_s')}", flush=True)

    def fine(self) -> bool:
        """Whether nothing failed, and every phase was as promised."""
        phases = self.result.get("phases", [])
        return not self.result["errors"] and all(row["as_promised"] for row in phases)


def main() -> int:
    parser = _runs.make_parser(__doc__, models=["qwen3.5-35b-a3b"], arms=list(STORED_CELLS))
    parser.add_argument("--parts", default="phases,bytes,capacity,pairs,ttft")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--pairs", type=int, default=15, help="alternating pairs, none/lakecache")
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="after which ttft begins nothing new"
    )
    parser.add_argument("--unit", type=int, default=32, help="prefix_match_unit; 0 leaves it out")
    parser.add_argument("--answer-tokens", type=int, default=8, help="of the answers of phases")
    parser.add_argument("--logprobs", type=int, default=20, help="compared by phases, per token")
    parser.add_argument("--disk-probe-gib", type=float, default=4.0)
    parser.add_argument("--shared-prompts", type=int, default=10)
    parser.add_argument("--shared-length", type=int, default=8192)
    parser.add_argument("--shared-tokens", type=int, default=6144)
    parser.add_argument("--chats", type=int, default=50)
    parser.add_argument("--turn-tokens", default="1600,500,700,600", help="what each turn adds")
    parser.add_argument(
        "--small-gib", type=float, default=4.0, help="memory tier in the parts capacity and phases"
    )
    options = parser.parse_args()
    stop_on_signals()
    if options.device == "cpu":
        options.models, options.cpu_gib, options.disk_gib = "qwen3.5-tiny", 0.25, 0.25
        # vLLM's connectors need a GPU.
        options.arms = ",".join(arm for arm in split(options.arms) if arm not in RIVALS)
        options.lengths, options.disk_probe_gib, options.chats = "20,128,300,1024", 1 / 16, 24
        options.shared_length, options.shared_tokens, options.small_gib = 1024, 768, 1 / 64
        options.turn_tokens = "400,130,170,150"
    runs = _runs.run_models("hybrid", options, lambda model, record: Run(model, options, record))
    return 0 if all(run.fine() for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
