"""Kernels as a GPU would launch them, in Triton's interpreter, with every access to memory checked.

Plans are those of a GPU: its tiles, grids and packing. What a kernel reads or writes must be an element of
one of the tensors it was given, and no integer may be divided by zero, which on a GPU gives any number. A GPU
need not report either.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from fourbits.quant import quantize
from fourbits.quant.kernels import amax_pass, launch_dequantize, launch_unpack
from fourbits.quant.kernels.launcher import Launcher
from fourbits.quant.request import Signature, signature_of
from support.gpus import planning_for

GPU = torch.device("cuda", 0)
_BUILDER = interpreter.InterpreterBuilder


class OutOfBoundsError(Exception):
    """A kernel accessed memory that is no element of its tensors."""


class _Elements:
    """The addresses of a tensor's elements."""

    def __init__(self, x: Tensor) -> None:
        self.first, self.item = x.data_ptr(), x.element_size()
        extents = [(size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)]
        self.span = 0 if x.numel() == 0 else sum(extents) + 1
        rows = x.dim() == 2 and x.stride(1) == 1 and x.stride(0) > x.shape[1]
        #: elements from a row to the next and elements of a row, where rows are apart
        self.row = (x.stride(0), x.shape[1]) if rows else (1, 1)

    def hold(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Which accesses of `size` bytes are elements."""
        offset = addresses.astype(np.int64) - self.first
        place = offset // self.item
        inside = (size == self.item) & (offset % self.item == 0) & (place >= 0) & (place < self.span)
        return inside & (place % self.row[0] < self.row[1])


_tensors: list[_Elements] = []


def _check(pointers: Any, mask: np.ndarray, what: str) -> None:
    """Raise OutOfBoundsError unless all unmasked accesses are elements of the launch's tensors."""
    every, on = np.broadcast_arrays(pointers.data, mask.astype(bool))
    addresses = every[on]
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    inside = np.zeros(addresses.shape, bool)
    for tensor in _tensors:
        inside |= tensor.hold(addresses, size)
    if not inside.all():
        raise OutOfBoundsError(f"{int((~inside).sum())} of {inside.size} elements {what} out of bounds")


def _load(load: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        _check(ptrs, mask.data, "read")
        return load(self, ptrs, mask, *rest, **named)

    return checked


def _store(store: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check(ptrs, mask.data, "written")
        return store(self, ptrs, value, mask, *rest)

    return checked


def _atomic(update: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        _check(ptr, mask.data, "updated")
        return update(self, op, ptr, val, mask, *rest)

    return checked


def _divide(divide: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, lhs: Any, rhs: Any) -> Any:
        if not rhs.data.all():
            raise OutOfBoundsError("an integer is divided by zero")
        return divide(self, lhs, rhs)

    return checked


def _arguments(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Note the tensors of a launch."""

    def noted(self: Any, args: Any, kwargs: Any) -> Any:
        found = prepare(self, args, kwargs)
        bases = [a.base if isinstance(a, TensorDescriptor) else a for a in found[0]]
        _tensors[:] = [_Elements(a) for a in bases if isinstance(a, Tensor)]
        return found

    return noted


@contextmanager
def checked_accesses() -> Generator[None]:
    """Every access of kernels to memory is checked."""
    with ExitStack() as stack:
        for owner, name, check in (
            *((_BUILDER, f"create_{name}", _divide) for name in ("idiv", "sdiv", "udiv", "srem", "urem")),
            (_BUILDER, "create_masked_load", _load),
            (_BUILDER, "create_masked_store", _store),
            (_BUILDER, "create_atomic_rmw", _atomic),
            (interpreter.GridExecutor, "_init_args_hst", _arguments),
        ):
            if hasattr(owner, name):
                stack.enter_context(patch.object(owner, name, check(getattr(owner, name))))
        yield


@contextmanager
def as_on_a_gpu() -> Generator[None]:
    """CPU tensors get the plans of a GPU; what they launch runs in the interpreter."""

    def started(start: Callable[..., None]) -> Callable[..., None]:
        def initialise(
            self: Launcher, kernel: Any, grid: Any, device: Any, *rest: Any, **constants: Any
        ) -> None:
            interpreted = {name: False for name in ("HARDWARE", "E2M1X2", "CONVERTS") if name in constants}
            start(self, kernel, grid, torch.device("cpu"), *rest, **(constants | interpreted))

        return initialise

    def on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
        planned = getattr(function, "__wrapped__", function)
        return lambda device, *rest: planned(GPU, *rest)

    def on_cpu(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *sizes, device=None, **options: allocate(*sizes, **options)

    def signature(x: Tensor) -> Signature:
        return signature_of(x)._replace(device=GPU)

    quantize.quantizer.cache_clear()
    with ExitStack() as stack:
        stack.enter_context(planning_for(90))
        for owner, name, value in (
            (Launcher, "__init__", started(Launcher.__init__)),
            (amax_pass, "_WARPS", 32),  # of the other programs, most have no tile, and they take seconds
            (quantize, "signature_of", signature),
            (quantize, "worth_compiling", lambda x: False),
            (launch_dequantize, "dequantizer", on_gpu(launch_dequantize.dequantizer)),
            (launch_dequantize, "transposer", on_gpu(launch_dequantize.transposer)),
            (launch_dequantize, "transposed_launcher", on_gpu(launch_unpack.transposed_launcher)),
            (launch_unpack, "transposed_launcher", on_gpu(launch_unpack.transposed_launcher)),
            (launch_unpack, "launcher", on_gpu(launch_unpack.launcher)),
            *((torch, name, on_cpu(getattr(torch, name))) for name in ("empty", "empty_strided", "ones")),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield
    quantize.quantizer.cache_clear()
