"""Four Over Six on a CPU, choice and codes in one reading: `four_over_six.cpp`. docs/nvfp4.md, section 7.5.

The reference compares errors in stages, which read the tensor six times. The same arithmetic in C++ gives the
same bytes from one reading. It is built by the compiler that torch.compile uses; without one the reference
runs.
"""

import ctypes
import functools
from collections.abc import Callable
from importlib import resources
from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.quant.cpu.compiled import Runner, native
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference.scale_search import normalizer
from fourbits.quant.reference.scales import level_of, target_and_kappa

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


class StoredBlocks(NamedTuple):
    """Fields of a QuantizedTensor, rows first and the contraction axis last."""

    #: uint8 [R, C / 2]
    codes: Tensor
    #: fp32 [R / rows of a block, C / 16]
    block_scale: Tensor
    #: fp32 scalar
    global_scale: Tensor


def takes(x: Tensor, spec: OperandSpec, axis: int) -> bool:
    """Whether `chosen_codes` can quantize x, which is padded and transformed already.

    Not while torch.compile traces a caller: it cannot follow into C++.
    """
    if torch.compiler.is_compiling():
        return False
    if not spec.scale_rule.startswith("4over6") or spec.format != "nvfp4" or spec.block_size not in _BLOCKS:
        return False
    if spec.rounding != "rne" or spec.scale_rounding != "rne":
        return False
    lines, elements = x.shape[1 - axis], x.shape[axis]
    whole = x.numel() > 0 and lines % 16 == 0 and elements % 16 == 0
    return x.device.type == "cpu" and x.dtype == torch.bfloat16 and x.stride(1) == 1 and whole


def chosen_codes(
    x: Tensor, spec: OperandSpec, axis: int, amax: Tensor | None, run: Runner
) -> StoredBlocks | None:
    """Codes and scales of an x that `takes` accepts.

    amax: fp32 scalar, None for the tensor's own; run: what runs the search for that. None where the reference
    has to do it: no compiler, or a NaN or Inf in x or amax.
    """
    lines, elements = x.shape[1 - axis], x.shape[axis]
    words = torch.empty(lines, elements // 16, dtype=torch.int64)
    scales = _chosen(x, spec, axis, amax, run, words, None)
    codes = words.view(torch.uint8).view(lines, elements // 2)
    return None if scales is None else StoredBlocks(codes, *scales)


def chosen_values(
    x: Tensor, spec: OperandSpec, axis: int, amax: Tensor | None, run: Runner
) -> tuple[Tensor, Tensor] | None:
    """Elements times block scales, BF16 in the shape of x, and the global scale; else as `chosen_codes`."""
    values = torch.empty(x.shape, dtype=torch.bfloat16)
    scales = _chosen(x, spec, axis, amax, run, None, values)
    return None if scales is None else (values, scales[1])


def _chosen(
    x: Tensor,
    spec: OperandSpec,
    axis: int,
    amax: Tensor | None,
    run: Runner,
    words: Tensor | None,
    values: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """Block scales and the global scale; fills words or values."""
    largest: Tensor = run(_largest)(x) if amax is None else amax
    function = _function()
    if function is None or not torch.isfinite(largest):
        return None
    level, global_scale = level_of(largest.reshape(1, 1), largest, spec.for_scales(), axis)
    shift = normalizer(level.amax)
    factor, target = level.amax * shift, target_and_kappa(spec)[0]
    if spec.fp32_scale == "pow2":
        factor, target = level.decode * shift, 1.0
    lines, elements = x.shape[1 - axis], x.shape[axis]
    assert spec.block_size is not None
    scales = torch.empty(lines // spec.block_size[0], elements // 16)
    numbers = (float(number) for number in (level.encode, level.decode, shift, factor, target))
    options = axis, spec.block_size[0] == 16, _METRICS[spec.error_metric or ""], spec.te_compat
    outputs = (None if part is None else part.data_ptr() for part in (scales, words, values))
    sizes = lines, elements, x.stride(0)
    if function(x.data_ptr(), *sizes, *options, *numbers, *outputs, torch.get_num_threads()):
        return None
    return scales, global_scale


def _largest(x: Tensor) -> Tensor:
    """Largest magnitude, NaN if there is one."""
    return x.abs().amax().to(torch.float32)


@functools.cache
def _function() -> Callable[..., int] | None:
    source = resources.files("fourbits.quant").joinpath("four_over_six.cpp").read_text(encoding="utf-8")
    return native(source, "four_over_six", _ARGUMENTS)
