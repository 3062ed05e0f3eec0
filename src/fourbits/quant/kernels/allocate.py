"""Allocates uninitialised outputs of launches without the cost of `torch.empty`'s argument parsing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]

#: the allocator of compiled graphs, on the current device; takes a third of torch.empty's time
_GUARDS: Any = torch._C._dynamo.guards  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
_ON_CURRENT_DEVICE: Any = getattr(_GUARDS, "_empty_strided_cuda", None)
_current_device: Callable[[], int] = getattr(
    torch._C,  # pyright: ignore[reportPrivateUsage]
    "_cuda_getDevice",
    lambda: -1,
)


def allocator(device: torch.device) -> Allocate:
    """A function (shape, strides, dtype) -> uninitialised tensor on a device."""

    def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    def empty_on_gpu(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if _current_device() == index:
            return _ON_CURRENT_DEVICE(shape, strides, dtype)
        return empty(shape, strides, dtype)

    index = device.index
    return empty if device.type != "cuda" or _ON_CURRENT_DEVICE is None else empty_on_gpu
