"""One operand as codes and scales: what Blackwell multiplies, and what is saved or sent at 4.5 bits each.

They are written as docs/nvfp4.md, section 5, stores them: rows of the stored matrix are columns of the tensor
for an operand of axis 0, so such a tile is turned while it is written.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.quant.kernels.rounding_triton import ABS_BITS, EXPONENT_BITS, bits_of, code_of, with_sign
from fourbits.quant.kernels.scaling_triton import block_amax, blocked
from fourbits.quant.kernels.tile_triton import load_tile, prepared_tile, rounded_tile, tensor_amax, tile_start


@triton.jit
def convert_pairs(low, high):
    """Two E2M1 codes to a byte by the instruction of sm_100 and newer, int32. low, high: fp32."""
    return tl.inline_asm_elementwise(
        "{ .reg .b8 pair; cvt.rn.satfinite.e2m1x2.f32 pair, $2, $1; cvt.u32.u8 $0, pair; }",
        "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def paired(x, AXIS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Neighbours along the contraction: (first, second) of every pair."""
    if AXIS == 1:
        low, high = tl.split(tl.reshape(x, (ROWS, COLUMNS // 2, 2)))
    else:
        low, high = tl.split(tl.permute(tl.reshape(x, (ROWS // 2, 2, COLUMNS)), (0, 2, 1)))
    return low, high


@triton.jit
def final_values(
    y, rounded, scaled, scale, inside, PLAN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """What is encoded, signed fp32 [ROWS, COLUMNS]: rules for poisoned and underflowed blocks, and padding.

    inside: where y is data; padding has code 0 in poisoned blocks too, unless a transform has filled it.
    """
    LARGEST: tl.constexpr = PLAN.element.largest
    data = blocked(y, PLAN, ROWS, COLUMNS)
    is_nan = (bits_of(data) & ABS_BITS) > EXPONENT_BITS
    poison = tl.where(is_nan, LARGEST, with_sign(tl.full(data.shape, LARGEST, tl.float32), data))
    values = with_sign(rounded, scaled)
    if not PLAN.te_compat:
        values = tl.where(scale == 0.0, with_sign(tl.zeros_like(values), data), values)
    values = tl.reshape(tl.where(scale != scale, poison, values), (ROWS, COLUMNS))
    if PLAN.transform is None:
        values = tl.where(inside, values, 0.0)
    return values


@triton.jit
def packed_codes(values, PLAN: tl.constexpr, E2M1X2: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Bytes as stored, int32, two 4-bit elements to a byte. values: on the grid unless E2M1X2 rounds."""
    ELEMENT: tl.constexpr = PLAN.element
    if ELEMENT.bits == 4:
        low, high = paired(values, PLAN.axis, ROWS, COLUMNS)
        if E2M1X2:
            codes = convert_pairs(low, high)
        else:
            codes = signed_code(low, ELEMENT) | (signed_code(high, ELEMENT) << 4)
    else:
        codes = signed_code(values, ELEMENT)
    return codes


@triton.jit
def signed_code(values, GRID: tl.constexpr):
    """Codes of values that lie on the grid, int32."""
    return code_of(tl.abs(values), GRID) | tl.where(bits_of(values) < 0, 1 << (GRID.bits - 1), 0)


@triton.jit
def scale_codes(scale, PLAN: tl.constexpr):
    """Stored bytes of block scales, int32. scale: fp32 on the scale's grid, or NaN."""
    if PLAN.scale is None:
        code = (bits_of(scale) >> 23) & 255  # of 2^-127, which is subnormal: 0
    else:
        SCALE: tl.constexpr = PLAN.scale
        code = code_of(scale, SCALE)
    return tl.where(scale != scale, PLAN.scale_nan, code)


@triton.jit
def scale_offset(row, block, across, SWIZZLED: tl.constexpr):
    """Where a block scale is stored: row-major, or in the 128x4 tiles of block-scaled tensor cores."""
    if SWIZZLED:
        tile = (row // 128) * ((across + 3) // 4) + block // 4
        offset = tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + block % 4
    else:
        offset = row * across + block
    return offset


@triton.jit
def store_codes(codes_ptr, bytes_, row, column, R, width, PLAN: tl.constexpr, ROWS: tl.constexpr,
                COLUMNS: tl.constexpr):  # fmt: skip
    """Write a tile of packed codes, int32 in the tile's layout, to codes_ptr [R, width] (stored rows)."""
    PER_BYTE: tl.constexpr = 8 // PLAN.element.bits
    if PLAN.axis == 1:
        r = row + tl.arange(0, ROWS)[:, None]
        c = column // PER_BYTE + tl.arange(0, COLUMNS // PER_BYTE)[None, :]
    else:
        r = column + tl.arange(0, COLUMNS)[None, :]
        c = row // PER_BYTE + tl.arange(0, ROWS // PER_BYTE)[:, None]
    tl.store(codes_ptr + r.to(tl.int64) * width + c, bytes_.to(tl.uint8), mask=(r < R) & (c < width))


@triton.jit
def store_scales(scale_ptr, code, row, column, down, across, PLAN: tl.constexpr, ROWS: tl.constexpr,
                 COLUMNS: tl.constexpr, SWIZZLED: tl.constexpr):  # fmt: skip
    """Write a tile's block scales, int32 [R, 1, C, 1], to the grid of stored blocks [down, across]."""
    ABOVE: tl.constexpr = ROWS // PLAN.block_rows
    BESIDE: tl.constexpr = COLUMNS // PLAN.block_columns
    i = (row // PLAN.block_rows + tl.arange(0, ABOVE))[:, None]
    j = (column // PLAN.block_columns + tl.arange(0, BESIDE))[None, :]
    r, c = (i, j) if PLAN.axis == 1 else (j, i)
    byte = tl.reshape(code, (ABOVE, BESIDE)).to(tl.uint8)
    tl.store(scale_ptr + scale_offset(r, c, across, SWIZZLED), byte, mask=(r < down) & (c < across))


@triton.jit(do_not_specialize=["stream"])
def packed_kernel(
    x_ptr, x_stride, M, K, codes_ptr, R, width, scale_ptr, down, across, amax_ptr, global_ptr,
    key_ptr, stream,
    PLAN: tl.constexpr, FIELDS: tl.constexpr, PARTS: tl.constexpr, SWIZZLED: tl.constexpr,
    E2M1X2: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Codes [R, width] and scales [down, across] of x [M, K] by PLAN. E2M1X2: convert pairs in hardware."""
    row, column = tile_start(K, ROWS, COLUMNS)
    IS_BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    x = load_tile(x_ptr, x_stride, row, column, M, K, ROWS, COLUMNS, HARDWARE)
    y = prepared_tile(x, IS_BF16, key_ptr, stream, FIELDS, PLAN, ROWS, COLUMNS, HARDWARE)
    tensor_bits = tensor_amax(amax_ptr, global_ptr, PLAN, PARTS)
    amax_bits = block_amax(y, PLAN, ROWS, COLUMNS)
    rounded, scaled, scale = rounded_tile(
        y, amax_bits, tensor_bits, row, column, key_ptr, stream, FIELDS, PLAN, ROWS, COLUMNS
    )
    if E2M1X2 and PLAN.rounding == "rne":
        rounded = tl.abs(scaled)  # the instruction rounds
    inside = (row + tl.arange(0, ROWS)[:, None] < M) & (column + tl.arange(0, COLUMNS)[None, :] < K)
    values = final_values(y, rounded, scaled, scale, inside, PLAN, ROWS, COLUMNS)
    codes = packed_codes(values, PLAN, E2M1X2, ROWS, COLUMNS)
    store_codes(codes_ptr, codes, row, column, R, width, PLAN, ROWS, COLUMNS)
    store_scales(
        scale_ptr, scale_codes(scale, PLAN), row, column, down, across, PLAN, ROWS, COLUMNS, SWIZZLED
    )
