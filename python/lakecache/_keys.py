"""The keys of a request's objects: its namespace, its block hashes, and what kind they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lakecache._objects import KEY_BYTES, KIND_CHUNK, KIND_STATE, KIND_TAIL, Geometry

if TYPE_CHECKING:
    from lakecache._records import Tracked
    from lakecache._spaces import Namespaces

__all__ = ["RequestKeys"]


class RequestKeys:
    """Makes each key once, and keeps it with the request. There are none while its namespace is not
    known.
    """

    def __init__(self, spaces: Namespaces, geometry: Geometry) -> None:
        from lakecache import _core

        self._core = _core
        self._spaces = spaces
        self._chunk, self._block, self._unit = geometry

    def chunks(self, tracked: Tracked) -> bytes:
        """Give the keys of all full chunks of the request, extended as it grows."""
        request = tracked.request
        space = self._spaces.of(request.lora_request)
        if space is None:
            return b""
        if tracked.space is not space:
            self.forget(tracked)
            tracked.space = space
        have = len(tracked.keys) // KEY_BYTES
        total = len(request.block_hashes) * self._unit // self._chunk
        if have < total:
            units = self._chunk // self._unit
            hashes = request.block_hashes[(have + 1) * units - 1 : total * units : units]
            tracked.keys += self._core.derive_keys(space.digest, KIND_CHUNK, hashes)
        return tracked.keys

    def states(self, tracked: Tracked, begin: int, end: int) -> bytes:
        """Give the keys of the states at the multiples of the hash unit beyond `begin` units, up to
        `end`; made once for each `begin`, and extended as more are asked for.
        """
        space = tracked.space
        if space is None:
            return b""
        if begin != tracked.states_begin:
            tracked.states_begin, tracked.states = begin, b""
        hashes = tracked.request.block_hashes
        end = min(end, len(hashes))
        per_block = self._block // self._unit
        have = begin + len(tracked.states) // KEY_BYTES
        parts = [tracked.states]
        while have < end:
            # The tails of a block, then the state at its end.
            aligned = (have + 1) % per_block == 0
            upto = have + 1 if aligned else min((have // per_block + 1) * per_block - 1, end)
            kind = KIND_STATE if aligned else KIND_TAIL
            parts.append(self._core.derive_keys(space.digest, kind, hashes[have:upto]))
            have = upto
        tracked.states = b"".join(parts)
        return tracked.states[: max(end - begin, 0) * KEY_BYTES]

    def state(self, tracked: Tracked, boundary: int) -> bytes:
        """Give the key of the state at one boundary."""
        if tracked.space is None:
            return b""
        kind = KIND_TAIL if boundary % self._block else KIND_STATE
        at = boundary // self._unit
        hashes = tracked.request.block_hashes[at - 1 : at]
        return self._core.derive_keys(tracked.space.digest, kind, hashes)

    def forget(self, tracked: Tracked) -> None:
        """Have the keys made anew, in the namespace that holds then."""
        tracked.space, tracked.keys, tracked.states = None, b"", b""
