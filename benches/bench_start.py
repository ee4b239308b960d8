"""What a memory tier of 1, 16 or 100 GiB adds to the start of vLLM.

    bench_start.py --sizes 1,16,100 --output start.json

For each size an engine is started with an empty pool: the time of the connector's constructors
(scheduler and worker half) and of the registration of the KV caches, taken inside the engine; the
time until the engine is ready, against an engine without connector; and the first requests, sent at
once, while the rest of the memory is still being reserved: their time to first token against the
same requests of the engine without connector. Eager mode, as graphs and compilation are not what
is measured here. The first engine is started twice, so that no file is read for the first time.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from typing import Any

import _runs
from _engines import Host, stop_on_signals
from _samples import median, table
from _workplace import GIB, Workplace, progress

LENGTH = 8192


def measure(
    model: str, size: float | None, name: str, place: Workplace, options: argparse.Namespace
) -> dict[str, Any]:
    """Start one engine, ask it at once, watch its pool grow, and end it."""
    options.cpu_gib = size or 0.0
    arm = "none" if size is None else "lakecache"
    host = Host([arm], model, place, options, [options.length], name=f"{model}-{name}")
    try:
        host.spawn().wait()
        seen: dict[str, Any] = {"name": name, "gib": size, **host.started, "ready_s": host.ready_s}
        seen["pool_at_ready"] = pool_bytes(place)
        asked = []
        for repeat in range(options.requests):
            cells = ["cold", "gpu_hit"]
            turn = host.call(
                "turn", seed=repeat, length=options.length, cells=cells, flush=False, burn=0.02
            )
            asked.append({cell: turn[cell]["ms"] for cell in cells})
        seen["requests"] = asked
        seen["pool_after_requests"] = pool_bytes(place)
        if size is not None:
            seen["reserved_s"] = wait_reserved(place, int(size * GIB), options.patience, host)
            seen["pool_at_end"] = pool_bytes(place)
            seen["counters"] = host.call("counters")
        host.stop()
    finally:
        host.kill()
        shutil.rmtree(place.ram, ignore_errors=True)
        place.ram.mkdir(exist_ok=True)
        shutil.rmtree(place.scratch / "lakecache", ignore_errors=True)
    return seen


def pool_bytes(place: Workplace) -> int:
    """Memory that the pool takes by now."""
    return sum(path.stat().st_blocks * 512 for path in place.ram.rglob("*") if path.is_file())


def wait_reserved(place: Workplace, size: int, patience: float, host: Host) -> float:
    """Seconds from the engine's start until the pool holds all its memory, or stops growing."""
    last, grown = -1, time.perf_counter()
    while time.perf_counter() - grown < patience:
        now = pool_bytes(place)
        if now != last:
            last, grown = now, time.perf_counter()
        if now >= 0.99 * size:
            break
        time.sleep(0.1)
    return grown - host.spawned_at


def report(results: list[dict[str, Any]]) -> None:
    """Print one line per start."""
    bare = next((seen for seen in results if seen["gib"] is None), None)
    rows = []
    for seen in results:
        constructors = seen["constructor_s"]
        first, rest = seen["requests"][0], seen["requests"][1:]
        rows.append(
            [
                seen["name"],
                " + ".join(f"{spent * 1e3:.0f}" for spent in constructors.values()) or "-",
                f"{seen['register_s'] * 1e3:.0f}",
                f"{seen['init_s']:.2f}",
                f"{seen['init_s'] - bare['init_s']:+.2f}" if bare else "-",
                f"{seen['pool_at_ready'] / GIB:.1f}",
                f"{first['cold']:.1f}",
                f"{median([one['cold'] for one in rest]):.1f}" if rest else "-",
                f"{median([one['gpu_hit'] for one in rest]):.1f}" if rest else "-",
                f"{seen['reserved_s']:.1f}" if "reserved_s" in seen else "-",
                f"{seen.get('pool_at_end', 0) / GIB:.1f}",
            ]
        )
    header = ["start", "constructors ms", "register ms", "ready s", "against none",
              "GiB then", "first cold ms", "later cold ms", "GPU hit ms",
              "all reserved at s", "GiB at end"]  # fmt: skip
    print("\n" + table(header, rows))


def main() -> int:
    parser = _runs.make_parser(__doc__, models=["qwen3-0.6b"], arms=["none", "lakecache"])
    parser.add_argument("--sizes", default="1,16,100", help="GiB of the memory tier")
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--patience", type=float, default=5.0, help="seconds without growth")
    parser.add_argument("--no-rehearsal", action="store_true", help="do not start the first twice")
    options = parser.parse_args()
    stop_on_signals()
    options.enforce_eager = True
    options.kv_gib = options.kv_gib or 10.0
    if options.device == "cpu":
        options.models, options.sizes, options.length = "qwen3-tiny", "0.125,1", 1024
        options.kv_gib = 0.0625
    place = Workplace(options.output, options.scratch)
    record = _runs.new_record("start", starts=[])
    model = _runs.split(options.models)[0]
    sizes: list[float | None] = [None, *_runs.split(options.sizes, float)]
    if not options.no_rehearsal:
        sizes.insert(0, None)
    try:
        for number, size in enumerate(sizes):
            name = "none" if size is None else f"{size:g} GiB"
            if number == 0 and not options.no_rehearsal:
                measure(model, None, "rehearsal", place, options)
                continue
            seen = measure(model, size, name, place, options)
            record["starts"].append(seen)
            place.save(record)
            progress(f"{name}: ready after {seen['ready_s']:.1f} s")
    finally:
        place.keep_logs(options.keep_logs)
        if record["starts"]:
            report(record["starts"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
