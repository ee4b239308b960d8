"""Hybrid models (Gated DeltaNet): time to first token, bytes stored, chats restorable.

    bench_hybrid.py --output hybrid.json                     the shape of Qwen3.5-35B-A3B
    bench_hybrid.py --parts ttft --arms none,lakecache ...   parts of it

One engine holds all arms, and the connector is switched between measurements: the 35B shape fills
a GPU, and starting it takes most of a minute. Parts:

ttft      prompts of 512, 1.1K, 8K and 32K tokens in the cells cold, gpu_hit, warm (memory hit),
          rewarm (once more); then, restarted without pool and page cache, disk_hit
bytes     what ten 8K prompts that share 6K tokens leave on disk, per prompt
capacity  50 chats of 4 turns through a small memory tier: how many tokens of them are restored
          when each chat goes on, per GiB
"""

from __future__ import annotations

import argparse
import copy
import shutil
import sys
from typing import Any

import _engines as engines
from _engines import GIB, Host, Workplace, median, progress

LENGTHS = (512, 1100, 8192, 32768)
WARM_SEED = 900_000
KV_GIB = {"qwen3.5-35b-a3b": 40.0, "qwen3.5-tiny": 0.125}
CELLS = ("cold", "gpu_hit", "memory_hit", "recompute")
STORING = ("offloading", "tiering", "lakecache")
TURN_TOKENS = (1600, 500, 700, 600)


class Run:
    """All parts for one model."""

    def __init__(self, model: str, options: argparse.Namespace, record: dict[str, Any]) -> None:
        self.model, self.options, self.record = model, options, record
        self.place = Workplace(options.output, options.scratch)
        self.arms = engines.split(options.arms)
        self.lengths = engines.split(options.lengths, int)
        self.result: dict[str, Any] = {"model": model, "samples": [], "starts": {}}
        record["models"][model] = self.result
        options.kv_gib = options.kv_gib or KV_GIB[model]

    def host(self, arms: list[str], name: str, **how: Any) -> Host:
        """Start one engine for some arms."""
        engine: dict[str, Any] = {}
        if self.options.unit:
            engine["prefix_match_unit"] = self.options.unit
        if self.options.device == "cuda":
            engine["additional_config"] = {"gdn_prefill_backend": "triton"}
        host = Host(arms, self.model, self.place, self.options, self.lengths, engine=engine,
                    name=f"{self.model}-{name}", **how)  # fmt: skip
        host.spawn().wait()
        progress(f"{host.name}: ready after {host.ready_s:.1f} s")
        self.result["starts"][host.name] = host.started | {"ready_s": host.ready_s}
        self.place.save(self.record)
        return host

    def stop(self, host: Host, arms: list[str]) -> None:
        """Note what LakeCache counted, and end the engine."""
        if "lakecache" in arms:
            host.activate("lakecache")
            self.result.setdefault("counters", {})[host.name] = host.call("counters")
        host.stop()

    # Time to first token

    def turn(
        self, host: Host, arm: str, length: int, seed: int, cells: list[str], **how: Any
    ) -> None:
        """Measure one prompt; cells of one name are told apart by their number."""
        host.activate(arm)
        for cell in cells:
            engine_cell = "memory_hit" if cell in {"warm", "rewarm"} else cell
            seen = host.call("turn", seed=seed, length=length, cells=[engine_cell], **how)
            self.result["samples"].append(
                {"arm": arm, "length": length, "cell": cell, "seed": seed, **seen[engine_cell]}
            )

    def ttft(self) -> None:
        """Cells up to the second memory hit, then the restart."""
        host = self.host(self.arms, "first")
        size = GIB if self.options.device == "cuda" else GIB >> 6
        self.result["link_gb_s"] = host.call("link", nbytes=size)
        size = int(self.options.disk_probe_gib * GIB)
        self.result["disk_gb_s"] = engines.disk_bandwidth(self.place.scratch, size)
        for arm in self.arms:
            for length in self.lengths:
                host.activate(arm)
                host.call("turn", seed=WARM_SEED + length, length=length, cells=["cold", "gpu_hit"])
        for length in sorted(self.lengths, reverse=True):
            for repeat in range(self.options.reps):
                order = self.arms[repeat % len(self.arms) :] + self.arms[: repeat % len(self.arms)]
                for arm in order:
                    cells = ["cold", "gpu_hit"]
                    if arm in STORING:
                        cells += ["warm", "rewarm"]
                    self.turn(host, arm, length, repeat, cells)
                self.place.save(self.record)
            progress(f"{length} tokens: {self.line(length)}")
        if "bytes" in self.parts():
            self.bytes_stored(host)
        self.stop(host, self.arms)
        if self.options.disk_reps:
            self.disk()

    def parts(self) -> list[str]:
        """The parts asked for."""
        return engines.split(self.options.parts)

    def disk(self) -> None:
        """Restart without pool and page cache, and ask for what is on disk."""
        arms = [arm for arm in self.arms if arm in {"none", "tiering", "lakecache"}]
        shutil.rmtree(self.place.ram, ignore_errors=True)
        self.place.ram.mkdir()
        host = self.host(arms, "restart")
        for length in sorted(self.lengths, reverse=True):
            for repeat in range(min(self.options.disk_reps, self.options.reps)):
                seed = self.options.reps - 1 - repeat
                for arm in arms:
                    cell = "recompute" if arm == "none" else "disk_hit"
                    self.turn(host, arm, length, seed, [cell])
                self.place.save(self.record)
            progress(f"restarted, {length} tokens: {self.line(length)}")
        self.stop(host, arms)

    def line(self, length: int) -> str:
        """The medians of a length so far."""
        parts = []
        for arm in self.arms:
            for cell in ("cold", "gpu_hit", "warm", "rewarm", "disk_hit", "recompute"):
                if samples := self.times(arm, length, cell):
                    parts.append(f"{arm} {cell} {median(samples):.1f}")
        return "; ".join(parts)

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

    # Bytes

    def bytes_stored(self, host: Host) -> None:
        """Send ten prompts that share most of their tokens, and see what each leaves on disk."""
        options = self.options
        self.result["bytes"] = {}
        for arm in self.arms:
            if arm not in {"tiering", "lakecache"}:
                continue
            host.activate(arm)
            folder = str(self.place.scratch / arm)
            before, sizes = host.call("folder_bytes", folder=folder), []
            for number in range(options.shared_prompts):
                host.call(
                    "turn", seed=300_000 + number, length=options.shared_length, cells=["cold"],
                    shared=options.shared_tokens, family=1,
                )  # fmt: skip
                sizes.append(host.call("folder_bytes", folder=folder) - before)
            self.result["bytes"][arm] = {
                "after_each": sizes, "per_prompt": sizes[-1] / options.shared_prompts
            }  # fmt: skip
            self.place.save(self.record)
        progress(f"bytes: {self.result['bytes']}")

    # Capacity

    def capacity(self) -> None:
        """Let chats compete for a small memory tier; then each goes on, and its hit is counted."""
        arms = [arm for arm in self.arms if arm in {"offloading", "lakecache"}]
        options = copy.copy(self.options)
        options.cpu_gib = self.options.capacity_gib
        configs = {}
        for arm in arms:
            config = engines.transfer_config(arm, self.place, options)
            if arm == "lakecache":
                # Memory alone, as OffloadingConnector has no disk.
                extra = dict(config["kv_connector_extra_config"])
                del extra["cache_dir"], extra["disk_capacity_bytes"]
                config = config | {"kv_connector_extra_config": extra | {"load_policy": "always"}}
            configs[arm] = config
        host = self.host(arms, "capacity", configs=configs)
        self.result["capacity"] = {}
        for arm in arms:
            host.activate(arm)
            ends = [sum(TURN_TOKENS[: turn + 1]) for turn in range(len(TURN_TOKENS))]
            longest = min(ends[-1], max(self.lengths))
            for end in ends[:-1]:
                for chat in range(options.chats):
                    self.chat(host, chat, min(end, longest), longest)
            restored = total = 0
            for chat in reversed(range(options.chats)):
                host.call("reset")
                seen = self.chat(host, chat, longest, longest)
                restored += seen["counts"].get("external_prefix_cache_hits", 0)
                total += longest
            self.result["capacity"][arm] = {
                "restored_tokens": restored, "asked_tokens": total, "gib": options.cpu_gib,
                "tokens_per_gib": restored / options.cpu_gib,
            }  # fmt: skip
            self.place.save(self.record)
            progress(f"capacity: {arm}: {self.result['capacity'][arm]}")
        self.stop(host, arms)

    def chat(self, host: Host, chat: int, tokens: int, longest: int) -> dict[str, Any]:
        """One turn of a chat: its prompt is the beginning of its longest one."""
        seen = host.call(
            "chat_turn", seed=700_000 + chat, length=tokens, whole=longest, flush=False
        )
        return seen

    def measure(self) -> None:
        """The parts asked for."""
        try:
            if "ttft" in self.parts():
                self.ttft()
            elif "bytes" in self.parts():
                host = self.host(self.arms, "bytes")
                self.bytes_stored(host)
                self.stop(host, self.arms)
            if "capacity" in self.parts():
                self.capacity()
        finally:
            self.place.save(self.record)
            engines.stop_all()
            engines.keep_logs(self.place, self.options.keep_logs)
            self.place.remove()

    # Reporting

    def report(self) -> None:
        """Print the tables."""
        print(f"\n{self.model}, prefix_match_unit {self.options.unit}, ms, median [range]")
        per_token = engines.kv_bytes_per_token(self.model)
        state = engines.state_bytes(self.model)
        link = self.result.get("link_gb_s", {}).get("h2d")
        disk = self.result.get("disk_gb_s", {}).get("read")
        rows = []
        for length in self.lengths:
            bare = median(self.times("none", length, "gpu_hit"))
            cold = median(self.times("none", length, "cold"))
            for cell in ("cold", "gpu_hit", "warm", "rewarm", "disk_hit", "recompute"):
                base = cold if cell in {"cold", "disk_hit", "recompute"} else bare
                row = [str(length), cell]
                for arm in self.arms:
                    seen = self.chosen(arm, length, cell)
                    if not seen:
                        row.append("-")
                        continue
                    hits = median(
                        [s.get("counts", {}).get("external_prefix_cache_hits", 0) for s in seen]
                    )
                    samples = [s["ms"] for s in seen]
                    said = f"{engines.summary(samples)} x{median(samples) / base:.3f}"
                    row.append(said + (f" hit {hits:.0f}" if hits else ""))
                floor = ""
                ceiling = {"warm": link, "rewarm": link, "disk_hit": disk}.get(cell)
                if ceiling:
                    floor = f"{bare + (length * per_token + state) / ceiling / 1e6:.2f}"
                if any(part != "-" for part in row[2:]):
                    rows.append([*row, floor])
        if rows:
            print(engines.table(["tokens", "cell", *self.arms, "floor"], rows))
        for name in ("bytes", "capacity"):
            for arm, seen in self.result.get(name, {}).items():
                print(f"{name}: {arm}: {seen}")
        self.report_tokens()

    def report_tokens(self) -> None:
        """Every cell of every arm has to answer a prompt with the same token."""
        answers: dict[tuple[int, int], dict[tuple, list[str]]] = {}
        for sample in self.result["samples"]:
            prompt = answers.setdefault((sample["length"], sample["seed"]), {})
            who = f"{sample['arm']} {sample['cell']}"
            prompt.setdefault(tuple(sample["tokens"]), []).append(who)
        differing = {prompt: said for prompt, said in answers.items() if len(said) > 1}
        print(f"tokens: {len(answers)} prompts, {len(differing)} answered in more than one way")
        for prompt, said in list(differing.items())[:5]:
            print(f"  {prompt}: {said}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    engines.add_options(
        parser,
        models=["qwen3.5-35b-a3b"],
        arms=["none", "offloading", "tiering", "lakecache"],
    )
    parser.add_argument("--parts", default="ttft,bytes")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--disk-reps", type=int, default=5)
    parser.add_argument("--unit", type=int, default=32, help="prefix_match_unit; 0 leaves it out")
    parser.add_argument("--disk-probe-gib", type=float, default=4.0)
    parser.add_argument("--shared-prompts", type=int, default=10)
    parser.add_argument("--shared-length", type=int, default=8192)
    parser.add_argument("--shared-tokens", type=int, default=6144)
    parser.add_argument("--chats", type=int, default=50)
    parser.add_argument("--capacity-gib", type=float, default=4.0)
    options = parser.parse_args()
    engines.stop_on_signals()
    if options.device == "cpu":
        options.models, options.cpu_gib, options.disk_gib = "qwen3.5-tiny", 0.25, 0.25
        options.lengths, options.disk_probe_gib, options.chats = "128,300,1024", 1 / 16, 4
        options.shared_length, options.shared_tokens, options.capacity_gib = 1024, 768, 0.125
    record: dict[str, Any] = {
        "bench": "hybrid", "machine": engines.describe_machine(), "arguments": sys.argv[1:],
        "models": {},
    }  # fmt: skip
    for model in engines.split(options.models):
        run = Run(model, options, record)
        try:
            run.measure()
        finally:
            run.report()
            run.place.save(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
