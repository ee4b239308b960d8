"""The memory of what a store is given: buffers and tensors, in host memory or on a device."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lakecache.errors import ConfigError, LeaseLostError

if TYPE_CHECKING:
    import torch

    from lakecache._cuda import HostRegistration

__all__ = ["DeviceAccess", "bytes_of", "fill_views", "flat", "is_on_device"]

log = logging.getLogger("lakecache")


def is_on_device(target: Any) -> bool:
    """Whether this is a tensor that does not lie in host memory."""
    device = getattr(target, "device", None)
    return getattr(device, "type", "cpu") != "cpu"


class DeviceAccess:
    """Copies between a device and the objects of one store, over when the call returns.

    From the first tensor of a GPU on, the pool's memory is registered with CUDA in the background,
    which makes the copies several times faster. Views keep an object's memory while it is copied,
    also where another thread closes the store.
    """

    def __init__(self) -> None:
        self._registration: HostRegistration | None = None
        self._refused = False

    def store(self, cache: Any, tensor: torch.Tensor, slot: tuple[int, int]) -> None:
        """Copy the bytes of a flat tensor over a new object."""
        held = cache.view(*slot)
        for host, device in self._pairs(cache, tensor, slot):
            host.copy_(device)
        del held

    def load(self, cache: Any, tensor: torch.Tensor, slot: tuple[int, int]) -> None:
        """Copy an object, which the caller holds, over a flat tensor of bytes."""
        held = cache.view(*slot)
        for host, device in self._pairs(cache, tensor, slot):
            device.copy_(host)
        del held

    def _pairs(
        self, cache: Any, tensor: torch.Tensor, slot: tuple[int, int]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        import torch

        spans = cache.spans(*slot)
        size = sum(count for _, count in spans)
        if not spans:
            raise LeaseLostError("the object is gone")
        if size != tensor.numel():
            raise ConfigError(f"the object has {size} bytes and the tensor {tensor.numel()}")
        self._register(cache, tensor.device)
        if self._registration is not None:
            spans = self._registration.cut(spans)
        pairs, at = [], 0
        for address, count in spans:
            memory = (ctypes.c_uint8 * count).from_address(address)
            host = torch.frombuffer(memory, dtype=torch.uint8)
            pairs.append((host, tensor[at : at + count]))
            at += count
        return pairs

    def _register(self, cache: Any, device: torch.device) -> None:
        if device.type != "cpu":
            # Registered or not, it copies to and from this memory.
            cache.declare_gpu_copies()
        if device.type != "cuda" or self._refused or self._registration is not None:
            return
        import torch

        from lakecache._cuda import HostRegistration

        try:
            with torch.cuda.device(device):
                self._registration = HostRegistration(cache)
        except (OSError, RuntimeError) as error:
            self._refused = True
            log.warning("LakeCache: the pool cannot be registered with CUDA: %s", error)

    def close(self) -> None:
        """Give the memory back to CUDA, before it is unmapped."""
        registration, self._registration = self._registration, None
        if registration is not None:
            registration.close()


def flat(tensor: Any) -> torch.Tensor:
    """The bytes of a contiguous tensor, where it lies; TypeError for anything else."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a torch tensor is needed, not {type(tensor).__name__}")
    _check_plain(tensor)
    return tensor.detach().view(-1).view(torch.uint8)


def _check_plain(tensor: torch.Tensor) -> None:
    """Refuse a tensor whose memory is not its value, from the first byte to the last."""
    if not tensor.is_contiguous():
        raise TypeError("the tensor is not contiguous; use .contiguous()")
    if tensor.is_conj() or tensor.is_neg():
        raise TypeError(
            "the tensor is a view that negates or conjugates what lies in memory; use "
            ".resolve_conj() or .resolve_neg()"
        )


def fill_views(views: Sequence[memoryview], source: memoryview) -> None:
    """Copy `source` over the extents of a new object."""
    at = 0
    for view in views:
        with view:
            view[:] = source[at : at + view.nbytes]
            at += view.nbytes
    if at != source.nbytes:
        raise LeaseLostError("the space reserved for an object is gone")


def bytes_of(data: Any) -> memoryview:
    """The memory of a buffer or of a host tensor, as bytes, without a copy.

    The view of a tensor keeps the tensor alive.
    """
    storage = getattr(data, "untyped_storage", None)
    if storage is None:
        return _buffer_of(data)
    if data.device.type != "cpu":
        raise TypeError(f"the tensor is on {data.device}; copy it to host memory first (.cpu())")
    _check_plain(data)
    size = data.numel() * data.element_size()
    if not size:
        return memoryview(b"")
    memory = (ctypes.c_uint8 * size).from_address(data.data_ptr())
    memory._owner = data  # from_address owns nothing
    return memoryview(memory).cast("B")


def _buffer_of(data: Any) -> memoryview:
    try:
        view = memoryview(data)
    except TypeError:
        raise TypeError(
            f"bytes, a buffer or a torch tensor is needed, not {type(data).__name__}"
        ) from None
    if not view.c_contiguous:
        raise TypeError("the buffer is not contiguous; copy it first (numpy.ascontiguousarray)")
    return view.cast("B") if view.nbytes else memoryview(b"")
