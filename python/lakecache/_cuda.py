"""What is called of the CUDA driver itself: copies between raw addresses, and host memory that the
GPU may access.

The driver is used because the runtime's registration leaves a sticky error behind when it is
refused, which would surface in the engine. Calls release the GIL, but for the queueing of copies:
that takes microseconds, and a thread that took the GIL meanwhile may keep it for milliseconds.
"""

from __future__ import annotations

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
# Registered at a time: the driver holds up all other calls meanwhile (measured on an H200 host).
SLICE_BYTES = 32 << 20
PAUSE_SECONDS = 0.002
# Until the reserver of the pool has made further pieces.
LOOK_AGAIN_SECONDS = 0.02
LONGEST_WAIT_SECONDS = 1.0


class CudaError(RuntimeError):
    """A call of the driver failed; the text has its name and the driver's."""


@functools.cache
def _copy_call() -> Any:
    call = ctypes.PyDLL("libcuda.so.1").cuMemcpyAsync
    call.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    return call


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    size = ctypes.c_size_t
    for name, arguments in {
        "cuMemHostRegister_v2": (ctypes.c_void_p, size, ctypes.c_uint),
        "cuMemHostUnregister": (ctypes.c_void_p,),
        "cuCtxGetCurrent": (ctypes.c_void_p,),
        "cuCtxSetCurrent": (ctypes.c_void_p,),
        "cuGetErrorName": (ctypes.c_int, ctypes.c_void_p),
    }.items():
        getattr(driver, name).argtypes = arguments
    return driver


def _call(name: str, *arguments: Any) -> None:
    _check(name, getattr(_driver(), name)(*arguments))


def _check(name: str, status: int) -> None:
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
    _check("cuMemcpyAsync", _copy_call()(target, source, size, stream))


class HostRegistration:
    """Registers the pool's memory with CUDA in the background, slice by slice as it is reserved.

    At the first refusal it stops: that memory then works too, only slower.
    """

    def __init__(self, cache: Any) -> None:
        """Start; the calling thread's CUDA context is the one that gets access."""
        # The GPU copies to and from this memory even if its registration is refused.
        cache.declare_gpu_copies()
        self._cache = cache
        self._context = ctypes.c_void_p()
        _call("cuCtxGetCurrent", ctypes.byref(self._context))
        pieces = cache.pieces()
        self._start = min(address for address, _, _ in pieces)
        self._total = sum(size for _, size, _ in pieces)
        # By number of slice, from the first piece on; pieces lie one after the other.
        self._registered: set[int] = set()
        self._refused = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lakecache-pin", daemon=True)
        self._thread.start()

    def covers(self, spans: Iterable[tuple[int, int]]) -> bool:
        """Whether copies to and from these (address, bytes) may begin.

        True for all of them once CUDA refused a slice.
        """
        return self._refused or all(
            number in self._registered
            for address, size in spans
            for number in range(self._slice(address), self._slice(address + size - 1) + 1)
        )

    def cut(self, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Cut (address, bytes) where slices meet: one copy must not cross two registrations."""
        found = []
        for start, size in spans:
            address, end = start, start + size
            while address < end:
                border = self._start + (self._slice(address) + 1) * SLICE_BYTES
                found.append((address, min(border, end) - address))
                address = border
        return found

    def _slice(self, address: int) -> int:
        return (address - self._start) // SLICE_BYTES

    @property
    def registered_bytes(self) -> int:
        """Bytes of the pool that the GPU can access directly."""
        return min(len(self._registered) * SLICE_BYTES, self._total)

    def _run(self) -> None:
        try:
            _call("cuCtxSetCurrent", self._context)
            pause = LOOK_AGAIN_SECONDS
            while self.registered_bytes < self._total and not self._stop.is_set():
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
        """Register the slices that are reserved as a whole; whether there was one."""
        found = False
        end = self._start
        for _, size, reserved in self._cache.pieces():
            end += size
            if not reserved:
                break
            last = end == self._start + self._total
            while not self._stop.is_set():
                number = len(self._registered)
                address = self._start + number * SLICE_BYTES
                size = min(SLICE_BYTES, self._start + self._total - address)
                if size <= 0 or (address + size > end and not last):
                    break
                self._register(number, address, size)
                found = True
        return found

    def _register(self, number: int, address: int, size: int) -> None:
        # Otherwise the driver takes a fault for each page under its lock. A kernel that does not
        # know the advice loses only that.
        _libc().madvise(address, size, MADV_POPULATE_WRITE)
        _call("cuMemHostRegister_v2", address, size, REGISTER_PORTABLE)
        self._registered.add(number)
        self._stop.wait(PAUSE_SECONDS)

    def close(self) -> None:
        """Stop, and give the memory back before it is unmapped."""
        self._stop.set()
        self._thread.join()
        for number in self._registered:
            try:
                _call("cuMemHostUnregister", self._start + number * SLICE_BYTES)
            except CudaError as error:
                log.debug("LakeCache: %s", error)
        self._registered.clear()
