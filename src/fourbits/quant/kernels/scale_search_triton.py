"""Four Over Six and scale search inside kernels: the block scale with the least error. docs/nvfp4.md, 7.5.

The errors of candidates are summed in the specified order: along a row of a block from its first element
to its last, and over rows of a square block by halving. So the elements of a row are separated first.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.quant.kernels.rounding_triton import (
    EXPONENT_BITS,
    FLT_MAX,
    bits_of,
    code_of,
    float_of,
    magnitude_of,
    nearest,
)
from fourbits.quant.kernels.scaling_triton import encode_scale


@triton.jit
def by_rows(blocks, AXIS: tl.constexpr):
    """Blocks [D, r, A, c] as rows of 16 along the contraction: [D, A, rows of a block, 16]."""
    if AXIS == 1:
        rows = tl.permute(blocks, (0, 2, 1, 3))
    else:
        rows = tl.permute(blocks, (0, 2, 3, 1))
    return rows


@triton.jit
def joined(total, term, METRIC: tl.constexpr):
    """A row's error after adding one more element."""
    if METRIC == "mse":
        total = total + term * term
    elif METRIC == "mae":
        total = total + tl.abs(term)
    else:
        total = tl.maximum(total, tl.abs(term))
    return total


@triton.jit
def split_last(x, COUNT: tl.constexpr):
    """(elements at even places, at odd places) of the last of two dimensions. x: [rows, COUNT]."""
    return tl.split(tl.reshape(x, (x.shape[0], COUNT // 2, 2)))


@triton.jit
def four_in_order(total, x, METRIC: tl.constexpr):
    """A row's error after adding four more elements, first to last. x: [rows, 4]."""
    even, odd = split_last(x, 4)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    total = joined(joined(total, x0, METRIC), x1, METRIC)
    return joined(joined(total, x2, METRIC), x3, METRIC)


@triton.jit
def row_errors(d, METRIC: tl.constexpr):
    """Error of every row of 16, summed from its first element to its last. d: fp32 [rows, 16] -> [rows]."""
    ROWS: tl.constexpr = d.shape[0]
    halves = tl.permute(tl.reshape(d, (ROWS, 4, 4)), (0, 2, 1))  # [rows, place in four, which four]
    low, high = tl.split(tl.permute(tl.reshape(halves, (ROWS, 4, 2, 2)), (0, 1, 3, 2)))
    first, second = tl.split(low)
    third, fourth = tl.split(high)
    total = tl.zeros((ROWS,), tl.float32)
    total = four_in_order(total, first, METRIC)
    total = four_in_order(total, second, METRIC)
    total = four_in_order(total, third, METRIC)
    return four_in_order(total, fourth, METRIC)


@triton.jit
def halved(x, COUNT: tl.constexpr, TIMES: tl.constexpr, METRIC: tl.constexpr):
    """Sums of COUNT = 2^TIMES numbers by halving: the second half onto the first. -> [n / COUNT]."""
    BLOCKS: tl.constexpr = x.shape[0] // COUNT
    for i in tl.static_range(TIMES):
        pairs = tl.permute(tl.reshape(x, (BLOCKS, 2, COUNT >> (i + 1))), (0, 2, 1))
        first, second = tl.split(pairs)
        both = tl.maximum(first, second) if METRIC == "max" else first + second
        x = tl.reshape(both, (BLOCKS * (COUNT >> (i + 1)),))
    return x


@triton.jit
def reconstructed(element, scale, reach, CONFIG: tl.constexpr):
    """((element * scale) * reach) / target, rounded as written, for magnitudes of elements: fp32.

    E2M1 magnitudes are powers of two, or 1.5 times one, and rounding a product or a quotient commutes with
    powers of two if nothing is subnormal. It is not: scales are 0 or at least 2^-9, and `reach` is 0 or at
    least 2^-23. So two divisions suffice for a block. Other grids take a division per element.
    """
    if CONFIG.element.mantissa_bits == 1:
        target = tl.full(scale.shape, CONFIG.target, tl.float32)
        of_one = tl.div_rn(scale * reach, target)
        of_three_halves = tl.div_rn((1.5 * scale) * reach, target)
        bits = bits_of(element)
        power = float_of(bits & EXPONENT_BITS)
        value = power * tl.where((bits & 0x400000) != 0, of_three_halves, of_one)
    else:
        target = tl.full(element.shape, CONFIG.target, tl.float32)
        value = tl.div_rn((element * scale) * reach, target)
    return value


@triton.jit
def error_of(magnitude, scale, s_dec, reach, shift, CONFIG: tl.constexpr):
    """Error of every block under a candidate scale, fp32 of scale's shape [D, 1, A, 1].

    magnitude: that of the blocks; reach, shift: the tensor's amax scaled near 1, and the power of two used.
    """
    ELEMENT: tl.constexpr = CONFIG.element
    METRIC: tl.constexpr = CONFIG.metric
    divisor = scale * s_dec
    encode = tl.minimum(tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor), FLT_MAX)
    element = nearest(magnitude * encode, ELEMENT)
    d = reconstructed(element, scale, reach, CONFIG) - magnitude * shift
    HEIGHT: tl.constexpr = CONFIG.block_rows if CONFIG.axis == 1 else CONFIG.block_columns
    TIMES: tl.constexpr = 0 if HEIGHT == 1 else 4
    rows = by_rows(d, CONFIG.axis)
    errors = row_errors(tl.reshape(rows, (rows.shape[0] * rows.shape[1] * HEIGHT, 16)), METRIC)
    return tl.reshape(halved(errors, HEIGHT, TIMES, METRIC), scale.shape)


@triton.jit
def four_over_six(magnitude, six, s_dec, reach, shift, CONFIG: tl.constexpr):
    """The unrounded scale of every block, fp32: six, or 1.5 times it if that leaves a smaller error."""
    SCALE: tl.constexpr = CONFIG.scale
    four = six * 1.5
    error_six = error_of(magnitude, nearest(six, SCALE), s_dec, reach, shift, CONFIG)
    error_four = error_of(magnitude, nearest(four, SCALE), s_dec, reach, shift, CONFIG)
    return tl.where(error_four < error_six, four, six)


@triton.jit
def searched(magnitude, ideal, s_dec, reach, shift, CONFIG: tl.constexpr):
    """The scale with the least error, fp32, of the one nearest to ideal, seven codes up and eight down.

    A loop, whose registers and code are those of one candidate. Where no error is finite the first stays, and
    code 0 is visited first or not at all.
    """
    SCALE: tl.constexpr = CONFIG.scale
    first = code_of(nearest(ideal, SCALE), SCALE)
    best = first
    least = tl.full(ideal.shape, float("inf"), tl.float32)
    for i in tl.range(16, disable_licm=True):  # magnitude * shift would stay in registers
        place = tl.where(i < 8, i, 7 - i)
        code = tl.minimum(tl.maximum(first + place, i >> 3), SCALE.max_code)
        error = error_of(magnitude, magnitude_of(code, SCALE), s_dec, reach, shift, CONFIG)
        best = tl.where(error < least, code, best)
        least = tl.minimum(error, least)
    return magnitude_of(best, SCALE)


@triton.jit
def chosen_scale(blocks, amax_bits, tensor_bits, CONFIG: tl.constexpr):
    """The scale of every block by its error, fp32, not yet rounded."""
    s_enc = encode_scale(tensor_bits, CONFIG.target)
    s_dec = tl.div_rn(tl.full((), 1.0, tl.float32), s_enc)
    amax = float_of(amax_bits)
    ideal = tl.div_rn(amax, tl.full(amax.shape, CONFIG.element.max_value, tl.float32)) * s_enc
    if CONFIG.headroom != 1.0:
        ideal = ideal * CONFIG.headroom
    exponent = tl.minimum(tl.maximum(tensor_bits >> 23, 1), 253)
    shift = float_of((254 - exponent) << 23)
    reach = float_of(tensor_bits) * shift
    magnitude = tl.abs(blocks)
    if CONFIG.search:
        scale = searched(magnitude, ideal, s_dec, reach, shift, CONFIG)
    else:
        scale = four_over_six(magnitude, ideal, s_dec, reach, shift, CONFIG)
    return scale
