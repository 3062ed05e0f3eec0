"""Launches a Triton kernel repeatedly, each time at the cost of a function call.

`kernel[grid](...)` inspects every argument of every launch to find the compiled kernel, which takes longer
than many of our kernels run. A Launcher fixes all arguments but addresses: its first call goes through
Triton, which compiles, and later calls pass addresses to the compiled kernel's C function.
"""
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportPrivateUsage=false

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from fourbits.compile_notice import compiling

_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)
#: launch hooks of profilers: while one is set, every launch goes through Triton, which calls them
_HOOKS = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
#: number of tensor maps that a launcher caches by address; allocators reuse addresses
_MAPS_KEPT = 1024


class Box(NamedTuple):
    """How TMA reads a tensor: its extents and strides, and the box of elements that one copy moves."""

    shape: tuple[int, int]
    strides: tuple[int, int]
    box: tuple[int, int]

    def descriptor(self, base: Tensor) -> TensorDescriptor:
        """The TMA descriptor of a tensor with this layout."""
        return TensorDescriptor(base, list(self.shape), list(self.strides), list(self.box))


class _Compiled(NamedTuple):
    """A compiled kernel, ready to be launched."""

    launch: Callable[..., None]
    #: the arguments between the stream and the kernel's own
    head: tuple[Any, ...]
    #: for each descriptor, a function that makes the tensor map of an address
    map_makers: tuple[Callable[[int], Any], ...]


class Launcher:
    """A kernel with its grid and constants.

    Integers must be equal in all calls, unless the kernel does not specialize on them; tensors may differ in
    their addresses only. A pair (tensor, n) stands for the tensor from its n-th element on.
    """

    __slots__ = (
        *("_boxes", "_compiled", "_constants", "_device", "_grid", "_kernel", "_maps", "_tail", "_tensors"),
    )

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        device: torch.device,
        boxes: tuple[Box, ...] = (),
        **constants: Any,
    ) -> None:
        """boxes: of the kernel's first arguments, which are tensor descriptors; constants: its constexpr
        arguments, which are its last, and the compiler's options.
        """
        self._kernel, self._grid, self._constants = kernel, (*grid, 1, 1)[:3], constants
        self._device = device.index if device.type == "cuda" else None
        self._boxes = boxes
        defaults = inspect.signature(kernel.fn).parameters
        #: the kernel's constants, which its C function skips
        self._tail = tuple(
            constants.get(name, defaults[name].default)
            for name in kernel.arg_names
            if name in constants or defaults[name].default is not inspect.Parameter.empty
        )
        #: positions of tensors among the arguments, known after the first call
        self._tensors: tuple[int, ...] = ()
        #: compiled kernels by which tensors are aligned to 16 bytes, which determines vector widths; None if
        #: all are
        self._compiled: dict[tuple[bool, ...] | None, _Compiled | None] = {}
        self._maps: tuple[dict[int, Any], ...] = tuple({} for _ in boxes)

    def __call__(self, *arguments: Any) -> None:
        """Launch on the current stream. arguments: the kernel's, up to its constants."""
        device = self._device
        if device is None:  # the interpreter
            self._start(arguments)
            return
        if _current_device() != device:
            with torch.cuda.device(device):
                self(*arguments)
            return
        values, low_bits = list(arguments), 0
        for i in self._tensors:
            argument = arguments[i]
            if type(argument) is tuple:
                address = argument[0].data_ptr() + argument[1] * argument[0].element_size()
            else:
                address = argument.data_ptr()
            values[i] = address
            low_bits |= address
        aligned = None if low_bits & 15 == 0 else tuple([values[i] & 15 == 0 for i in self._tensors])
        compiled = self._compiled.get(aligned)
        if compiled is None or _HOOKS[0].calls or _HOOKS[1].calls:
            self._compile(arguments)
            return
        if self._boxes:
            values = self._with_maps(compiled, values)
        compiled.launch(*self._grid, _raw_stream(device), *compiled.head, *values, *self._tail)

    def _compile(self, arguments: tuple[Any, ...]) -> None:
        """Launch through Triton, and cache the compiled kernel for addresses with this alignment."""
        with compiling(self._kernel.fn.__name__):
            kernel = self._start(arguments)
        self._tensors = tuple(i for i, argument in enumerate(arguments) if type(argument) is not int)
        plain = [value[0].view(-1)[value[1] :] if type(value) is tuple else value for value in arguments]
        aligned = tuple([plain[i].data_ptr() & 15 == 0 for i in self._tensors])
        key = None if all(aligned) else aligned
        if key not in self._compiled:
            self._compiled[key] = _ready(kernel, self._boxes)

    def _with_maps(self, compiled: _Compiled, values: list[Any]) -> list[Any]:
        """The arguments, with addresses replaced by tensor maps, extents and strides."""
        expanded: list[Any] = []
        for i, box in enumerate(self._boxes):
            maps, address = self._maps[i], values[i]
            tensor_map = maps.get(address)
            if tensor_map is None:
                if len(maps) >= _MAPS_KEPT:
                    maps.clear()
                tensor_map = maps[address] = compiled.map_makers[i](address)
            expanded += (tensor_map, *box.shape, *box.strides)
        return expanded + values[len(self._boxes) :]

    def _start(self, arguments: tuple[Any, ...]) -> Any:
        """Launch as Triton does, which compiles if needed; returns the compiled kernel."""
        plain = [value[0].view(-1)[value[1] :] if type(value) is tuple else value for value in arguments]
        for i, box in enumerate(self._boxes):
            plain[i] = box.descriptor(plain[i])
        return self._kernel[self._grid](*plain, **self._constants)


def _ready(kernel: Any, boxes: tuple[Box, ...]) -> _Compiled | None:
    """The compiled kernel's C function and fixed arguments; None if Triton's launcher has another form."""
    launcher = kernel.run
    if (
        type(launcher).__name__ != "CudaLauncher"
        or launcher.global_scratch_size
        or launcher.profile_scratch_size
    ):
        return None
    launch = launcher.launch
    makers: tuple[Callable[[int], Any], ...] = ()
    if boxes:
        metadata = getattr(kernel.metadata, "tensordesc_meta", None)
        inner = {} if launch.__closure__ is None else dict(
            zip(launch.__code__.co_freevars, (cell.cell_contents for cell in launch.__closure__), strict=True)
        )  # fmt: skip
        if not metadata or "launcher" not in inner:
            return None
        launch = inner["launcher"]
        makers = tuple(_map_maker(meta, box) for meta, box in zip(metadata, boxes, strict=True))
    head = (kernel.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)
    return _Compiled(launch, (*head, kernel.packed_metadata, None, None, None), makers)


def _map_maker(meta: dict[str, Any], box: Box) -> Callable[[int], Any]:
    """A function that encodes the tensor map of an address, as Triton's launcher would."""
    utils: Any = driver.active.utils  # pyright: ignore[reportAttributeAccessIssue]
    fill, dtypes = utils.fill_tma_descriptor, nvidia.TMA_DTYPE_DEVICE_TO_HOST
    swizzle, size, dtype = meta["swizzle"], meta["elem_size"], dtypes[meta["elem_type"]]
    block, shape, strides = meta["block_size"], list(box.shape), list(box.strides)
    return lambda address: fill(address, swizzle, size, dtype, block, shape, strides, 0)
