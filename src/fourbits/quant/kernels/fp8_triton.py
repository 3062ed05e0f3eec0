"""FP8 in blocks of 128, both operands from one read: the baseline that 4-bit training is compared with.

FP8 tensor cores want the contraction last, so the operand of axis 0 is written transposed. Block scales are
FP32 and there is no scale of the whole tensor: no amax pass. A thread holds four neighbours in both
directions, so that four codes make a word without leaving it. docs/nvfp4.md, sections 7.3 and 13.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.quant.kernels.rounding_triton import (
    ABS_BITS,
    EXPONENT_BITS,
    bits_of,
    code_of,
    float_of,
    nearest,
    to_bf16,
)
from fourbits.quant.kernels.scaling_triton import encode_scale
from fourbits.quant.kernels.words_triton import rows_apart

SIZE = tl.constexpr(128)
FOURS = tl.constexpr(32)
_CONVERT = tl.constexpr("""{
    .reg .b16 low, high;
    cvt.rn.satfinite.GRIDx2.f32 low, $2, $1;
    cvt.rn.satfinite.GRIDx2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}""")
_E4M3 = tl.constexpr(_CONVERT.value.replace("GRID", "e4m3"))
_E5M2 = tl.constexpr(_CONVERT.value.replace("GRID", "e5m2"))


@triton.jit
def one_code(v, GRID: tl.constexpr):
    """Code of a value, int32; numpy keeps the sign of a NaN, which a code does not."""
    return code_of(nearest(v, GRID), GRID) | tl.where((bits_of(v) < 0) & (v == v), 128, 0)


@triton.jit
def marked(v, poisoned, y, HARDWARE: tl.constexpr):
    """v, but of poisoned blocks a huge magnitude with the sign of y, which saturates. A NaN has no sign."""
    if not HARDWARE:
        v = tl.where(y == y, v, 0.0)  # numpy's NaNs have signs
    keep = tl.where(poisoned, -0x80000000, -1)
    return float_of((bits_of(v) & keep) | tl.where(poisoned, 0x7F000000, 0))


@triton.jit
def fp8_words(v, left, PADDED: tl.constexpr, GRID: tl.constexpr, HARDWARE: tl.constexpr):
    """Four codes to a word, int32. v: fp32 [.., 4].

    left: elements of data from each word's first on, for PADDED: codes of padding are 0.
    """
    D: tl.constexpr = v.shape[0]
    A: tl.constexpr = v.shape[1]
    even, odd = tl.split(tl.reshape(v, (D, A, 2, 2)))
    v0, v2 = tl.split(even)
    v1, v3 = tl.split(odd)
    if HARDWARE:
        words = tl.inline_asm_elementwise(
            _E4M3 if GRID.mantissa_bits == 3 else _E5M2, "=r,f,f,f,f", [v0, v1, v2, v3], dtype=tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        words = one_code(v0, GRID) | (one_code(v1, GRID) << 8)
        words |= (one_code(v2, GRID) << 16) | (one_code(v3, GRID) << 24)
    if PADDED:
        bits = 8 * tl.minimum(tl.maximum(left, 0), 4)
        words &= ((tl.full((), 1, tl.int64) << bits.to(tl.int64)) - 1).to(tl.int32)
    return words


@triton.jit
def block_scale(encode, poisoned):
    """What is stored of a block's scale, fp32."""
    scale = tl.div_rn(tl.full(encode.shape, 1.0, tl.float32), encode)
    return tl.where(poisoned, float_of(tl.full(encode.shape, 0x7FC00000, tl.int32)), scale)


@triton.jit
def write_row(y, row, column, codes_ptr, width, scale_ptr, scale_row, scale_block, M, K, SQUARE: tl.constexpr,
              PADDED: tl.constexpr, GRID: tl.constexpr, HARDWARE: tl.constexpr):  # fmt: skip
    """Codes [M, width] and scales of a tile's rows. y: fp32 [groups of 4 rows, SIZE columns, 4 rows]."""
    amax = tl.max(bits_of(y) & ABS_BITS, axis=1)  # [FOURS, 4]
    if SQUARE:
        amax = tl.max(tl.max(amax, axis=1), axis=0) + tl.zeros_like(amax)
    encode = encode_scale(amax, GRID.largest)
    poisoned = amax >= EXPONENT_BITS
    v = marked(y * encode[:, None, :], poisoned[:, None, :], y, HARDWARE)
    v = tl.permute(tl.reshape(v, (FOURS, FOURS, 4, 4)), (0, 1, 3, 2))  # the last: neighbouring columns
    left = K - column - 4 * (tl.arange(0, SIZE) // 4)[None, :]
    words = fp8_words(tl.reshape(v, (FOURS, SIZE, 4)), left, PADDED, GRID, HARDWARE)
    words = tl.permute(tl.reshape(words, (FOURS, FOURS, 4)), (0, 2, 1))
    r = row + tl.arange(0, SIZE)[:, None]
    c = column // 4 + tl.arange(0, FOURS)[None, :]
    out = codes_ptr + r.to(tl.int64) * width + c
    tl.store(out, tl.reshape(words, (SIZE, FOURS)), mask=(r < M) & (c < width))
    scale = tl.reshape(block_scale(encode, poisoned), (SIZE,))
    down = row + tl.arange(0, SIZE)
    inside = down < M
    if SQUARE:
        down, inside = row // SIZE + tl.zeros_like(down), down == row
    tl.store(scale_ptr + down * scale_row + (column // SIZE) * scale_block, scale, mask=inside)


@triton.jit
def write_column(y, row, column, codes_ptr, width, scale_ptr, scale_row, scale_block, M, K,
                 SQUARE: tl.constexpr, PADDED: tl.constexpr, GRID: tl.constexpr,
                 HARDWARE: tl.constexpr):  # fmt: skip
    """Codes [K, width] and scales of a tile's columns, as `write_row`."""
    amax = tl.max(tl.max(bits_of(y) & ABS_BITS, axis=2), axis=0)  # [SIZE]
    if SQUARE:
        amax = tl.max(amax, axis=0) + tl.zeros_like(amax)
    encode = encode_scale(amax, GRID.largest)
    poisoned = amax >= EXPONENT_BITS
    left = M - row - 4 * tl.arange(0, FOURS)[:, None]
    v = marked(y * encode[None, :, None], poisoned[None, :, None], y, HARDWARE)
    words = fp8_words(v, left, PADDED, GRID, HARDWARE)
    r = column + tl.arange(0, SIZE)[:, None]
    c = row // 4 + tl.arange(0, FOURS)[None, :]
    tl.store(codes_ptr + r.to(tl.int64) * width + c, tl.trans(words), mask=(r < K) & (c < width))
    down = column + tl.arange(0, SIZE)
    inside = down < K
    if SQUARE:
        down, inside = column // SIZE + tl.zeros_like(down), down == column
    out = scale_ptr + down * scale_row + (row // SIZE) * scale_block
    tl.store(out, block_scale(encode, poisoned), mask=inside)


@triton.jit
def fp8_kernel(
    x_ptr, x_stride, M, K, row_ptr, row_width, row_scale_ptr, row_scale_row, row_scale_block,
    column_ptr, column_width, column_scale_ptr, column_scale_row, column_scale_block,
    ROW: tl.constexpr, ROW_PADDED: tl.constexpr, COLUMN: tl.constexpr, COLUMN_PADDED: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Codes and scales of x [M, K] by the Fp8Plans ROW and COLUMN, either of which may be None.

    Row operand: codes [M, row_width] in words of four, int32, scales [M or blocks, ..] with strides
    (scale_row, scale_block); column operand: [K, column_width] and [K or blocks, ..]. PADDED: the contraction
    is no multiple of 16. One program per 128 x 128 tile.
    """
    row = tl.program_id(0) // tl.cdiv(K, SIZE) * SIZE
    column = tl.program_id(0) % tl.cdiv(K, SIZE) * SIZE
    x = rows_apart(x_ptr, x_stride, row, column, M, K, 1, 4, FOURS, SIZE, HARDWARE)
    if ROW is not None:
        GRID: tl.constexpr = ROW.element
        y = to_bf16(x, HARDWARE) if ROW.through_bf16 else x
        write_row(y, row, column, row_ptr, row_width, row_scale_ptr, row_scale_row, row_scale_block, M, K,
                  ROW.square, ROW_PADDED, GRID, HARDWARE)  # fmt: skip
    if COLUMN is not None:
        GRID_2: tl.constexpr = COLUMN.element
        y = to_bf16(x, HARDWARE) if COLUMN.through_bf16 else x
        write_column(y, row, column, column_ptr, column_width, column_scale_ptr, column_scale_row,
                     column_scale_block, M, K, COLUMN.square, COLUMN_PADDED, GRID_2, HARDWARE)  # fmt: skip
