"""GEMMs whose sums are those of a tensor core, to the bit: a chain of instructions along the contraction.

An instruction's result is the exact sum of its products and of the running value, rounded toward zero, unless
its alignment truncates a term. Exponents of the operands' rows prove for most outputs that it does not; those
take one FP64 product per instruction. The others take every term apart. docs/nvfp4.md, section 22.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.formats.codes import decode
from fourbits.formats.descriptors import E2M1
from fourbits.gemm.reference.tensor_core import (
    TensorCore,
    fused_sum,
    split,
    tensor_core_dot,
    to_fp32,
    toward_zero,
)

#: outputs whose terms are held at a time, each as fp64
_TERMS_AT_A_TIME = 1 << 22
#: exponents of zeros, below and above all others
_LOWEST, _HIGHEST = -(1 << 12), 1 << 12


class Rows(NamedTuple):
    """An operand of a tensor core: rows along the contraction."""

    #: [R, K] in a dtype of the instruction (E2M1 codes as uint8)
    elements: Tensor
    #: [R, K / block] as the instruction takes them, or None; blocks are whole
    scales: Tensor | None

    def part(self, first: int, length: int) -> "Rows":
        """Elements first..first + length - 1 with their scales, padded with zeros to that length."""
        elements = self.elements[:, first : first + length]
        missing = length - elements.shape[1]
        if missing:
            elements = torch.cat((elements, elements.new_zeros((elements.shape[0], missing))), 1)
        if self.scales is None:
            return Rows(elements, None)
        block = self.elements.shape[1] // self.scales.shape[1]
        scales = self.scales.view(torch.uint8)[:, first // block : -(-(first + length) // block)]
        missing = length // block - scales.shape[1]
        if missing:  # of zero codes, with any scale that is a number
            scales = torch.cat((scales, scales.new_ones((scales.shape[0], missing))), 1)
        return Rows(elements, scales.view(self.scales.dtype))

    def rows(self, chosen: Tensor | slice) -> "Rows":
        """The chosen rows, with their scales."""
        scales = self.scales
        if scales is not None:
            scales = scales.view(torch.uint8)[chosen].view(scales.dtype)
        return Rows(self.elements[chosen], scales)

    def values(self) -> Tensor:
        """Elements times scales, exact: fp64 [R, K]."""
        elements = _decoded(self.elements)
        if self.scales is None:
            return elements
        scales = self.scales.to(torch.float64).abs()
        return elements * scales.repeat_interleave(elements.shape[1] // scales.shape[1], 1)


def chained_sum(a: Rows, b: Rows, core: TensorCore) -> Tensor:
    """The sums of a [M, K] times b [N, K], chains of instructions from zero in order of K: fp32 [M, N]."""
    fits = truncates_nothing(a, b, core)
    total = _exact_steps(a, b, core)
    rows, columns = (torch.nonzero(~fits.all(axis)).flatten() for axis in (1, 0))
    if rows.numel():
        total[rows[:, None], columns] = _all_terms(a.rows(rows), b.rows(columns), core)
    return total


def truncates_nothing(a: Rows, b: Rows, core: TensorCore) -> Tensor:
    """For which outputs it is proven that no instruction truncates a term: bool [M, N].

    Every term is a whole number of 2^(least_a + least_b), the last bits of the rows' values; no exponent is
    above that of the largest term or of the product of the rows' norms, which bounds the running value.
    """
    (top_a, least_a, norm_a), (top_b, least_b, norm_b) = (_extent(rows, core) for rows in (a, b))
    product = norm_a[:, None] * norm_b[None, :]
    bound = torch.where(torch.isfinite(product), torch.frexp(product)[1], _HIGHEST)
    top = (top_a[:, None] + top_b[None, :]).maximum(bound).clamp_min(core.zero_exponent)
    # infinity and NaN have every exponent, and are left to the terms
    return (top - core.fraction_bits <= least_a[:, None] + least_b[None, :]) & (bound < 127) & (bound > -100)


def _extent(rows: Rows, core: TensorCore) -> tuple[Tensor, Tensor, Tensor]:
    """Per row: the largest exponent of a term's factor, the exponent of the last bit, and the norm."""
    values = rows.values()
    zero = values == 0
    field = (values.view(torch.int64) >> 52) & 0x7FF
    last = last_bits(values)
    if core.group > 1 and rows.scales is not None:  # a group's exponent is that of its scales
        blocks = rows.scales.shape[1]
        exponent = split(rows.scales.to(torch.float64).abs(), rows.scales.dtype)[1]
        exponent = torch.where(zero.unflatten(1, (blocks, -1)).all(2), _LOWEST, exponent)
    else:
        exponent = torch.where(zero, _LOWEST, field - 1023)
    norm = torch.linalg.vector_norm(values, dim=1) * (1 + 2.0**-40)
    norm = torch.where(torch.isfinite(values).all(1), norm, torch.inf)
    return exponent.amax(1), torch.where(zero, _HIGHEST, last).amin(1), norm


def last_bits(values: Tensor) -> Tensor:
    """Exponents of the last bits of fp64 numbers that are not subnormal, int64; of 0 without meaning."""
    field = (values.view(torch.int64) >> 52) & 0x7FF
    significand = (values.view(torch.int64) & ((1 << 52) - 1)) | (1 << 52)
    return field - 1023 - 52 + torch.frexp((significand & -significand).to(torch.float64))[1] - 1


def _exact_steps(a: Rows, b: Rows, core: TensorCore) -> Tensor:
    """The chain where nothing is truncated: exact sums of one instruction, rounded toward zero."""
    left, right = a.values(), b.values().t()
    total = torch.zeros((left.shape[0], right.shape[1]), dtype=torch.float64, device=left.device)
    for first in range(0, left.shape[1], core.products):
        last = first + core.products
        total = toward_zero(torch.addmm(total, left[:, first:last], right[first:last]), core.result_bits)
    return to_fp32(total)


def _all_terms(a: Rows, b: Rows, core: TensorCore) -> Tensor:
    """The chain with every term aligned and truncated."""
    columns, terms = b.elements.shape[0], core.products // core.group + 1
    height = max(1, _TERMS_AT_A_TIME // max(1, columns * terms))
    parts = [
        _chain(a.rows(slice(first, first + height)), b, core)
        for first in range(0, a.elements.shape[0], height)
    ]
    return torch.cat(parts)


def _chain(a: Rows, b: Rows, core: TensorCore) -> Tensor:
    shape = a.elements.shape[0], b.elements.shape[0]
    total = torch.zeros(shape, dtype=torch.float32, device=a.elements.device)
    for first in range(0, a.elements.shape[1], core.products):
        left, right = a.part(first, core.products), b.part(first, core.products)
        if core.group > 1:
            total = _grouped_step(left, right, total, core)
        else:
            scale_a = None if left.scales is None else left.scales[:, None]
            scale_b = None if right.scales is None else right.scales[None]
            pair = left.elements[:, None], right.elements[None]
            total = tensor_core_dot(*pair, total, core, scale_a, scale_b)
    return total


def _grouped_step(a: Rows, b: Rows, total: Tensor, core: TensorCore) -> Tensor:
    """`tensor_core_dot` of all rows of a and b, with the exact sums of groups as matrix products."""
    count = core.products // core.group
    left, right = (_decoded(x.elements).unflatten(1, (count, -1)).transpose(0, 1) for x in (a, b))
    sums, largest = left @ right.mT, left.abs() @ right.abs().mT  # [groups, M, N]
    (factor_a, high), (factor_b, low) = (_group_scales(x, count) for x in (a, b))
    factors = factor_a[:, :, None] * factor_b[:, None, :]
    zero = (largest == 0) | (factors == 0)
    exponents = torch.where(zero, core.zero_exponent, high[:, :, None] + low[:, None, :])
    running, exponent = split(total.to(torch.float64), torch.float32)
    exponent = torch.where(running == 0, core.zero_exponent, exponent)
    significands = torch.cat(((sums * factors), running[None]))
    exponents = torch.cat((exponents, exponent[None]))
    return fused_sum(significands.movedim(0, -1), exponents.movedim(0, -1), core)


def _group_scales(rows: Rows, count: int) -> tuple[Tensor, Tensor]:
    """Significands and exponents of the scales of groups, [groups, R]."""
    assert rows.scales is not None
    parts = split(rows.scales.to(torch.float64).abs(), rows.scales.dtype)
    repeats = count // rows.scales.shape[1]
    significand, exponent = (x.repeat_interleave(repeats, 1).t() for x in parts)
    return significand, exponent


def _decoded(elements: Tensor) -> Tensor:
    return (decode(elements, E2M1) if elements.dtype == torch.uint8 else elements).to(torch.float64)
