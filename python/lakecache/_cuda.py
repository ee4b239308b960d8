"""What is called of the CUDA driver itself: copies between raw addresses, and host memory that the
GPU may access.

The driver is used because the runtime's registration leaves a sticky error behind when it is
refused, which would surface in the engine. Calls go through ctypes, which releases the GIL.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import logging
import threading
from collections.abc import Iterable
from typing import Any

__all__ = ["CudaError", "HostRegistration", "copy_async"]

log = logging.getLogger("vllm.lakecache")

REGISTER_PORTABLE = 1
MADV_POPULATE_WRITE = 23
# Until the reserver of the pool has made further pieces.
LOOK_AGAIN_SECONDS = 0.02
LONGEST_WAIT_SECONDS = 1.0


class CudaError(RuntimeError):
    """A call of the driver failed; the text has its name and the driver's."""


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    address, size = ctypes.c_uint64, ctypes.c_size_t
    for name, arguments in {
        "cuMemcpyAsync": (address, address, size, ctypes.c_void_p),
        "cuMemHostRegister_v2": (ctypes.c_void_p, size, ctypes.c_uint),
        "cuMemHostUnregister": (ctypes.c_void_p,),
        "cuCtxGetCurrent": (ctypes.c_void_p,),
        "cuCtxSetCurrent": (ctypes.c_void_p,),
        "cuGetErrorName": (ctypes.c_int, ctypes.c_void_p),
    }.items():
        getattr(driver, name).argtypes = arguments
    return driver


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(text))
        raise CudaError(f"{name} failed: {(text.value or b'unknown error').decode()} ({status})")


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def copy_async(target: int, source: int, size: int, stream: int) -> None:
    """Queue a copy of `size` bytes between two addresses, of the host or of the GPU.

    With host memory that is not registered the driver copies in pieces and the call waits.
    """
    _call("cuMemcpyAsync", target, source, size, stream)


class HostRegistration:
    """Registers the pool's memory with CUDA in the background, piece by piece as it is reserved.

    At the first refusal it stops: that memory then works too, only slower.
    """

    def __init__(self, cache: Any) -> None:
        """Start; the calling thread's CUDA context is the one that gets access."""
        self._cache = cache
        self._context = ctypes.c_void_p()
        _call("cuCtxGetCurrent", ctypes.byref(self._context))
        self._starts: list[int] = [address for address, _, _ in cache.pieces()]
        self._registered: set[int] = set()
        self._refused = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lakecache-pin", daemon=True)
        self._thread.start()

    def covers(self, spans: Iterable[tuple[int, int]]) -> bool:
        """Whether copies to and from these (address, bytes) may begin.

        Each span lies in one piece. True for all of them once CUDA refused a piece.
        """
        if self._refused:
            return True
        starts, registered = self._starts, self._registered
        return all(bisect.bisect_right(starts, address) - 1 in registered for address, _ in spans)

    @property
    def registered_bytes(self) -> int:
        """Bytes of the pool that the GPU can access directly."""
        pieces = self._cache.pieces()
        return sum(pieces[index][1] for index in tuple(self._registered))

    def _run(self) -> None:
        try:
            _call("cuCtxSetCurrent", self._context)
            pause = LOOK_AGAIN_SECONDS
            while len(self._registered) < len(self._starts) and not self._stop.is_set():
                pause = LOOK_AGAIN_SECONDS if self._step() else min(2 * pause, LONGEST_WAIT_SECONDS)
                self._stop.wait(pause)
        except Exception as error:
            self._refused = True
            log.warning(
                "LakeCache: CUDA does not accept the memory pool as pinned memory (%s), so copies "
                "to and from it are slow and hold up the engine. Raise the container's limit of "
                "locked memory (ulimit -l).", error,
            )  # fmt: skip

    def _step(self) -> bool:
        """Register what has been reserved; whether there was anything."""
        found = False
        for index, (address, size, reserved) in enumerate(self._cache.pieces()):
            if reserved and index not in self._registered and not self._stop.is_set():
                # Otherwise the driver takes a fault for each page, and holds up all other calls.
                # A kernel that does not know the advice loses only that.
                _libc().madvise(address, size, MADV_POPULATE_WRITE)
                _call("cuMemHostRegister_v2", address, size, REGISTER_PORTABLE)
                self._registered.add(index)
                found = True
        return found

    def close(self) -> None:
        """Stop, and give the memory back before it is unmapped."""
        self._stop.set()
        self._thread.join()
        for index in self._registered:
            try:
                _call("cuMemHostUnregister", self._starts[index])
            except CudaError as error:
                log.debug("LakeCache: %s", error)
        self._registered.clear()
