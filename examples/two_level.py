"""Two levels: after memory is emptied the first read is from disk, the second from memory.

usage: python examples/two_level.py [--shared] [--device cpu|cuda] [--kv-snapshot FILE]

With --shared another process does the reading, through the same shared memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import samples

from lakecache.store import TieredStore

KEY = b"one object"
MEMORY = "128MiB"


def read_twice(store: TieredStore) -> dict:
    """Where each of two reads came from, and what they cost the disk."""
    sources, sizes = [], []
    for _ in range(2):
        with store.lease_many([KEY]) as lease:
            sources.append(lease.tier(0))
            sizes.append(len(lease.read(0)))
    counted = store.stats()
    return {
        "sources": sources,
        "bytes": sizes,
        "disk_payload_reads": counted["disk_payload_reads"],
    }


def main() -> int:
    parser = samples.arguments(__doc__)
    parser.add_argument("--shared", action="store_true", help="read in a second process")
    # Used by --shared: the places of the store, as JSON.
    parser.add_argument("--reader", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reader:
        with TieredStore(**json.loads(options.reader), cpu_bytes=MEMORY) as store:
            print(json.dumps({"pool": store.pool_id, **read_twice(store)}))
        return 0

    tensor = next(iter(samples.kv_tensors(options.kv_snapshot, options.device).values())).cpu()
    size = tensor.numel() * tensor.element_size()
    with (
        samples.places() as places,
        TieredStore(**places, cpu_bytes=MEMORY, shared=options.shared) as store,
    ):
        good = store.put(KEY, tensor) and store.flush()
        print(f"put {size:,} bytes; memory emptied: {store.clear_memory():,} bytes freed")
        if options.shared:
            command = [sys.executable, __file__, "--reader", json.dumps(places)]
            done = subprocess.run(command, stdout=subprocess.PIPE, timeout=120, check=True)
            seen = json.loads(done.stdout)
            good &= seen["pool"] == store.pool_id
            print(f"read by another process, pool {seen['pool']}")
        else:
            seen = read_twice(store)
    print(f"first read from {seen['sources'][0]}, second from {seen['sources'][1]}")
    print(f"disk payload reads: {seen['disk_payload_reads']}")
    good &= seen["sources"] == ["disk", "memory"] and seen["disk_payload_reads"] == 1
    good &= seen["bytes"] == [size, size]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
