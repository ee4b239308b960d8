"""The exceptions of LakeCache. The compiled half raises these same classes.

A miss is never an exception. Inside a running engine the connector catches all of them, counts
them and treats them as misses; they reach the user at start-up and from the store API only.
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "DeadlineError",
    "EngineUnavailableError",
    "LakeCacheError",
    "LeaseLostError",
    "PoolIncompatibleError",
    "StorageError",
]


class LakeCacheError(Exception):
    """Base of everything that LakeCache raises."""


class ConfigError(LakeCacheError, ValueError):
    """A value in the configuration is wrong. Fix the key that the text names."""


class CapacityError(LakeCacheError, OSError):
    """What was asked for can never fit: shared memory, cgroup, disk or an object's size."""


class StorageError(LakeCacheError, OSError):
    """The operating system refused an operation. Keeps `errno` and, where known, the path."""


class EngineUnavailableError(LakeCacheError, RuntimeError):
    """An I/O engine that was asked for by name, or a directory that others use, is not to be had
    here. The text says why.
    """


class PoolIncompatibleError(LakeCacheError, RuntimeError):
    """The pool of this directory has another format, or cannot be reached from here."""


class ClosedError(LakeCacheError, RuntimeError):
    """The cache was used after it was closed, or across a fork."""


class DeadlineError(LakeCacheError, TimeoutError):
    """A bounded wait ran out."""


class LeaseLostError(LakeCacheError, RuntimeError):
    """An object that was leased is gone, or found no room in memory. Compute it again."""
