"""Quantizes to FP8 in blocks of 128, both operands in a single pass: the baseline for 4-bit training.

FP8 tensor cores need the contraction last, so the operand of axis 0 is written transposed. Block scales are
FP32, and there is no global scale, so no amax pass. A tile is read a few rows at a time for the row operand
and the columns' maxima, and again, from the cache, for the column operand: using few registers leaves room
for many programs. A thread packs four codes to a word. docs/nvfp4.md, sections 7.3 and 13.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.quant.kernels.packing_triton import columns_apart, rows_apart
from fourbits.quant.kernels.rounding_triton import (
    ABS_BITS,
    EXPONENT_BITS,
    bits_of,
    code_of,
    float_of,
    nearest,
    to_bf16,
)
from fourbits.quant.kernels.scaling_triton import encode_scale, halved_columns, larger

SIZE = tl.constexpr(128)
FOURS = tl.constexpr(32)
#: number of neighbouring columns of the row operand that a thread reads
HELD = tl.constexpr(16)
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
    """v; in poisoned blocks, a huge magnitude with the sign of y, which saturates. A NaN has no sign."""
    if not HARDWARE:
        v = tl.where(y == y, v, 0.0)  # numpy's NaNs have signs
    keep = tl.where(poisoned, -0x80000000, -1)
    return float_of((bits_of(v) & keep) | tl.where(poisoned, 0x7F000000, 0))


@triton.jit
def fp8_words(v, left, PADDED: tl.constexpr, GRID: tl.constexpr, CONVERTS: tl.constexpr):
    """Four codes to a word, int32. v: fp32 [.., 4].

    left: number of data elements from each word's first on, used if PADDED: codes of padding are 0. CONVERTS:
    use the conversion instruction of sm_89 and newer, else integers.
    """
    D: tl.constexpr = v.shape[0]
    A: tl.constexpr = v.shape[1]
    even, odd = tl.split(tl.reshape(v, (D, A, 2, 2)))
    v0, v2 = tl.split(even)
    v1, v3 = tl.split(odd)
    if CONVERTS:
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
    """The stored scale of a block, fp32."""
    scale = tl.div_rn(tl.full(encode.shape, 1.0, tl.float32), encode)
    return tl.where(poisoned, float_of(tl.full(encode.shape, 0x7FC00000, tl.int32)), scale)


@triton.jit
def store_scales(scale_ptr, row_stride, block_stride, scale, row, block, R, SQUARE: tl.constexpr):
    """Write the scales of a block's rows from row on, fp32; a square block has one, at its first row."""
    rows = row + tl.arange(0, scale.shape[0])
    inside = rows < R
    if SQUARE:
        inside = (rows % SIZE == 0) & inside
        rows = rows // SIZE
    tl.store(scale_ptr + rows * row_stride + block * block_stride, scale, mask=inside)


@triton.jit
def write_row(y, amax, row, column, codes_ptr, width, scale_ptr, scale_row, scale_block, M, K,
              CONFIG: tl.constexpr, PADDED: tl.constexpr, CONVERTS: tl.constexpr,
              HARDWARE: tl.constexpr):  # fmt: skip
    """Write codes [M, width] and scales of rows. y: fp32 [rows, SIZE / HELD, HELD]; amax: each row's bits."""
    GRID: tl.constexpr = CONFIG.element
    ROWS: tl.constexpr = y.shape[0]
    encode = encode_scale(amax, GRID.max_value)
    poisoned = amax >= EXPONENT_BITS
    v = marked(y * encode[:, None, None], poisoned[:, None, None], y, HARDWARE)
    left = K - column - 4 * tl.arange(0, FOURS)[None, :]
    words = fp8_words(tl.reshape(v, (ROWS, FOURS, 4)), left, PADDED, GRID, CONVERTS)
    r = row + tl.arange(0, ROWS)[:, None]
    c = column // 4 + tl.arange(0, FOURS)[None, :]
    tl.store(codes_ptr + r.to(tl.int64) * width + c, words, mask=(r < M) & (c < width))
    scale = block_scale(encode, poisoned)
    store_scales(scale_ptr, scale_row, scale_block, scale, row, column // SIZE, M, CONFIG.square)


@triton.jit
def write_column(y, encode, poisoned, row, column, codes_ptr, width, M, K, CONFIG: tl.constexpr,
                 PADDED: tl.constexpr, CONVERTS: tl.constexpr, HARDWARE: tl.constexpr):  # fmt: skip
    """Write codes [K, width] of columns. y: fp32 [rows / 4, SIZE, 4]; encode, poisoned: per column."""
    GRID: tl.constexpr = CONFIG.element
    DOWN: tl.constexpr = y.shape[0]
    v = marked(y * encode[None, :, None], poisoned[None, :, None], y, HARDWARE)
    left = M - row - 4 * tl.arange(0, DOWN)[:, None]
    words = fp8_words(v, left, PADDED, GRID, CONVERTS)
    r = column + tl.arange(0, SIZE)[:, None]
    c = row // 4 + tl.arange(0, DOWN)[None, :]
    tl.store(codes_ptr + r.to(tl.int64) * width + c, tl.trans(words), mask=(r < K) & (c < width))


@triton.jit
def through(y, CONFIG: tl.constexpr, HARDWARE: tl.constexpr):
    """The values that the config quantizes: y, or y rounded to bf16."""
    return to_bf16(y, HARDWARE) if CONFIG.through_bf16 else y


@triton.jit
def rows_held(x_ptr, stride, row, column, M, K, ROWS: tl.constexpr, HARDWARE: tl.constexpr):
    """Load rows of a tile, HELD neighbours per thread: fp32 [ROWS, SIZE / HELD, HELD]."""
    WIDE: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    return columns_apart(x_ptr, stride, row, column, M, K, HELD, HELD, WIDE, ROWS, SIZE // HELD, HARDWARE)


@triton.jit
def column_maxima(x_ptr, stride, first, column, M, K, ROWS: tl.constexpr, HARDWARE: tl.constexpr):
    """Largest magnitude of each column of a tile, fp32 [SIZE]; NaN if the column has one."""
    largest = tl.zeros((ROWS // 4, SIZE), tl.float32)
    for i in range(SIZE // ROWS):
        row = first + i * ROWS
        x = rows_apart(x_ptr, stride, row, column, M, K, 1, 4, ROWS // 4, SIZE, HARDWARE)
        even, odd = tl.split(tl.reshape(x, (ROWS // 4, SIZE, 2, 2)))
        low, high = tl.split(larger(even, odd))
        largest = larger(largest, larger(low, high))
    return float_of(tl.max(bits_of(largest) & ABS_BITS, axis=0))


@triton.jit
def fp8_kernel(
    x_ptr, x_stride, M, K, row_ptr, row_width, row_scale_ptr, row_scale_row, row_scale_block,
    column_ptr, column_width, column_scale_ptr, column_scale_row, column_scale_block,
    ROW: tl.constexpr, ROW_PADDED: tl.constexpr, COLUMN: tl.constexpr, COLUMN_PADDED: tl.constexpr,
    ROWS: tl.constexpr, CONVERTS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Codes and scales of x [M, K] by the Fp8Configs ROW and COLUMN, either of which may be None.

    Row operand: codes [M, row_width] in words of four, int32, scales [M or blocks, ..] with strides
    (scale_row, scale_block); column operand: [K, column_width] and [K or blocks, ..]. PADDED: the contraction
    is not a multiple of 16. CONVERTS: the GPU has FP8 conversions. One program per 128 x 128 tile, ROWS of it
    at a time.
    """
    first = tl.program_id(0) // tl.cdiv(K, SIZE) * SIZE
    column = tl.program_id(0) % tl.cdiv(K, SIZE) * SIZE
    SQUARE_ROW: tl.constexpr = ROW is not None and ROW.square
    if COLUMN is not None or SQUARE_ROW:
        of_columns = column_maxima(x_ptr, x_stride, first, column, M, K, ROWS, HARDWARE)
        of_tile = float_of(tl.max(bits_of(of_columns), axis=0))
    if ROW is not None:
        for i in range(SIZE // ROWS):
            row = first + i * ROWS
            y = through(rows_held(x_ptr, x_stride, row, column, M, K, ROWS, HARDWARE), ROW, HARDWARE)
            if SQUARE_ROW:
                amax = bits_of(through(of_tile + tl.zeros((ROWS,), tl.float32), ROW, HARDWARE)) & ABS_BITS
            else:
                in_thread = halved_columns(tl.reshape(y, (ROWS, SIZE)), 4, ROWS, SIZE)
                amax = tl.max(bits_of(in_thread) & ABS_BITS, axis=1)
            write_row(y, amax, row, column, row_ptr, row_width, row_scale_ptr, row_scale_row,
                      row_scale_block, M, K, ROW, ROW_PADDED, CONVERTS, HARDWARE)  # fmt: skip
    if COLUMN is not None:
        if COLUMN.square:
            of_columns = of_tile + tl.zeros_like(of_columns)
        amax = bits_of(through(of_columns, COLUMN, HARDWARE)) & ABS_BITS
        encode = encode_scale(amax, COLUMN.element.max_value)
        poisoned = amax >= EXPONENT_BITS
        store_scales(column_scale_ptr, column_scale_row, column_scale_block, block_scale(encode, poisoned),
                     column, first // SIZE, K, COLUMN.square)  # fmt: skip
        for i in range(SIZE // ROWS):
            row = first + i * ROWS
            y = rows_apart(x_ptr, x_stride, row, column, M, K, 1, 4, ROWS // 4, SIZE, HARDWARE)
            write_column(through(y, COLUMN, HARDWARE), encode, poisoned, row, column, column_ptr,
                         column_width, M, K, COLUMN, COLUMN_PADDED, CONVERTS, HARDWARE)  # fmt: skip
