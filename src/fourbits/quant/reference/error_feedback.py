"""Error feedback: what rounding a block loses is made up for in the later blocks of its span.

docs/nvfp4.md, section 25; `feedback_coefficients.py` computes the coefficients. A row's errors and the
coefficients are small whole numbers, so sums of their products are exact in any order, and all
implementations give equal bytes.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from fourbits.quant.feedback_coefficients import (
    FARTHEST,
    GROUP,
    LARGEST,
    LEAST_EXPONENT,
    UNITS,
    UNITS_BELOW,
    span_within,
)
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference.scales import Scales

_BLOCK = 16

#: quantizes [M, n] with the tensor's amax: values, magnitudes and scales of blocks [M, 1, n / 16, 16]
QuantizeColumns = Callable[[Tensor], tuple[Tensor, Tensor, Scales]]


def blocks_with_feedback(
    y: Tensor, coefficients: Tensor, spec: OperandSpec, quantize_columns: QuantizeColumns
) -> tuple[Tensor, Tensor, Scales]:
    """Values, magnitudes and scales of y's blocks: [M, 1, C / 16, 16], as `quantized_blocks` returns them.

    y: padded source [M, C], blocks along axis 1; coefficients: int8 [K, `span_within`].
    """
    rows, columns = y.shape
    span = span_within(spec.error_feedback, len(coefficients))
    missing = -columns % span
    spans = (columns + missing) // span
    x = pad(y.to(torch.float32), (0, missing)).view(rows, spans, span)
    shares = pad(coefficients.double(), (0, 0, 0, columns + missing - len(coefficients)))
    shares = shares.view(spans, span, span)
    unit, errors = _units(x), torch.zeros_like(x, dtype=torch.float64)
    found: list[tuple[Tensor, Tensor, Scales]] = []
    for first in range(0, span, _BLOCK):
        own, group = slice(first, first + _BLOCK), first // GROUP * GROUP
        block = x[:, :, own]
        for earlier in (slice(0, group), slice(group, first)):
            total = torch.einsum("msi,sij->msj", errors[:, :, earlier], shares[:, earlier, own])
            shift = total.to(torch.float32).double() * (unit / UNITS)  # exact, and may exceed fp32's range
            block = (block.double() + shift).to(torch.float32)
        values, magnitudes, scales = quantize_columns(block.reshape(rows, spans * _BLOCK))
        found.append((values, magnitudes, scales))
        errors[:, :, own] = _errors(values, magnitudes, scales, unit).double()
    return _in_order(found, columns)


def _units(x: Tensor) -> Tensor:
    """The unit of each row's errors in each span, a power of two: fp32 [M, S, 1]. x: fp32 [M, S, span]."""
    bits = x.view(torch.int32) & 0x7FFFFFFF
    exponent = (bits.amax(2, keepdim=True) >> 23).clamp(min=127 + LEAST_EXPONENT)
    return ((exponent - UNITS_BELOW) << 23).view(torch.float32)


def _errors(values: Tensor, magnitudes: Tensor, scales: Scales, unit: Tensor) -> Tensor:
    """What rounding a column of blocks lost, in whole units: fp32 [M, S, 16].

    Nothing in blocks with a scale that is zero, NaN, or too small for the unit; what a scaled value
    exceeds FARTHEST by is not counted.
    """
    scaled = (values * scales.encode[:, None, :, None])[:, 0]
    factor = (scales.block_scale * scales.global_scale)[..., None] / unit
    lost = scaled.abs().clamp(max=FARTHEST) - magnitudes[:, 0]
    errors = (scaled.sign() * lost * factor.clamp(max=LARGEST)).round()
    return torch.where(factor > 0, errors, 0.0)


def _in_order(found: list[tuple[Tensor, Tensor, Scales]], columns: int) -> tuple[Tensor, Tensor, Scales]:
    """The columns of blocks of all spans in the order of the tensor, without those that only pad a span."""
    blocks = columns // _BLOCK
    values, magnitudes = (
        torch.stack(columns_of, 3).flatten(2, 3)[:, :, :blocks]
        for columns_of in ([each[0] for each in found], [each[1] for each in found])
    )
    block_scale, encode = (
        torch.stack([getattr(each[2], name) for each in found], 2).flatten(1, 2)[:, :blocks]
        for name in ("block_scale", "encode")
    )
    return values, magnitudes, Scales(block_scale, found[0][2].global_scale, encode)
