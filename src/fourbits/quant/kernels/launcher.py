"""Launch a Triton kernel again and again at the cost of a function call.

`kernel[grid](...)` inspects every argument of every launch to find the compiled kernel, which takes longer
than many of our kernels run. A Launcher belongs to a plan in which all of that is fixed: its first call
compiles as usual, and later calls hand pointers to the compiled kernel directly.
"""
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportPrivateUsage=false

from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from fourbits.triton_version import installed_triton

#: Triton 3.6 takes any object with a descriptor's fields at a launch; later versions want the class itself
_LIGHT_DESCRIPTORS = (installed_triton() or "").startswith("3.6.")


class Box:
    """A tensor as TMA reads it: a descriptor whose checks ran when the plan was made."""

    __slots__ = ("base", "block_shape", "padding", "shape", "strides")

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int]) -> None:
        self.base = base
        self.shape = shape
        self.strides = strides
        self.block_shape = block_shape
        self.padding = "zero"

    def descriptor(self) -> TensorDescriptor:
        """The same as Triton's class, which checks it."""
        return TensorDescriptor(self.base, self.shape, self.strides, self.block_shape)


class Launcher:
    """A kernel with its grid and constants. All integers must be equal in all calls, except unspecialized
    ones; tensors may differ in their addresses only.
    """

    __slots__ = ("_compiled", "_constants", "_device", "_grid", "_kernel", "_tail")

    def __init__(self, kernel: Any, grid: tuple[int, ...], device: torch.device, **constants: Any) -> None:
        """constants: the kernel's constexpr arguments, which are its last, and the compiler's options."""
        self._kernel, self._grid, self._constants = kernel, (*grid, 1, 1)[:3], constants
        self._device = device.index if device.type == "cuda" else None
        self._tail = tuple(constants[name] for name in kernel.arg_names if name in constants)
        #: compiled kernels by which pointers lie on 16 bytes, from which the compiler takes vector widths
        self._compiled: dict[int, Any] = {}

    def __call__(self, *arguments: Any) -> None:
        """Launch on the current stream. arguments: the kernel's, up to its constants; Box for descriptors."""
        device = self._device
        if device is None:  # the interpreter
            self._start(arguments)
            return
        if torch._C._cuda_getDevice() != device:  # pyright: ignore[reportAttributeAccessIssue]
            with torch.cuda.device(device):
                self(*arguments)
            return
        values: list[Any] = []
        aligned = 0
        for argument in arguments:
            kind = type(argument)
            if kind is int or kind is Box:
                values.append(argument)
                continue
            pointer = argument.data_ptr()
            aligned = aligned * 2 + (pointer & 15 == 0)
            values.append(pointer)
        compiled = self._compiled.get(aligned)
        if compiled is None or knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
            self._compiled[aligned] = self._start(arguments)
            return
        if not _LIGHT_DESCRIPTORS:
            values = [value.descriptor() if type(value) is Box else value for value in values]
        stream = torch._C._cuda_getCurrentRawStream(device)  # pyright: ignore[reportAttributeAccessIssue]
        x, y, z = self._grid
        compiled.run(
            *(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None),
            *values,
            *self._tail,
        )

    def _start(self, arguments: tuple[Any, ...]) -> Any:
        """Launch as Triton does, which compiles where needed; the compiled kernel."""
        plain = [value.descriptor() if type(value) is Box else value for value in arguments]
        return self._kernel[self._grid](*plain, **self._constants)
