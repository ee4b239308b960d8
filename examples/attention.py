"""Why a KV cache: attention with K and V computed again for each token, and with them kept.

usage: python examples/attention.py [--tokens N] [--device cpu|cuda]

One attention layer with fixed weights reads a prompt token by token. Both ways give the same
outputs; what differs is how many K and V are projected, and the time.
"""

from __future__ import annotations

import sys
import time

import samples
import torch

WIDTH, HEADS = 192, 3
HEAD_SIZE = WIDTH // HEADS


class Layer:
    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        scale = WIDTH**-0.5
        self.q, self.k, self.v = ((torch.randn(WIDTH, WIDTH) * scale).to(device) for _ in range(3))
        self.projected = 0

    def keys_values(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.projected += len(tokens)
        return tokens @ self.k, tokens @ self.v

    def attend(self, token: torch.Tensor, keys: torch.Tensor, values: torch.Tensor):
        def heads(rows: torch.Tensor) -> torch.Tensor:
            return rows.view(-1, HEADS, HEAD_SIZE).transpose(0, 1)

        query = heads((token @ self.q)[None])
        weights = torch.softmax(query @ heads(keys).transpose(1, 2) * HEAD_SIZE**-0.5, dim=-1)
        return (weights @ heads(values)).reshape(WIDTH)


def without_reuse(layer: Layer, prompt: torch.Tensor) -> torch.Tensor:
    outputs = []
    for end in range(1, len(prompt) + 1):
        keys, values = layer.keys_values(prompt[:end])
        outputs.append(layer.attend(prompt[end - 1], keys, values))
    return torch.stack(outputs)


def with_reuse(layer: Layer, prompt: torch.Tensor) -> torch.Tensor:
    keys = torch.empty_like(prompt)
    values = torch.empty_like(prompt)
    outputs = []
    for at in range(len(prompt)):
        keys[at : at + 1], values[at : at + 1] = layer.keys_values(prompt[at : at + 1])
        outputs.append(layer.attend(prompt[at], keys[: at + 1], values[: at + 1]))
    return torch.stack(outputs)


def main() -> int:
    parser = samples.arguments(__doc__)
    parser.add_argument("--tokens", type=samples.count, default=512, help="at least 1")
    options = parser.parse_args()
    prompt = torch.randn(options.tokens, WIDTH, generator=torch.Generator().manual_seed(1))
    prompt = prompt.to(options.device)
    results = {}
    for name, run in (("without reuse", without_reuse), ("with reuse", with_reuse)):
        run(Layer(options.device), prompt[:8])  # warm up
        layer = Layer(options.device)
        started = time.perf_counter()
        outputs = run(layer, prompt)
        if options.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        results[name] = (outputs, layer.projected, seconds)
        print(f"{name:14} {layer.projected:8,} K and V projected  {seconds * 1000:8.1f} ms")
    (slow, many, _), (fast, few, _) = results.values()
    difference = (slow - fast).abs().max().item()
    equal = difference < 1e-4
    print(f"outputs equal: {'yes' if equal else 'NO'} (largest difference {difference:.1e})")
    n = options.tokens
    return 0 if equal and few == n and many == n * (n + 1) // 2 else 1


if __name__ == "__main__":
    sys.exit(main())
