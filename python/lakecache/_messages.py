"""What the compiled half has to say, handed to Python's logging."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

__all__ = ["pass_on"]


@functools.cache
def _source() -> Callable[[], list[tuple[int, str]]]:
    from lakecache import _core

    return _core.take_messages


def pass_on(log: logging.Logger) -> None:
    """Log what was said since the last call; without news it costs next to nothing.

    The core's threads never call into Python, so whoever uses the store asks now and then. Repeats
    of one message within half a minute are left out, and counted in the next.
    """
    for level, text in _source()():
        log.log(level, "LakeCache: %s", text, stacklevel=2)
