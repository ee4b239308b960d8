"""What is stored: kinds and shapes of objects, and the states of the slots that they lie in."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "FILLING",
    "GONE",
    "KEY_BYTES",
    "KIND_CHUNK",
    "KIND_STATE",
    "KIND_TAIL",
    "READY",
    "Geometry",
]

KEY_BYTES = 32
# As the core numbers them.
FILLING, READY, GONE = 0, 1, 2

# What an object holds; part of its key and of its file's header.
KIND_CHUNK = 0
# The recurrent state of all layers at the end of a block.
KIND_STATE = 1
# The same inside of a block, with that block's pages as far as they are filled. Of this kind there
# are several shapes, which have the numbers from this one on.
KIND_TAIL = 2

# At most so many shapes of tails; each needs a table on the GPU.
TAIL_SHAPES = 8


class Geometry(NamedTuple):
    """Tokens per chunk, per block of the engine, and per block hash."""

    chunk: int
    block: int
    unit: int

    def tails(self) -> list[int]:
        """Give how many tokens of the open block a tail may hold: a size for each of its shapes."""
        step = self._step()
        # The deepest place inside of a block lies a unit before its end.
        ends = range(step, self.block - self.unit + step, step)
        return [min(end, self.block) for end in ends]

    def state_shape(self, boundary: int) -> int:
        """Give the shape of the state at this boundary: KIND_STATE, or one from KIND_TAIL on."""
        inside = boundary % self.block
        return KIND_TAIL + (inside - 1) // self._step() if inside else KIND_STATE

    def _step(self) -> int:
        return -(-self.block // (TAIL_SHAPES * self.unit)) * self.unit
