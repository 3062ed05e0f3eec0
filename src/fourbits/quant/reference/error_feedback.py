"""Error feedback: what rounding a block loses is made up for in the later blocks of its span.

docs/nvfp4.md, section 25; `feedback_coefficients.py` computes the coefficients. Errors and
coefficients are small integers, so their products and sums are exact in any order, and all implementations
give equal bytes.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from fourbits.quant.feedback_coefficients import LARGEST, UNITS, group_within, span_within
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference.scales import Scales

_BLOCK = 16

#: quantizes [M, n] with the tensor's amax: values, magnitudes and scales of blocks [M, 1, n / 16, 16]
QuantizeColumns = Callable[[Tensor], tuple[Tensor, Tensor, Scales]]
#: what S spans lost in some of their columns: whole numbers fp32 [M, S, columns], and the value of their unit
#: times that of a coefficient's, fp32 [M, S, 1]
Lost = tuple[Tensor, Tensor]


def blocks_with_feedback(
    y: Tensor, coefficients: Tensor, spec: OperandSpec, quantize_columns: QuantizeColumns
) -> tuple[Tensor, Tensor, Scales]:
    """Values, magnitudes and scales of y's blocks: [M, 1, C / 16, 16], as `quantized_blocks` returns them.

    y: padded source [M, C], blocks along axis 1; coefficients: int8 [K, `span_within`].
    """
    rows, columns = y.shape
    span = span_within(spec.error_feedback, len(coefficients))
    missing = -columns % span
    spans, group = (columns + missing) // span, group_within(span)
    shifted = pad(y.to(torch.float32), (0, missing)).view(rows, spans, span)
    shares = pad(coefficients.to(torch.float32), (0, 0, 0, columns + missing - len(coefficients)))
    shares = shares.view(spans, span, span)
    found: list[tuple[Tensor, Tensor, Scales]] = []
    groups: list[Lost] = []
    for first in range(0, span, group):
        places = range(first // _BLOCK, min(first + group, span) // _BLOCK)
        lost: list[Lost] = []
        for place in places:
            own = slice(place * _BLOCK, (place + 1) * _BLOCK)
            block = shifted[:, :, own]
            for earlier, (errors, step) in enumerate(groups):
                block = block + _share(errors, shares[:, earlier * group :, own][:, :group]) * step
            for earlier, (errors, step) in zip(places, lost, strict=False):
                block = block + _share(errors, shares[:, earlier * _BLOCK :, own][:, :_BLOCK]) * step
            values, magnitudes, scales = quantize_columns(block.reshape(rows, spans * _BLOCK))
            found.append((values, magnitudes, scales))
            lost.append(_lost(values, magnitudes, scales))
        groups.append(_together(lost))
    return _in_order(found, columns)


def _share(errors: Tensor, shares: Tensor) -> Tensor:
    """The whole numbers that errors [M, S, i] add to columns: [M, S, j]; shares: coefficients [S, i, j]."""
    return torch.einsum("msi,sij->msj", errors, shares)


def _lost(values: Tensor, magnitudes: Tensor, scales: Scales) -> Lost:
    """What rounding a column of blocks lost; nothing in blocks with a scale that is zero or NaN."""
    scaled = values * scales.encode[:, None, :, None]
    errors = ((scaled - torch.copysign(magnitudes, scaled)) * UNITS).round()[:, 0]
    errors = errors.clamp(-LARGEST, LARGEST)
    step = scales.block_scale * scales.global_scale * UNITS**-2
    usable = step > 0
    errors = torch.where(usable[..., None], errors, 0.0)
    return errors, torch.where(usable, step, 0.0)[..., None]


def _together(lost: list[Lost]) -> Lost:
    """What a group of blocks lost, in the largest of its blocks' units: that of a row of each span."""
    steps = torch.stack([step for _, step in lost])
    largest = steps.amax(0)
    shares = torch.where(largest > 0, steps / largest, 0.0)
    errors = [(errors * share).round() for (errors, _), share in zip(lost, shares, strict=True)]
    return torch.cat(errors, -1), largest


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
