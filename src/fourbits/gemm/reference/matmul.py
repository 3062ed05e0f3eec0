"""The specification of the GEMM of two quantized operands: error-free sums. docs/nvfp4.md, section 12.

Slow and exact, for tests and for checking the other backends; every backend starts from the same codes and
scales.
"""

import itertools

import torch
from torch import Tensor

from fourbits.formats.codes import decode
from fourbits.formats.descriptors import E4M3, FloatFormat
from fourbits.quant.tensor import QuantizedTensor, decode_scales, spread

#: bits of an element times its E4M3 scale, as a whole number, for which int64 sums up to 2**15 products
_INTEGER_BITS = 24
#: the bias of fp32's exponents, and the largest change of an exponent: by a normal power of two
_BIAS, _MOST_MOVED = 127, 126


def matmul(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """GEMM of the stored rows of a and b: exact sums, rounded once to fp32, then scaled."""
    total, (scale_a, scale_b) = exact_sums(a, b)
    return finish(total, scale_a, scale_b, out_dtype, bias)


def exact_sums(a: QuantizedTensor, b: QuantizedTensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The exact sums rounded once to fp32 [M, N], before the scales of both tensors; and those scales."""
    if _has_integer_products(a) and _has_integer_products(b):
        return _integer_sum(a, b).to(torch.float32), (a.global_scale, b.global_scale)
    if a.spec.block_format.quantized and b.spec.block_format.quantized:
        return _segment_sum(a, b).to(torch.float32), tensor_scales(a, b)
    left, right = (values * scale for values, scale in (_elements_and_scales(a), _elements_and_scales(b)))
    return (left @ right.t()).to(torch.float32), tensor_scales(a, b)


def finish(
    total: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    """The fp32 epilogue: balanced global scales one after the other, bias, rounding."""
    scale_a, scale_b = balanced(scale_a, scale_b)
    scaled = (total * scale_a) * scale_b
    return (scaled if bias is None else scaled + bias.to(torch.float32)).to(out_dtype)


def balanced(scale_a: Tensor, scale_b: Tensor) -> tuple[Tensor, Tensor]:
    """Two fp32 scalars of the same product; a power of two moves between them so that exponents are close.

    It changes no bit of (total * scale_a) * scale_b unless total * scale_a alone is out of the range of fp32;
    total * scale_b may then bring it back.
    """
    fields = ((scale.view(torch.int32) >> 23) & 0xFF for scale in (scale_a, scale_b))
    moved = torch.sub(*fields) >> 1
    moved = moved.clamp(-_MOST_MOVED, _MOST_MOVED)
    down, up = (((_BIAS + sign * moved) << 23).view(torch.float32) for sign in (-1, 1))
    return scale_a * down, scale_b * up


def _has_integer_products(q: QuantizedTensor) -> bool:
    fmt = q.spec.block_format
    if fmt.scale != "e4m3" or not fmt.has_global_scale or q.global_scale.dim():
        return False
    assert fmt.element is not None
    return fmt.element.max_value * E4M3.max_value * 2.0 ** _fraction_bits(fmt.element) < 2.0**_INTEGER_BITS


def _fraction_bits(element: FloatFormat) -> int:
    """e: an element times an E4M3 scale is a whole number of 2**-e."""
    return -(element.step_exponent + E4M3.step_exponent)


def _integer_sum(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
    """Sum of (q_a s_a)(q_b s_b) in int64, which is exact in any order; NaN rows and columns are kept."""
    factors, bits = [], 0
    for q in (a, b):
        assert q.spec.block_format.element is not None
        fraction = _fraction_bits(q.spec.block_format.element)
        factors.append(q.block_values() * 2.0**fraction)
        bits += fraction
    poisoned = torch.isnan(factors[0]).any(1)[:, None] | torch.isnan(factors[1]).any(1)[None, :]
    whole_a, whole_b = (factor.nan_to_num().to(torch.int64) for factor in factors)
    total = _whole_product(whole_a, whole_b.t()).to(torch.float64) * 2.0**-bits
    return torch.where(poisoned, torch.nan, total)


def _whole_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of int64 matrices of up to 24 bits. GPUs multiply only floats: there in halves of 12 bits, whose
    sums FP64 holds up to 2**17 products.
    """
    if a.device.type == "cpu":
        return a @ b
    low = a & 0xFFF
    above, below = (part.to(torch.float64) @ b.to(torch.float64) for part in ((a - low) >> 12, low))
    return (above.to(torch.int64) << 12) + below.to(torch.int64)


def _segment_sum(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
    """fp64 sum over segments of the contraction in which both scales are constant, each segment exact."""
    (codes_a, scale_a), (codes_b, scale_b) = _elements_and_scales(a), _elements_and_scales(b)
    length = codes_a.shape[1]
    total = torch.zeros((codes_a.shape[0], codes_b.shape[0]), dtype=torch.float64, device=codes_a.device)
    for first, last in segments(length, (_block_length(a), _block_length(b))):
        dot = _dot(codes_a[:, first:last], codes_b[:, first:last].t())
        total = total + (dot * scale_a[:, first, None]) * scale_b[None, :, first]
    return total


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of decoded elements, at most 128 products per sum: the exact sum, rounded once to fp64.

    Sums of at most 53 bits are exact in any order. Those of E5M2 have up to 71, so elements below and above 1
    are summed separately; pieces are whole numbers of 2^-4 or fit in 53 bits, until the last addition.
    """
    (above_a, below_a), (above_b, below_b) = ((torch.where(x.abs() < 1, 0.0, x), x) for x in (a, b))
    below_a, below_b = below_a - above_a, below_b - above_b
    large, mixed = above_a @ above_b, above_a @ below_b + below_a @ above_b
    carried = (mixed * 16).floor() / 16
    return (large + carried) + ((mixed - carried) + below_a @ below_b)


def segments(length: int, block_lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    """range(length) split at every multiple of 128 and of the block lengths; 0 means no blocks."""
    ends = {length}
    for size in (128, *block_lengths):
        ends.update(range(0, length, size or length or 1))
    edges = sorted(ends | {0})
    return list(itertools.pairwise(edges))


def _elements_and_scales(q: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Decoded elements, and per element the product of block and outer scale; both fp64 [R, Cp]."""
    fmt = q.spec.block_format
    codes = q.element_codes()
    elements = (codes if fmt.element is None else decode(codes, fmt.element)).double()
    scale = torch.ones_like(elements)
    if q.spec.block_size is not None:
        scale = spread(decode_scales(q.block_scale, fmt).double(), q.spec.block_size, codes.shape)
    if q.global_scale.dim() == 2:
        scale = scale * spread(q.global_scale.double(), q.spec.outer_size, codes.shape)
    return elements, scale


def tensor_scales(a: QuantizedTensor, b: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """The scale of each whole tensor; 1 where it has none, or several."""
    one = torch.ones((), dtype=torch.float32, device=a.codes.device)
    return tuple(q.global_scale if q.global_scale.dim() == 0 else one for q in (a, b))  # type: ignore[return-value]


def _block_length(q: QuantizedTensor) -> int:
    return 0 if q.spec.block_size is None else q.spec.block_size[1]
