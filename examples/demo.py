"""The store in twenty lines: put tensors, forget them, lease them, get the same bytes.

usage: python examples/demo.py [--device cpu|cuda] [--kv-snapshot FILE]
"""

from __future__ import annotations

import sys

import samples
import torch

from lakecache.store import TieredStore


def main() -> int:
    options = samples.arguments(__doc__).parse_args()
    tensors = samples.kv_tensors(options.kv_snapshot, options.device)
    names = [name.encode() for name in tensors]
    good = True
    with samples.places() as places, TieredStore(**places, cpu_bytes="256MiB") as store:
        for name, tensor in tensors.items():
            good &= store.put_device(name.encode(), tensor)
        store.flush()
        for what in ("as stored", "memory emptied", "once more"):
            if what == "memory emptied":
                print(f"evicted from memory: {store.clear_memory():,} bytes")
            with store.lease_many(names) as lease:
                source = lease.tier(0)
                for index, tensor in enumerate(tensors.values()):
                    back = torch.empty_like(tensor)
                    lease.copy_into(index, back)
                    good &= samples.same_bytes(tensor, back)
            good &= source == ("disk" if what == "memory emptied" else "memory")
            print(f"{what}: {len(names)} objects from {source}")
        for name in ("stores", "memory_hits", "disk_hits", "disk_payload_reads", "writes"):
            print(f"  {name}: {store.stats()[name]}")
    print("every byte came back" if good else "NOT as promised")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
