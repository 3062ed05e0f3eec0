"""The seam to the kernels that write or read codes. Bits are those of `quantize` and `unpacked`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fourbits.quant.kernels.amaxes import amaxes_of
from fourbits.quant.kernels.kernel_config import FP8_FORMATS, fp8_plan, plan
from fourbits.quant.kernels.support import (
    Wanted,
    by_axis,
    checked,
    device_blocker,
    noise_key,
    turns,
    why_not_fused,
    with_unit_stride,
)
from fourbits.quant.tensor import ExactOperand, QuantizedTensor
from fourbits.triton_version import HAS_TRITON

if TYPE_CHECKING or HAS_TRITON:
    from fourbits.quant.kernels import start_exact as fused_triton
    from fourbits.quant.kernels import start_packed as fused_codes_triton

_SCALE_DTYPES = {"e4m3": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu, "ue5m3": torch.uint8}
#: formats whose packed form a kernel reads
_UNPACKED = ("nvfp4", "mxfp4")
_FP8_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8-e5m2": torch.float8_e5m2}


def fused_quantize(x: Tensor, wanted: Sequence[Wanted]) -> tuple[QuantizedTensor, ...]:
    """Codes and scales of x, as `quantize` gives them, in the order of `wanted`. Arguments as there."""
    x = checked(x, wanted)
    if wanted[0].spec.format in FP8_FORMATS:
        return fp8_codes(x, wanted)
    made: list[QuantizedTensor] = []
    for want in wanted:
        codes, scale, global_scale = _packed_of(x, want, swizzled=False)
        scale = scale.view(_SCALE_DTYPES[want.spec.block_format.scale or ""])
        shape = (x.shape[0], x.shape[1])
        made.append(QuantizedTensor(codes, scale, global_scale, want.axis, shape, want.spec))
    return tuple(made)


def fused_swizzled(x: Tensor, want: Wanted) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, block scales as flat bytes in the layout of `swizzle_scales`, global scale), for Blackwell."""
    x = checked(x, [want])
    if want.spec.format in FP8_FORMATS:
        raise ValueError(f"fused_swizzled: {want.spec.format} has no swizzled scales. Use fused_quantize.")
    return _packed_of(x, want, swizzled=True)


def why_not_kept_packed(x: Tensor, row: Wanted, column: Wanted) -> str | None:
    """Why one read of x makes not both, `row` exact and `column` packed, or None."""
    if column.spec.format not in _UNPACKED:
        return f"packed {column.spec.format} has no kernel (there are {', '.join(_UNPACKED)})"
    size = column.spec.block_size
    if size is None or size[0] != 1:
        return f"an operand that is kept packed has blocks of 1xN, got {size}"
    return why_not_fused(x, (row, column))


def fused_kept_packed(x: Tensor, row: Wanted, column: Wanted) -> tuple[ExactOperand, QuantizedTensor]:
    """`row` as `fused_operands` makes it, `column` with the bytes of `fused_quantize`, from one read.

    The packed operand is written and read in x's layout: its codes and scales are transposed views. Raises
    ValueError with the reason where no kernel does it.
    """
    if reason := why_not_kept_packed(x, row, column):
        raise ValueError(f"fused quantization: {reason}. Use the reference backend.")
    x = with_unit_stride(x)
    plans = plan(row.spec, 1), plan(column.spec, 0, packed=True)
    keys = noise_key(row), noise_key(column)
    amaxes = amaxes_of(x, (row, column), plans, keys[1])
    values, turned, scales, _ = fused_triton.exact(x, *plans, amaxes, keys, packed_column=True)
    assert values is not None
    assert isinstance(turned, fused_triton.TurnedCodes)
    scale = turned.scales.t().view(_SCALE_DTYPES[column.spec.block_format.scale or ""])
    shape = (x.shape[0], x.shape[1])
    packed = QuantizedTensor(turned.codes.t(), scale, scales[1], 0, shape, column.spec)
    return ExactOperand(values, scales[0], 1, row.spec), packed


def why_not_unpacked(q: QuantizedTensor) -> str | None:
    """Why no kernel makes the exact form of a packed operand, or None."""
    if reason := device_blocker(q.codes.device):
        return reason
    if q.spec.format not in _UNPACKED or q.global_scale.dim():
        return f"packed {q.spec.format} has no kernel (there are {', '.join(_UNPACKED)})"
    return None


def fused_unpacked(q: QuantizedTensor) -> ExactOperand:
    """What `unpacked` gives. Raises ValueError with the reason where no kernel does."""
    if reason := why_not_unpacked(q):
        raise ValueError(f"unpacking: {reason}. Use the reference, unpacked(q).")
    size = q.spec.block_size
    assert size is not None
    power_of_two = q.spec.block_format.scale == "e8m0"
    if q.axis == 0 and not q.codes.is_contiguous():  # from `fused_kept_packed`
        turned = q.codes.t(), q.block_scale.view(torch.uint8).t()
        values = fused_codes_triton.unpacked_turned(*turned, size[1], power_of_two)
        return ExactOperand(values, q.global_scale, 0, q.spec)
    values = fused_codes_triton.unpacked(q.codes, q.block_scale.contiguous(), size, power_of_two)
    return ExactOperand(values, q.global_scale, 1, q.spec)


def _packed_of(x: Tensor, want: Wanted, swizzled: bool) -> tuple[Tensor, Tensor, Tensor]:
    if turns(want):  # what is stored has no layout of x
        return _packed(x.t().contiguous(), want._replace(axis=0), swizzled)
    return _packed(x, want, swizzled)


def _packed(x: Tensor, want: Wanted, swizzled: bool) -> tuple[Tensor, Tensor, Tensor]:
    made, key = plan(want.spec, want.axis, packed=True), noise_key(want)
    row = want.axis == 1
    amaxes = amaxes_of(
        x, (want, None) if row else (None, want), (made, None) if row else (None, made), None if row else key
    )
    return fused_codes_triton.packed(x, made, amaxes[1 - want.axis], key, swizzled)


def fp8_codes(x: Tensor, wanted: Sequence[Wanted]) -> tuple[QuantizedTensor, ...]:
    """`fused_quantize` for FP8 formats; x as by `checked`."""
    row, column = (None if want is None else fp8_plan(want.spec) for want in by_axis(wanted))
    row_codes, row_scales, column_codes, column_scales = fused_codes_triton.fp8(x, row, column)
    one = torch.ones((), dtype=torch.float32, device=x.device)
    shape = (x.shape[0], x.shape[1])
    return tuple(
        QuantizedTensor(
            row_codes if want.axis == 1 else column_codes,
            row_scales if want.axis == 1 else column_scales,
            one,
            want.axis,
            shape,
            want.spec,
        )
        for want in wanted
    )


def fp8_operand(q: QuantizedTensor) -> ExactOperand:
    """The same numbers in the tensor's layout: views, nothing moves."""
    values = q.codes.view(_FP8_DTYPES[q.spec.format])
    if q.axis == 1:
        return ExactOperand(values, q.block_scale, 1, q.spec)
    return ExactOperand(values.t(), q.block_scale.t(), 0, q.spec)
