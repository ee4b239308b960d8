"""What a connector costs streams that decode: alone, while prompts are stored, while restored.

    bench_decode.py --models qwen3-0.6b --rounds 5 --output decode.json

16 streams decode; after some steps four prompts of 8K tokens arrive at once. In the phase "alone"
none arrive; in "store" they are new and are computed (and stored); in "restore" they are the same
ones, with the GPU's prefix cache emptied, so a cache restores them while the others decode, and
without one they are computed again. The gaps between a stream's tokens are counted from the step
in which the prompts arrive; all rounds of a cell are pooled, and each round's own quantiles give
the range. Arms without a rival's settings share one engine, in which the connector is switched
between rounds; OffloadingConnector has an engine of its own. Arms take turns in every round.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import _runs
from _arms import ARMS
from _engines import Host, external_tokens, stop_on_signals
from _samples import interval, median, quantile, summary
from _workplace import progress

PHASES = ("alone", "store", "restore")
SHARED = ("none", "null", "lakecache", "lakecache-always")
KV_GIB = {"qwen3-0.6b": 40.0, "qwen3-8b": 36.0, "qwen3-tiny": 0.0625}
QUANTILES = (0.5, 0.9, 0.99, 0.999)


class Run(_runs.Run):
    """One model's measurements."""

    def __init__(self, model: str, options: argparse.Namespace, record: dict[str, Any]) -> None:
        super().__init__(model, options, record, KV_GIB)
        self.result["rounds"] = []

    def start(self) -> dict[str, Host]:
        """One engine for the arms that can share it, one for each other."""
        shared = [arm for arm in self.arms if arm in SHARED]
        groups = [shared] if shared else []
        groups += [[arm] for arm in self.arms if arm not in SHARED]
        longest = [self.options.length, self.options.prompt + self.options.tokens]
        hosts = [
            Host(group, self.model, self.place, self.options, longest,
                 name=f"{self.model}-{'-'.join(group)}")
            for group in groups
        ]  # fmt: skip
        return self.start_engines(hosts, one_by_one=self.options.one_by_one)

    def phase(self, host: Host, arm: str, phase: str, number: int) -> dict[str, Any]:
        """Run one phase; every round and arm has prompts of its own."""
        options = self.options
        first = 100_000 + (number * len(ARMS) + ARMS.index(arm)) * 64
        intruders = [] if phase == "alone" else [first + i for i in range(options.prompts)]
        host.call("settle")
        if phase == "restore":
            host.call("reset")
        host.call("burn")
        return host.call(
            "decode", streams=options.streams, tokens=options.tokens, prompt=options.prompt,
            seed=500_000 + first + PHASES.index(phase) * options.streams, intruders=intruders,
            length=options.length, at=options.at,
        )  # fmt: skip

    def measure(self) -> None:
        """All rounds of all phases; the first round warms up and is not counted."""
        try:
            serving = self.start()
            for number in range(self.options.rounds + 1):
                for arm in self.in_turn(number):
                    serving[arm].activate(arm)
                    for phase in PHASES:
                        seen = self.phase(serving[arm], arm, phase, number)
                        if number:
                            self.note(arm, phase, number, seen)
                self.save()
                progress(f"{self.model}: round {number} of {self.options.rounds}")
            for arm in self.arms:
                if arm != "none":
                    self.idle_steps(serving[arm], arm)
            for host in dict.fromkeys(serving.values()):
                host.stop()
        finally:
            self.end()

    def idle_steps(self, host: Host, arm: str) -> None:
        """Time the connector's own calls in steps in which there is nothing to move."""
        host.activate(arm)
        host.call("settle")
        host.call("time_calls", on=True)
        self.phase(host, arm, "alone", 0)
        calls = host.call("time_calls", on=False)
        steps = calls["build_connector_meta"][0]
        self.result.setdefault("idle_step_us", {})[arm] = {
            "steps": steps,
            "total": sum(spent for _, spent in calls.values()) / steps * 1e6,
            **{
                name: round(spent / steps * 1e6, 2)
                for name, (count, spent) in calls.items()
                if count
            },
        }

    def note(self, arm: str, phase: str, number: int, seen: dict[str, Any]) -> None:
        """Keep a round's gaps (rounded to a microsecond)."""
        self.result["rounds"].append(
            {
                "arm": arm,
                "phase": phase,
                "round": number,
                "gaps": [round(gap, 3) for gap in seen["gaps"]],
                "answered_ms": seen["answered_ms"],
                "counts": seen["counts"],
            }
        )

    def report(self) -> None:
        """Print pooled quantiles, and the range of each round's p50 and p99."""
        rows = []
        pooled: dict[tuple[str, str], list[list[float]]] = {}
        for seen in self.result["rounds"]:
            pooled.setdefault((seen["phase"], seen["arm"]), []).append(seen["gaps"])
        for phase in PHASES:
            for arm in self.arms:
                rounds = pooled.get((phase, arm), [])
                gaps = [gap for one in rounds for gap in one]
                if not gaps:
                    continue
                answered = [
                    ms
                    for seen in self.result["rounds"]
                    if (seen["phase"], seen["arm"]) == (phase, arm)
                    for ms in seen["answered_ms"]
                ]
                row = {
                    "phase": phase,
                    "arm": arm,
                    **{f"p{share * 100:g}": f"{quantile(gaps, share):.3f}" for share in QUANTILES},
                    "max": f"{max(gaps):.2f}",
                    "p50 by round": summary([quantile(one, 0.5) for one in rounds]),
                    "p99 by round": summary([quantile(one, 0.99) for one in rounds]),
                    "gaps": len(gaps),
                    "prompts answered after": f"{median(answered):.1f}" if answered else "-",
                    "hit tokens": self.hit_tokens(phase, arm),
                }
                rows.append(row)
        title = f"{self.model}, ms between a stream's tokens"
        self.print_table("table", title, list(rows[0]) if rows else [], [r.values() for r in rows])
        self.report_pairs(pooled)
        for arm, spent in self.result.get("idle_step_us", {}).items():
            print(f"connector's own time in an idle step, us: {arm}: {spent}")

    def hit_tokens(self, phase: str, arm: str) -> str:
        """Median of the tokens that came from outside the GPU in a round."""
        hits = [
            external_tokens(seen)
            for seen in self.result["rounds"]
            if (seen["phase"], seen["arm"]) == (phase, arm)
        ]
        return f"{median(hits):.0f}"

    def report_pairs(self, pooled: dict[tuple[str, str], list[list[float]]]) -> None:
        """Compare each round's quantiles with those of the do-nothing connector, and of none."""
        rows = []
        for phase in PHASES:
            for base in ("null", "none"):
                for arm in self.arms:
                    if arm == base or (phase, base) not in pooled or (phase, arm) not in pooled:
                        continue
                    row = [phase, arm, base]
                    for share in (0.5, 0.99):
                        ratios = [
                            quantile(a, share) / quantile(b, share)
                            for a, b in zip(pooled[phase, arm], pooled[phase, base], strict=False)
                        ]
                        low, high = interval(ratios)
                        row.append(f"{median(ratios):.4f} ({low:.4f}-{high:.4f})")
                    rows.append(row)
        header = ["phase", "arm", "against", "p50 ratio (95 %)", "p99 ratio (95 %)"]
        self.print_table("ratios", "median of the rounds' ratios", header, rows)


def main() -> int:
    parser = _runs.make_parser(
        __doc__, models=["qwen3-0.6b"], arms=["none", "null", "lakecache", "offloading"]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=320, help="tokens per stream")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a stream's prompt")
    parser.add_argument("--prompts", type=int, default=4, help="prompts that arrive")
    parser.add_argument("--length", type=int, default=8192, help="their tokens")
    parser.add_argument("--at", type=int, default=40, help="the step at which they arrive")
    parser.add_argument("--one-by-one", action="store_true", help="never start two at a time")
    options = parser.parse_args()
    stop_on_signals()
    if options.device == "cpu":
        options.models, options.cpu_gib, options.disk_gib = "qwen3-tiny", 0.25, 0.25
        options.length, options.tokens, options.at = 1024, 40, 10
    _runs.run_models("decode", options, lambda model, record: Run(model, options, record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
