"""Where vLLM keeps the recurrent states of a prompt, and so where its steps end."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from lakecache._objects import Geometry

__all__ = ["Boundaries"]


class Boundaries:
    """vLLM's own rules, for one engine. A boundary is a multiple of the hash unit, in tokens."""

    def __init__(self, vllm_config: VllmConfig, geometry: Geometry) -> None:
        speculative = vllm_config.speculative_config
        self.drops_block = speculative is not None and speculative.use_eagle_block_drop()
        self._block, self._unit = geometry.block, geometry.unit

    def last(self, request: Request) -> int:
        """Give the deepest boundary of the prompt at which vLLM makes a state."""
        tokens = int(request.num_prompt_tokens) - (not self.drops_block)
        return max(tokens // self._unit * self._unit - self._unit * self.drops_block, 0)

    def last_block(self, request: Request) -> int:
        """Give the deepest one that ends a block."""
        return self.last(request) // self._block * self._block

    def stops(self, request: Request, begin: int) -> list[int]:
        """Give where vLLM ends a step to have a state there, if it computes from token `begin` on:
        at the next block boundary, at the prompt's last one, and at its deepest boundary of all.
        """
        following = -(-begin // self._block) * self._block
        return sorted({following, self.last_block(request), self.last(request)})

    def is_junction(self, request: Request, boundary: int) -> bool:
        """Whether vLLM saw another prompt part from this one here, or within the next block."""
        parts = request.shared_prefix_boundary
        return boundary in {parts, parts // self._block * self._block}
