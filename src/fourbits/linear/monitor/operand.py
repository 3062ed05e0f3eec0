"""A sample of one operand: block scales at their limits, zero codes, clipping, error.

A sample is some rows of the operand with their whole contraction axis, quantized with the scale of the whole
tensor, so blocks, scales and (for RNE) codes are those of the GEMM. Samples of operands with random bits draw
other bits of the same distribution.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fourbits.formats.descriptors import ELEMENT_FORMATS
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantize
from fourbits.quant.scale_codes import SCALE_FORMATS
from fourbits.quant.scale_rules import SCALE_RULES
from fourbits.quant.tensor import QuantizedTensor, decode_scales, spread

#: rows of an operand in a sample, in groups that lie apart; a group has whole blocks of all formats
ROWS, GROUPS, _GROUP = 128, 4, 32
#: room for FP32 and BF16 rounding above the range of a block
_ROUNDING = 1.01
#: rows or columns whose amax is taken at a time, which bounds memory
_CHUNK = 1024
#: names of what `sampled` measures of an operand
STATS = ("at_max", "at_zero", "zeros", "clipped", "error", "signal")


class Sample(NamedTuple):
    """A sampled operand. exact, found: fp32 [rows, contraction], before and after quantization, transformed;
    stats: fp32 [6], in the order of STATS: shares, and sums of squares.
    """

    exact: Tensor
    found: Tensor
    stats: Tensor
    #: the element codes, uint8 [rows, contraction]; of an unquantized operand its values
    codes: Tensor


def rows_of_sample(count: int, spec: OperandSpec) -> list[tuple[int, int]]:
    """Ranges of rows of an operand with `count` rows: whole blocks, from all parts of it."""
    size = max(_GROUP, (spec.block_size or (1, 1))[0])
    groups = max(1, min(GROUPS, ROWS // size))
    each = max(size, ROWS // groups // size * size)
    if count <= groups * each:
        return [(0, count)]
    stride = (count - each) / max(groups - 1, 1)
    return [(first := int(i * stride) // size * size, first + each) for i in range(groups)]


def part_of(x: Tensor, ranges: list[tuple[int, int]], axis: int) -> Tensor:
    """The rows (axis 0) or columns (axis 1) of x in these ranges, contiguous."""
    return torch.cat([x.narrow(axis, first, last - first) for first, last in ranges], axis).contiguous()


def rotation_of(spec: OperandSpec, key: Tensor) -> Tensor | None:
    """The matrix of an operand's transform, fp32 [rht, rht], which multiplies rows from the right; None
    without one. It is read off the quantized identity, all of whose elements have the same magnitude.
    """
    if not spec.rht:
        return None
    identity = torch.eye(spec.rht, dtype=torch.float32, device=key.device)
    plain = OperandSpec(block=(1, 16), rht=spec.rht, rht_signs=spec.rht_signs)
    signs = quantize(identity, plain, 1, sr_key=key).dequantize(torch.float32).sign()
    return signs / spec.rht**0.5


def whole_amax(x: Tensor, spec: OperandSpec, axis: int, rotation: Tensor | None) -> Tensor | None:
    """The amax of a whole tensor as an operand contracted over `axis`, fp32 scalar; None if it has none."""
    if not spec.tensor_scaled:
        return None
    if rotation is None:
        return x.abs().amax().to(torch.bfloat16 if spec.source == "bf16" else x.dtype).float()
    rows = x if axis == 1 else x.t()
    found = [_transformed(chunk.float(), rotation).abs().amax() for chunk in rows.split(_CHUNK)]
    return torch.stack(found).amax()


def sampled(
    part: Tensor,
    spec: OperandSpec,
    axis: int,
    amax: Tensor | None,
    key: Tensor,
    rotation: Tensor | None,
    quantized_from: Tensor | None = None,
    coefficients: Tensor | None = None,
) -> Sample:
    """Measure a part of an operand, contracted over `axis`. key: int64 [5], of its random bits; rotation: of
    its transform.

    quantized_from: the values that are quantized, where they are not those of the part itself; coefficients:
    of error feedback.
    """
    fmt = spec.block_format
    if not fmt.quantized:
        exact = part.to(fmt.dtype).float()
        exact = exact.t() if axis == 0 else exact
        return Sample(exact, exact, exact.new_full((len(STATS),), torch.nan), exact)
    values = part if quantized_from is None else quantized_from
    q = quantize(values, spec, axis, amax=amax, sr_key=key, coefficients=coefficients)
    exact = (part.bfloat16() if spec.source == "bf16" else part).float()
    exact, found = (each.t() if axis == 0 else each for each in (exact, q.dequantize(torch.float32)))
    source = None if quantized_from is None else (quantized_from.t() if axis == 0 else quantized_from)
    if rotation is not None:
        exact = _transformed(exact, rotation)
        source = None if source is None else _transformed(source, rotation)
    stats = _stats(q, exact, found, exact if source is None else source)
    return Sample(exact, found, stats, q.element_codes()[:, : q.contraction_size])


def _stats(q: QuantizedTensor, exact: Tensor, found: Tensor, source: Tensor) -> Tensor:
    """The stats, in the order of STATS. source: the values that were quantized, which may clip; errors are
    measured against `exact`.

    Few operations: the host takes longer to start one than a GPU to run it.
    """
    magnitude = exact.abs()
    present = magnitude > 0
    at_max, at_zero, blocks = _scale_stats(q, magnitude)
    zeros = ((found == 0) & present).sum(dtype=torch.float32)
    counts = torch.stack((at_max, at_zero, zeros, _clipped(q, source.abs())))
    elements = present.sum(dtype=torch.float32)
    of = torch.stack((blocks, blocks, elements, elements)).clamp(min=1)
    sums = torch.stack(((found - exact).square().sum(), exact.square().sum()))
    return torch.cat((counts / of, sums))


def _scale_stats(q: QuantizedTensor, magnitude: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How many of the nonzero blocks have the largest scale, how many zero, and how many nonzero blocks there
    are. fp32, NaN where no scale saturates.
    """
    fmt, size = q.spec.block_format, q.spec.block_size
    if size is None or fmt.scale in (None, "fp32", "e8m0"):
        unknown = magnitude.new_full((), torch.nan)
        return unknown, unknown, unknown
    scales = decode_scales(q.block_scale, fmt)
    grid = SCALE_FORMATS.get(fmt.scale)
    largest = fmt.scale_max if grid is None else grid.max_value
    used = _in_blocks(magnitude, size).amax((1, 3)) > 0
    at_max, at_zero = ((each & used).sum(dtype=torch.float32) for each in (scales >= largest, scales == 0))
    return at_max, at_zero, used.sum(dtype=torch.float32)


def _clipped(q: QuantizedTensor, magnitude: Tensor) -> Tensor:
    """How many elements are beyond the range of their block's scale, fp32; not of blocks without scale, and
    NaN where scales are not meant to fit the elements: MS-EDEN clips by design and corrects for it, error
    feedback shifts a block before it takes its maximum, and a search clips where that lowers the error.
    """
    fmt, size, outer = q.spec.block_format, q.spec.block_size, q.spec.outer_size
    assert fmt.element is not None
    clips = q.spec.rounding == "ms-eden" or SCALE_RULES[q.spec.scale_rule].clips
    if clips or q.spec.error_feedback:
        return magnitude.new_full((), torch.nan)
    limit = magnitude.new_full((), fmt.element.max_value * _ROUNDING)
    if size is not None:
        scales = decode_scales(q.block_scale, fmt)
        limit = torch.where(scales > 0, scales + _rounded_off(scales, fmt.scale), torch.inf) * limit
    if outer is not None:
        limit = spread(limit, size, magnitude.shape) * spread(q.global_scale, outer, magnitude.shape)
    else:
        limit = limit * q.global_scale
        if size is not None:
            magnitude, limit = _in_blocks(magnitude, size), limit[:, None, :, None]
    return (magnitude > limit).sum(dtype=torch.float32)


def _rounded_off(scales: Tensor, scale: str | None) -> Tensor:
    """How much rounding to nearest can have taken from scales: half of the last place; nothing for powers of
    two, which are rounded down by rule, and for FP32.
    """
    fmt = ELEMENT_FORMATS.get(scale or "")
    if fmt is None:
        return torch.zeros_like(scales)
    exponent = torch.frexp(scales).exponent - 1
    step = torch.exp2(exponent.clamp(min=fmt.min_exponent).float() - fmt.mantissa_bits)
    return step / 2


def _transformed(exact: Tensor, rotation: Tensor) -> Tensor:
    """The exact values after an operand's transform, padded to its size."""
    size = rotation.shape[0]
    padded = nn.functional.pad(exact, (0, -exact.shape[1] % size))
    return (padded.unflatten(1, (-1, size)) @ rotation).flatten(1)


def _in_blocks(x: Tensor, size: tuple[int, int]) -> Tensor:
    """[R, C] as [blocks down, size, blocks across, size], padded with zeros."""
    if x.shape[0] % size[0] or x.shape[1] % size[1]:
        x = nn.functional.pad(x, (0, -x.shape[1] % size[1], 0, -x.shape[0] % size[0]))
    return x.unflatten(1, (-1, size[1])).unflatten(0, (-1, size[0]))
