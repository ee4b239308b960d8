"""Time to first token of real vLLM with and without caches, side by side.

    bench_ttft.py --models qwen3-0.6b --output ttft.json             engines of their own
    bench_ttft.py --models qwen3-8b --together --output ttft.json    one engine, arms switched
    bench_ttft.py --pairs 15 --models qwen3-0.6b --output pairs.json cold overhead in pairs

Cells: cold; after_store (the same prompt again, at once, while it is being stored); gpu_hit (once
everything is stored); memory_hit (the GPU's prefix cache emptied); disk_hit (the engine restarted,
the pool removed, the page cache dropped). One request at a time, one output token, arms taking
turns on the same prompts, so that whatever disturbs the machine disturbs them alike. A hit counts
only if vLLM's counters say so. The floor of a memory hit is a GPU hit without connector plus the
bytes over the link's bandwidth, that of a disk hit the bytes over the disk's, both measured in the
same run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import _runs
from _arms import LmcacheServer
from _engines import Host, external_tokens, stop_on_signals
from _models import kv_bytes_per_token
from _runs import SampledRun, pair_seed, split
from _samples import median, summary, table
from _workplace import GIB, progress

LENGTHS = (512, 8192, 32768)
KV_GIB = {"qwen3-0.6b": 20.0, "qwen3-8b": 14.0, "qwen3-tiny": 0.0625}
KV_GIB_TOGETHER = {"qwen3-0.6b": 64.0, "qwen3-8b": 64.0, "qwen3-tiny": 0.0625}
MEMORY_CELLS = ("cold", "after_store", "gpu_hit", "memory_hit")
RESTARTABLE = ("tiering", "lmcache", "lakecache")
CONNECTED = ("offloading", "tiering", "lmcache", "lakecache", "lakecache-always")
WARM_SEED = 900_000


def cells_of(arm: str, wanted: list[str]) -> list[str]:
    """An engine without a cache computes where others hit."""
    cells = [cell for cell in wanted if cell in MEMORY_CELLS]
    return cells if arm in CONNECTED else [cell for cell in cells if cell != "memory_hit"]


class Run(SampledRun):
    """One model's measurements."""

    def __init__(self, model: str, options: argparse.Namespace, record: dict[str, Any]) -> None:
        self.together = options.together or options.pairs > 0
        super().__init__(model, options, record, KV_GIB_TOGETHER if self.together else KV_GIB)
        self.cells = split(options.cells)
        if "disk_hit" in self.cells and not options.pairs:
            self.check_budget()
        self.stored: dict[str, list[tuple[int, int]]] = {arm: [] for arm in self.arms}
        self.written = dict.fromkeys(self.arms, 0)
        self.server: LmcacheServer | None = None

    def check_budget(self) -> None:
        """Refuse a disk tier from which prompts would be evicted before they are asked for."""
        options = self.options
        # Each repeat has prompts of its own, and warming up has too; headers take less than 2 %.
        prompts = sum(self.lengths) * (options.reps + 1)
        needed = prompts * kv_bytes_per_token(self.model) * 1.02 / GIB
        if needed > options.disk_gib:
            raise SystemExit(
                f"--disk-gib {options.disk_gib:g} does not hold what --reps {options.reps} stores: "
                f"disk_hit needs {needed:.1f} with {self.model}, or fewer repeats"
            )

    # Engines

    def start(self, arms: list[str], stage: str) -> dict[str, Host]:
        """Start the arms' engines, one for all or one each; return which serves which."""
        wanted = [arms] if self.together else [[arm] for arm in arms]
        hosts = [
            Host(group, self.model, self.place, self.options, self.lengths,
                 name=f"{self.model}-{stage}-{'all' if len(group) > 1 else group[0]}")
            for group in wanted
        ]  # fmt: skip
        serving = self.start_engines(hosts, one_by_one=self.options.one_by_one)
        for host in hosts:
            self.warm_up(host)
        self.save()
        return serving

    def warm_up(self, host: Host) -> None:
        """Run every length in every arm once: graphs, kernels and caches of the allocator."""
        for arm in host.arms:
            host.activate(arm)
            for length in self.lengths:
                cells = ["cold", "gpu_hit", *(["memory_hit"] if arm in CONNECTED else [])]
                host.call("turn", seed=WARM_SEED + length, length=length, cells=cells)

    def stop(self, serving: dict[str, Host]) -> None:
        """End the engines."""
        for host in dict.fromkeys(serving.values()):
            if host.process is not None:
                for arm in host.arms:
                    if arm.startswith("lakecache"):
                        host.activate(arm)
                        self.result.setdefault("counters", {})[f"{host.name}:{arm}"] = host.call(
                            "counters"
                        )
                host.stop()

    # Measuring

    def turn(self, host: Host, arm: str, length: int, seed: int, cells: list[str]) -> None:
        """Measure one prompt on one arm, and note what was seen."""
        host.activate(arm)
        seen = host.call("turn", seed=seed, length=length, cells=cells)
        for cell in cells:
            self.note(arm, length, seed, cell, seen[cell])
        self.result["samples"][-1]["settle_s"] = seen["settle_s"]
        if "cold" in cells:
            self.stored[arm].append((length, seed))
            self.written[arm] += length * kv_bytes_per_token(self.model)

    def within_budget(self, arm: str, length: int) -> bool:
        """The rivals' disk tiers have no limit: they get no more than the others may use."""
        more = length * kv_bytes_per_token(self.model)
        return (
            arm not in {"tiering", "lmcache"}
            or self.written[arm] + more <= self.options.disk_gib * GIB
        )

    def memory_cells(self, serving: dict[str, Host]) -> None:
        """Everything up to the memory hit, the longest prompts first: they are evicted first."""
        for length in sorted(self.lengths, reverse=True):
            for repeat in range(self.options.reps):
                for arm in self.in_turn(repeat):
                    if self.within_budget(arm, length):
                        cells = cells_of(arm, self.cells)
                        self.turn(serving[arm], arm, length, repeat, cells)
                self.save()
            progress(f"{self.model}: {length} tokens: " + self.line(length))

    def disk_cells(self, serving: dict[str, Host]) -> None:
        """Restart, without pool and page cache, and ask again for what was stored."""
        arms = [arm for arm in self.arms if arm in RESTARTABLE and arm in serving]
        if not arms:
            return
        self.stop(serving)
        shutil.rmtree(self.place.ram, ignore_errors=True)
        self.place.ram.mkdir()
        if self.server is not None:
            self.server.stop()
            self.server = LmcacheServer(self.place, self.options.cpu_gib)
        again = list(arms)
        if "lakecache" in arms and "always" in split(self.options.policies):
            self.link_copy("lakecache", "lakecache-always")
            again.append("lakecache-always")
        if "auto" not in split(self.options.policies):
            again = [arm for arm in again if arm != "lakecache"]
        if "none" in self.arms:
            again.insert(0, "none")
        restarted = self.start(again, "restart")
        # Disks of shared machines are not as fast at one time as at another.
        first = self.result["disk_gb_s"]
        self.bandwidths(restarted[again[0]])
        if first["read"] > self.result["disk_gb_s"]["read"]:
            self.result["disk_gb_s"] = first
        for length in sorted(self.lengths, reverse=True):
            for repeat in range(self.options.disk_reps):
                for arm in again:
                    kept = self.stored["lakecache" if arm == "lakecache-always" else arm]
                    seeds = [seed for size, seed in reversed(kept) if size == length]
                    if repeat < len(seeds):
                        cell = "recompute" if arm == "none" else "disk_hit"
                        self.turn(restarted[arm], arm, length, seeds[repeat], [cell])
                self.save()
            progress(f"{self.model}: restarted, {length} tokens: " + self.line(length))
        self.stop(restarted)

    def link_copy(self, source: str, target: str) -> None:
        """A second cache directory with the same files, so that both policies read all prompts."""
        origin, copied = self.place.scratch / source, self.place.scratch / target
        for root, _, names in os.walk(origin):
            folder = copied / Path(root).relative_to(origin)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in names:
                path = Path(root, name)
                if path.suffix == ".kv":
                    os.link(path, folder / name)
                elif path.name == "manifest.json":
                    shutil.copy2(path, folder / name)

    def pairs(self) -> None:
        """Alternate without and with LakeCache in one engine, on prompts of their own."""
        arms = [arm for arm in self.arms if arm in {"none", "null", "lakecache"}]
        serving = self.start(arms, "pairs")
        self.bandwidths(serving["none"])
        cells = list(MEMORY_CELLS[:3])
        for length in self.lengths:
            for number in range(self.options.pairs):
                order = arms if number % 2 == 0 else arms[::-1]
                for place, arm in enumerate(order):
                    self.turn(serving[arm], arm, length, pair_seed(number, place), cells)
                self.save()
            progress(f"{self.model}: {length} tokens: " + self.line(length))
        self.stop(serving)

    def measure(self) -> None:
        """Everything that the options ask for."""
        try:
            if self.options.pairs:
                self.pairs()
                return
            if "lmcache" in self.arms:
                self.server = LmcacheServer(self.place, self.options.cpu_gib)
            serving = self.start(self.arms, "first")
            self.bandwidths(serving[self.arms[0]])
            self.memory_cells(serving)
            if "disk_hit" in self.cells:
                self.disk_cells(serving)
            else:
                self.stop(serving)
        finally:
            if self.server is not None:
                self.server.stop()
            self.end()

    # Reporting

    def times(self, arm: str, length: int, cell: str) -> list[float]:
        """The times of a cell whose hits are proved, in ms."""
        return [s["ms"] for s in self.chosen(arm, length, cell) if self.proved(s)]

    def proved(self, sample: dict[str, Any]) -> bool:
        """Whether the counters say what the cell's name says; `auto` may decline."""
        cell, length = sample["cell"], sample["length"]
        if cell in {"cold", "recompute"}:
            return sample["cached"] == 0
        if cell in {"after_store", "gpu_hit"}:
            return sample["cached"] > 0
        external = external_tokens(sample)
        if sample["arm"] == "lakecache":
            return sample["cached"] == 0 or external > 0
        return external >= length // 2

    def report(self) -> None:
        """Print the tables of this model."""
        print(f"\n{self.model}, ms, median [range]; x = against none")
        per_token = kv_bytes_per_token(self.model)
        link = self.result.get("link_gb_s", {}).get("h2d")
        disk = self.result.get("disk_gb_s", {}).get("read")
        arms = [*self.arms, *(["lakecache-always"] if "lakecache" in self.arms else [])]
        rows = []
        for length in self.lengths:
            bare = median(self.times("none", length, "gpu_hit"))
            for cell in (*MEMORY_CELLS, "disk_hit", "recompute"):
                base = self.base(length, cell)
                row = [f"{length}", cell]
                for arm in arms:
                    samples = self.times(arm, length, cell)
                    unproved = len(self.chosen(arm, length, cell)) - len(samples)
                    said = summary(samples)
                    said += f" x{median(samples) / base:.3f}" if samples and base > 0 else ""
                    row.append(said + (f" ({unproved} not proved)" if unproved else ""))
                if any(part != "-" for part in row[2:]):
                    floor = ""
                    if cell == "memory_hit" and link:
                        floor = f"{bare + length * per_token / link / 1e6:.2f}"
                    if cell == "disk_hit" and disk:
                        floor = f"{bare + length * per_token / disk / 1e6:.2f}"
                    rows.append([*row, floor])
        print(table(["tokens", "cell", *arms, "floor"], rows))
        if self.options.pairs:
            self.report_pairs(MEMORY_CELLS[:3])
        self.report_loads(arms, link, disk)
        self.report_stages((*MEMORY_CELLS, "disk_hit"))
        self.report_tokens()

    def base(self, length: int, cell: str) -> float:
        """What a cell is compared with: computing, where it replaces that, else a GPU hit."""
        if cell == "disk_hit" and (again := self.times("none", length, "recompute")):
            return median(again)
        computed = cell in {"cold", "disk_hit", "recompute"}
        return median(self.times("none", length, "cold" if computed else "gpu_hit"))

    def report_loads(self, arms: list[str], link: float | None, disk: float | None) -> None:
        """Hits against their floor and against computing, and the bandwidth that they reach."""
        rows = []
        per_token = kv_bytes_per_token(self.model)
        for length in self.lengths:
            bare = median(self.times("none", length, "gpu_hit"))
            for cell, ceiling in (("memory_hit", link), ("disk_hit", disk)):
                computed = self.base(length, "disk_hit" if cell == "disk_hit" else "cold")
                for arm in arms:
                    samples = [s for s in self.chosen(arm, length, cell) if self.proved(s)]
                    loaded = [external_tokens(sample) for sample in samples]
                    if not samples or not ceiling:
                        continue
                    spent, nbytes = median([s["ms"] for s in samples]), median(loaded) * per_token
                    floor = bare + nbytes / ceiling / 1e6
                    rate = nbytes / max(spent - bare, 1e-3) / 1e6
                    rows.append(
                        [length, cell, arm, f"{median(loaded):.0f}", f"{spent:.2f}",
                         f"{floor:.2f}", f"{spent / floor:.3f}", f"{spent / computed:.3f}",
                         f"{rate:.2f}", f"{rate / ceiling:.3f}"]
                    )  # fmt: skip
        header = ["tokens", "cell", "arm", "loaded tokens", "ms", "floor of these tokens",
                  "x floor", "x computing", "GB/s beyond a GPU hit", "of ceiling"]  # fmt: skip
        self.print_table("loads", "loads", header, rows)


def main() -> int:
    parser = _runs.make_parser(
        __doc__, models=["qwen3-0.6b"], arms=["none", "offloading", "tiering", "lakecache"]
    )
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--cells", default=",".join([*MEMORY_CELLS, "disk_hit"]))
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--disk-reps", type=int, default=5)
    parser.add_argument("--policies", default="auto,always", help="load policies after a restart")
    parser.add_argument("--pairs", type=int, default=0, help="alternating pairs, none/lakecache")
    parser.add_argument("--together", action="store_true", help="all arms in one engine")
    parser.add_argument("--one-by-one", action="store_true", help="never start two at a time")
    parser.add_argument("--disk-probe-gib", type=float, default=4.0)
    # Enough for what the repeats store of qwen3-8b.
    parser.set_defaults(disk_gib=48.0)
    options = parser.parse_args()
    if options.pairs and options.arms == parser.get_default("arms"):
        options.arms = "none,lakecache"
    stop_on_signals()
    if options.device == "cpu":
        options.models, options.cpu_gib, options.disk_gib = "qwen3-tiny", 0.25, 0.25
        options.disk_probe_gib = 1 / 16
        options.lengths = options.lengths if options.lengths != "512,8192,32768" else "128,512,1024"
    _runs.run_models("ttft", options, lambda model, record: Run(model, options, record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
