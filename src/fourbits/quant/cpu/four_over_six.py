"""Four Over Six on a CPU, choice and codes in a single pass: `four_over_six.cpp`. docs/nvfp4.md, section 7.5.

The compiled stages read the tensor six times to compare errors. The same arithmetic in C++ gives the same
bytes in one pass. The compiler that torch.compile uses builds it; without one the stages run.
"""

import ctypes
import functools
from collections.abc import Callable
from importlib import resources
from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.quant.cpu.compiled import compiled, native
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference.scale_search import normalizer
from fourbits.quant.reference.scales import level_of, target_and_kappa
from fourbits.quant.scale_rules import FOUR_OVER_SIX

_ARGUMENTS = (
    ctypes.c_void_p,
    *(ctypes.c_int64,) * 3,
    *(ctypes.c_int,) * 4,
    *(ctypes.c_float,) * 5,
    *(ctypes.c_void_p,) * 3,
    ctypes.c_int,
)
_METRICS = {"mse": 0, "mae": 1, "max": 2}
_BLOCKS = ((1, 16), (16, 16))
#: return value of the function for sizes that it does not support
_INVALID = 2


class StoredBlocks(NamedTuple):
    """Fields of a QuantizedTensor, rows first and the contraction axis last."""

    #: uint8 [R, C / 2]
    codes: Tensor
    #: fp32 [R / rows of a block, C / 16]
    block_scale: Tensor
    #: fp32 scalar
    global_scale: Tensor


def unsupported(y: Tensor, spec: OperandSpec, axis: int) -> str | None:
    """Why the C++ cannot quantize y, which is padded and transformed already; None where it can."""
    if torch.compiler.is_compiling():
        return "torch.compile cannot trace C++"
    if spec.scale_rule not in FOUR_OVER_SIX or spec.format != "nvfp4" or spec.block_size not in _BLOCKS:
        return "it supports 4over6 with nvfp4 blocks of 1x16 and 16x16 only"
    if spec.rounding != "rne" or spec.scale_rounding != "rne":
        return "it rounds to nearest only"
    if y.device.type != "cpu" or y.dtype != torch.bfloat16 or y.stride(1) != 1:
        return "it reads bf16 on a CPU, with unit stride along rows"
    if not y.numel() or y.shape[0] % 16 or y.shape[1] % 16:
        return "both dimensions must be multiples of 16, and not 0"
    return None


def chosen_codes(y: Tensor, spec: OperandSpec, axis: int, amax: Tensor | None) -> StoredBlocks | None:
    """Codes and scales of a y that is not `unsupported`.

    amax: fp32 scalar, None for the tensor's own. None where the stages have to do it: no compiler, or a NaN
    or Inf in y or amax.
    """
    lines, elements = y.shape[1 - axis], y.shape[axis]
    words = torch.empty(lines, elements // 16, dtype=torch.int64, device="cpu")
    scales = _chosen(y, spec, axis, amax, words, None)
    codes = words.view(torch.uint8).view(lines, elements // 2)
    return None if scales is None else StoredBlocks(codes, *scales)


def chosen_values(
    y: Tensor, spec: OperandSpec, axis: int, amax: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Elements times block scales, BF16 in the shape of y, and the global scale; else as `chosen_codes`."""
    values = torch.empty(y.shape, dtype=torch.bfloat16, device="cpu")
    scales = _chosen(y, spec, axis, amax, None, values)
    return None if scales is None else (values, scales[1])


def _chosen(
    y: Tensor, spec: OperandSpec, axis: int, amax: Tensor | None, words: Tensor | None, values: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Block scales and the global scale; fills words or values."""
    amax = compiled(_largest)(y) if amax is None else amax
    function = _function()
    if function is None or not torch.isfinite(amax):
        return None
    level = level_of(amax, spec)
    shift = normalizer(level.amax)
    factor, target = level.amax * shift, target_and_kappa(spec)[0]
    if spec.fp32_scale == "pow2":
        factor, target = level.decode * shift, 1.0
    lines, elements = y.shape[1 - axis], y.shape[axis]
    assert spec.block_size is not None
    scales = torch.empty(lines // spec.block_size[0], elements // 16, dtype=torch.float32, device="cpu")
    numbers = (float(number) for number in (level.encode, level.decode, shift, factor, target))
    options = axis, spec.block_size[0] == 16, _METRICS[spec.error_metric or ""], spec.te_compat
    blocks = lines * elements // 16
    outputs = (
        address(scales, torch.float32, blocks // spec.block_size[0]),
        None if words is None else address(words, torch.int64, blocks),
        None if values is None else address(values, torch.bfloat16, y.numel()),
    )
    sizes = lines, elements, y.stride(0)
    source = address(y, torch.bfloat16, y.numel(), strided=True)
    result = function(source, *sizes, *options, *numbers, *outputs, torch.get_num_threads())
    if result == _INVALID:
        raise ValueError(
            f"four_over_six: does not support {lines} lines of {elements} elements, {y.stride(0)} apart."
        )
    return None if result else (scales, level.decode)


def address(tensor: Tensor, dtype: torch.dtype, elements: int, *, strided: bool = False) -> int:
    """The address of a tensor for C++, which reads or writes this many elements. ValueError if it differs.

    strided: its rows may be apart. C++ sees a number only, and would write past the end of another dtype.
    """
    fits = tensor.dtype == dtype and tensor.device.type == "cpu" and tensor.numel() == elements
    if not fits or not (tensor.is_contiguous() or (strided and tensor.stride(-1) == 1)):
        raise ValueError(
            f"four_over_six: needs {elements} elements of {dtype} on the CPU, got {tensor.numel()} of "
            f"{tensor.dtype} on {tensor.device}, strides "
            f"{tensor.stride()}. Pass a contiguous copy of that dtype."
        )
    return tensor.data_ptr()


def _largest(x: Tensor) -> Tensor:
    """Largest magnitude, NaN if x has one."""
    return x.abs().amax().to(torch.float32)


@functools.cache
def _function() -> Callable[..., int] | None:
    source = resources.files("fourbits.quant.cpu").joinpath("four_over_six.cpp").read_text(encoding="utf-8")
    return native(source, "four_over_six", _ARGUMENTS)
