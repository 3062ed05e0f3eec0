"""FP8 in blocks of 128, both operands from one read: the baseline that 4-bit training is compared with.

FP8 tensor cores want the contraction last, so the operand of axis 0 is written transposed. Block scales are
FP32 and there is no scale of the whole tensor: no amax pass. docs/nvfp4.md, sections 7.3 and 13.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
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
    with_sign,
)
from fourbits.quant.kernels.scaling_triton import encode_scale
from fourbits.quant.kernels.tile_triton import load_tile

SIZE = tl.constexpr(128)


@triton.jit
def fp8_codes(y, encode, poisoned, inside, GRID: tl.constexpr, HARDWARE: tl.constexpr):
    """Codes of a tile, uint8 [SIZE, SIZE]. encode: fp32 and poisoned: bool, broadcast to it."""
    pattern = bits_of(y)
    signless = (pattern & ABS_BITS) > EXPONENT_BITS  # a NaN has code sign 0
    scaled = y * encode
    if HARDWARE:
        TYPE: tl.constexpr = tl.float8e4nv if GRID.mantissa_bits == 3 else tl.float8e5
        clamped = with_sign(tl.minimum(tl.abs(scaled), GRID.largest), scaled)
        code = clamped.to(TYPE).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        code = code_of(nearest(scaled, GRID), GRID) | tl.where(bits_of(scaled) < 0, 128, 0)
    LARGEST_CODE: tl.constexpr = 0x7E if GRID.mantissa_bits == 3 else 0x7B
    poison = LARGEST_CODE | tl.where((pattern < 0) & ~signless, 128, 0)
    return tl.where(inside, tl.where(poisoned, poison, code), 0).to(tl.uint8)


@triton.jit
def write_fp8(y, amax_bits, row, column, codes_ptr, width, scale_ptr, scale_row, scale_block, M, K,
              AXIS: tl.constexpr, SQUARE: tl.constexpr, GRID: tl.constexpr,
              HARDWARE: tl.constexpr):  # fmt: skip
    """Codes and scales of a tile as stored: transposed for AXIS 0. amax_bits: [SIZE or 1, SIZE or 1]."""
    rows = tl.arange(0, SIZE)[:, None]
    columns = tl.arange(0, SIZE)[None, :]
    encode = encode_scale(amax_bits, GRID.largest)
    poisoned = amax_bits >= EXPONENT_BITS
    scale = tl.div_rn(tl.full(encode.shape, 1.0, tl.float32), encode)
    scale = tl.where(poisoned, float_of(tl.full(encode.shape, 0x7FC00000, tl.int32)), scale)
    inside = (rows < M - row) & (columns < K - column)
    codes = fp8_codes(y, encode, poisoned, inside, GRID, HARDWARE)
    if AXIS == 1:
        r, c, R = row + rows, column + columns, M
        scale_r, scale_c = (row // SIZE if SQUARE else row + rows) + tl.zeros_like(amax_bits), column // SIZE
        scale_rows = tl.cdiv(M, SIZE) if SQUARE else M
    else:
        r, c, R = column + columns, row + rows, K
        scale_r, scale_c = (
            (column // SIZE if SQUARE else column + columns) + tl.zeros_like(amax_bits),
            row // SIZE,
        )
        scale_rows = tl.cdiv(K, SIZE) if SQUARE else K
    tl.store(codes_ptr + r.to(tl.int64) * width + c, codes, mask=(r < R) & (c < width))
    tl.store(scale_ptr + scale_r * scale_row + scale_c * scale_block, scale, mask=scale_r < scale_rows)


@triton.jit
def fp8_kernel(
    x_ptr, x_stride, M, K, row_ptr, row_width, row_scale_ptr, row_scale_row, row_scale_block,
    column_ptr, column_width, column_scale_ptr, column_scale_row, column_scale_block,
    ROW: tl.constexpr, COLUMN: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Codes and scales of x [M, K] by the Fp8Plans ROW and COLUMN, either of which may be None.

    Row operand: codes [M, row_width], scales [M or blocks, ..] with strides (scale_row, scale_block); column
    operand: [K, column_width] and [K or blocks, ..]. One program per 128 x 128 tile.
    """
    row = tl.program_id(0) // tl.cdiv(K, SIZE) * SIZE
    column = tl.program_id(0) % tl.cdiv(K, SIZE) * SIZE
    x = load_tile(x_ptr, x_stride, row, column, M, K, SIZE, SIZE, HARDWARE)
    if ROW is not None:
        GRID: tl.constexpr = ROW.element
        y = to_bf16(x, HARDWARE) if ROW.through_bf16 else x
        amax = tl.max(bits_of(y) & ABS_BITS, axis=1, keep_dims=True)
        if ROW.square:
            amax = tl.max(amax, axis=0, keep_dims=True)
        write_fp8(y, amax, row, column, row_ptr, row_width, row_scale_ptr, row_scale_row, row_scale_block,
                  M, K, 1, ROW.square, GRID, HARDWARE)  # fmt: skip
    if COLUMN is not None:
        GRID_2: tl.constexpr = COLUMN.element
        y = to_bf16(x, HARDWARE) if COLUMN.through_bf16 else x
        amax = tl.max(bits_of(y) & ABS_BITS, axis=0, keep_dims=True)
        if COLUMN.square:
            amax = tl.max(amax, axis=1, keep_dims=True)
        write_fp8(y, amax, row, column, column_ptr, column_width, column_scale_ptr, column_scale_row,
                  column_scale_block, M, K, 0, COLUMN.square, GRID_2, HARDWARE)  # fmt: skip
