"""Quantizes one operand to codes and scales, the form that FP4 tensor cores read and that is saved or sent.

The layout is that of docs/nvfp4.md, section 5: rows of the stored matrix are columns of the tensor for an
operand of axis 0, so such a tile is transposed while it is written.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.quant.kernels.packing_triton import code_words, final_words, load_held
from fourbits.quant.kernels.rounding_triton import ABS_BITS, EXPONENT_BITS, bits_of, code_of, with_sign
from fourbits.quant.kernels.scaling_triton import block_amax, blocked
from fourbits.quant.kernels.tile_triton import load_tile, prepared_tile, rounded_tile, tensor_amax, tile_start


@triton.jit
def final_values(
    y, rounded, scaled, scale, inside, CONFIG: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The values to encode, signed fp32 [ROWS, COLUMNS], with poisoned and underflowed blocks and padding.

    inside: where y is data; padding has code 0 even in poisoned blocks, unless a transform has filled it.
    """
    LARGEST: tl.constexpr = CONFIG.element.max_value
    data = blocked(y, CONFIG, ROWS, COLUMNS)
    is_nan = (bits_of(data) & ABS_BITS) > EXPONENT_BITS
    poison = tl.where(is_nan, LARGEST, with_sign(tl.full(data.shape, LARGEST, tl.float32), data))
    values = with_sign(rounded, scaled)
    if not CONFIG.te_compat:
        values = tl.where(scale == 0.0, with_sign(tl.zeros_like(values), data), values)
    values = tl.reshape(tl.where(scale != scale, poison, values), (ROWS, COLUMNS))
    if CONFIG.transform is None:
        values = tl.where(inside, values, 0.0)
    return values


@triton.jit
def tile_words(y, rounded, scaled, scale, row, column, M, K, CONFIG: tl.constexpr, E2M1X2: tl.constexpr,
               PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
               HARDWARE: tl.constexpr):  # fmt: skip
    """Codes of a tile as stored, int32: eight 4-bit codes per word, or one 8-bit code per entry."""
    ELEMENT: tl.constexpr = CONFIG.element
    if ELEMENT.bits == 4:
        CONVERT: tl.constexpr = E2M1X2 and ELEMENT.max_value == 6.0
        if CONVERT and CONFIG.rounding == "rne":
            signed = scaled  # the instruction rounds
        elif CONVERT:
            signed = with_sign(rounded, scaled)
        elif HARDWARE:
            signed = scaled
        else:
            data = blocked(y, CONFIG, ROWS, COLUMNS)
            signed = tl.where(data != data, 0.0, data)  # numpy's NaNs have signs, and its minima are NaN
            rounded = tl.where(scaled != scaled, 0.0, rounded)
        words = code_words(rounded, signed, CONFIG.axis, ELEMENT, CONVERT, ROWS, COLUMNS, HARDWARE)
        EDGE: tl.constexpr = PADDED and CONFIG.transform is None
        words = final_words(words, scale, row, column, M, K, CONFIG, EDGE, ROWS, COLUMNS)
    else:
        inside = (row + tl.arange(0, ROWS)[:, None] < M) & (column + tl.arange(0, COLUMNS)[None, :] < K)
        values = final_values(y, rounded, scaled, scale, inside, CONFIG, ROWS, COLUMNS)
        words = signed_code(values, ELEMENT)
    return words


@triton.jit
def signed_code(values, GRID: tl.constexpr):
    """Codes of values that lie on the grid, int32."""
    return code_of(tl.abs(values), GRID) | tl.where(bits_of(values) < 0, 1 << (GRID.bits - 1), 0)


@triton.jit
def scale_codes(scale, CONFIG: tl.constexpr):
    """Stored bytes of block scales, int32. scale: fp32 on the scale's grid, or NaN."""
    if CONFIG.scale is None:
        code = (bits_of(scale) >> 23) & 255  # the code of 2^-127, which is subnormal, is 0
    else:
        SCALE: tl.constexpr = CONFIG.scale
        code = code_of(scale, SCALE)
    return tl.where(scale != scale, CONFIG.scale_nan, code)


@triton.jit
def store_words(codes_ptr, words, row, column, R, width, CONFIG: tl.constexpr, ROWS: tl.constexpr,
                COLUMNS: tl.constexpr):  # fmt: skip
    """Write a tile of codes, int32 words of 8 (or of 4, or of bytes of 8 bits), to codes_ptr [R, width]."""
    if CONFIG.axis == 1:
        PER: tl.constexpr = COLUMNS // words.shape[1]
        r = row + tl.arange(0, ROWS)[:, None]
        c = column // PER + tl.arange(0, COLUMNS // PER)[None, :]
        values = words
    else:
        PER_: tl.constexpr = ROWS // words.shape[0]
        r = column + tl.arange(0, COLUMNS)[:, None]
        c = row // PER_ + tl.arange(0, ROWS // PER_)[None, :]
        values = tl.trans(words)
    values = values.to(codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + r.to(tl.int64) * width + c, values, mask=(r < R) & (c < width))


@triton.jit
def store_scales(scale_ptr, code, row, column, down, across, CONFIG: tl.constexpr, ROWS: tl.constexpr,
                 COLUMNS: tl.constexpr):  # fmt: skip
    """Write a tile's block scales, int32 [R, 1, C, 1], to the grid of stored blocks [down, across]."""
    ABOVE: tl.constexpr = ROWS // CONFIG.block_rows
    BESIDE: tl.constexpr = COLUMNS // CONFIG.block_columns
    byte = tl.reshape(code, (ABOVE, BESIDE)).to(tl.uint8)
    i = row // CONFIG.block_rows + tl.arange(0, ABOVE)
    j = column // CONFIG.block_columns + tl.arange(0, BESIDE)
    if CONFIG.axis == 1:
        r, c = i[:, None], j[None, :]
    else:
        r, c, byte = j[:, None], i[None, :], tl.trans(byte)
    tl.store(scale_ptr + r * across + c, byte, mask=(r < down) & (c < across))


@triton.jit(do_not_specialize=["stream"])
def packed_kernel(
    x_ptr, x_stride, M, K, codes_ptr, R, width, scale_ptr, down, across, amax_ptr, global_ptr,
    key_ptr, stream,
    CONFIG: tl.constexpr, FIELDS: tl.constexpr, PARTS: tl.constexpr,
    E2M1X2: tl.constexpr, PADDED: tl.constexpr, HELD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Codes [R, width] and scales [down, across] of x [M, K] by CONFIG.

    codes: int32 words of eight 4-bit elements, or uint8. E2M1X2: convert pairs in hardware. PADDED: the
    contraction is not a multiple of 16. HELD: number of neighbours along it that a thread reads, 0 for any.
    """
    row, column = tile_start(K, ROWS, COLUMNS)
    IS_BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    if HELD == 0:
        x = load_tile(x_ptr, x_stride, row, column, M, K, ROWS, COLUMNS, HARDWARE)
    else:
        x = load_held(x_ptr, x_stride, row, column, M, K, CONFIG.axis, HELD, ROWS, COLUMNS, HARDWARE)
    y = prepared_tile(x, IS_BF16, key_ptr, stream, FIELDS, CONFIG, ROWS, COLUMNS, HARDWARE, HELD > 0)
    tensor_bits = tensor_amax(amax_ptr, global_ptr, CONFIG, PARTS)
    amax_bits = block_amax(y, CONFIG, ROWS, COLUMNS, HELD > 0)
    rounded, scaled, scale = rounded_tile(
        y, amax_bits, tensor_bits, row, column, key_ptr, stream, FIELDS, CONFIG, ROWS, COLUMNS
    )
    words = tile_words(
        y, rounded, scaled, scale, row, column, M, K, CONFIG, E2M1X2, PADDED, ROWS, COLUMNS, HARDWARE
    )
    bytes_ = scale_codes(scale, CONFIG)
    store_words(codes_ptr, words, row, column, R, width, CONFIG, ROWS, COLUMNS)
    store_scales(scale_ptr, bytes_, row, column, down, across, CONFIG, ROWS, COLUMNS)
