"""What a client says of one request in `kv_transfer_params`: whether it may be stored, or loaded.

A mistake of a client must neither stop the engine nor bring private data into the store: what is
not understood means no.
"""

from __future__ import annotations

import logging
import reprlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lakecache._metadata import Tally
    from lakecache._records import Tracked

__all__ = ["ParamsReader"]

log = logging.getLogger("vllm.lakecache")

STORE, LOAD = "lakecache.store", "lakecache.load"
# How many warnings there are must not be for clients to decide.
WARN_SECONDS = 30.0


class ParamsReader:
    """Reads the parameters of requests, counts, and warns of what it does not understand."""

    def __init__(self, counts: Tally) -> None:
        self._counts = counts
        self._warned: float | None = None
        self._left_out = 0

    def apply(self, tracked: Tracked, params: Any) -> None:
        """Note whether a request is stored, and whether it is loaded: without the keys, yes.

        A value that is neither true nor false is taken for false. A key with `lakecache` in it that
        is none of the two, and parameters that are no mapping, mean that the request is not stored.
        """
        allowed = {STORE: True, LOAD: True}
        first, faults = None, 0
        mapping = isinstance(params, Mapping)
        allowed[STORE] = mapping
        for key, value in params.items() if mapping else ():
            # Whoever writes it in another way means this one; all other keys are others'.
            if "lakecache" not in str(key).lower():
                continue
            known = isinstance(key, str) and key in allowed
            allowed[key if known else STORE] &= known and value is True
            if not known or not isinstance(value, bool):
                first, faults = first or (key, value), faults + 1
        tracked.stores, tracked.loads = allowed[STORE], allowed[LOAD]
        if not tracked.stores:
            self._counts["requests_not_stored"] += 1
        if not tracked.loads:
            self._counts["requests_not_loaded"] += 1
        if faults or not mapping:
            self._counts["params_refused"] += 1
            self._warn(tracked, first, faults, params)

    def _warn(
        self, tracked: Tracked, first: tuple[Any, Any] | None, faults: int, params: Any
    ) -> None:
        now = time.monotonic()
        if self._warned is not None and now - self._warned < WARN_SECONDS:
            self._left_out += 1
            return
        # Only what is said is put into words: the engine waits, and there may be a million.
        if first is None:
            fault = f"is {reprlib.repr(params)}"
        else:
            fault = "has {} with value {}".format(*map(reprlib.repr, first))
        others = f" (and {faults - 1} more)" if faults > 1 else ""
        outcome = ["not stored"] * (not tracked.stores) + ["not loaded"] * (not tracked.loads)
        left_out, self._left_out, self._warned = self._left_out, 0, now
        log.warning(
            "LakeCache: request %r: kv_transfer_params %s%s; allowed are %s and %s, each true or "
            "false. The request is %s.%s",
            tracked.request.request_id, fault, others, STORE, LOAD, " and ".join(outcome),
            f" {left_out} such requests since the last warning." if left_out else "",
        )  # fmt: skip
