"""Packs eight 4-bit codes to a 32-bit word, and loads tiles so that packing moves no data between threads.

One thread's registers hold eight neighbours along the contraction axis, and a store is as wide as the words
that a thread holds. docs/nvfp4.md, sections 4 and 5.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.quant.kernels.rounding_triton import as_fp32, bits_of, code_of

#: magnitudes (first eight inputs) and values with their signs (last eight) to a word of E2M1 codes
_PACK = tl.constexpr("""{
    .reg .b32 m0, m1, m2, m3, s0, s1, s2, s3, least;
    mov.b32 least, 0x04000400;
    cvt.rn.f16x2.f32 m0, $5, $1;
    cvt.rn.f16x2.f32 m1, $6, $2;
    cvt.rn.f16x2.f32 m2, $7, $3;
    cvt.rn.f16x2.f32 m3, $8, $4;
    mul.rn.f16x2 m0, m0, least;
    mul.rn.f16x2 m1, m1, least;
    mul.rn.f16x2 m2, m2, least;
    mul.rn.f16x2 m3, m3, least;
    shr.u32 m0, m0, 9;
    shr.u32 m1, m1, 5;
    shr.u32 m2, m2, 1;
    shl.b32 m3, m3, 3;
    add.u32 m0, m0, m1;
    add.u32 m2, m2, m3;
    add.u32 m0, m0, m2;
    prmt.b32 s0, $9, $13, 0x7632;
    prmt.b32 s1, $10, $14, 0x7632;
    prmt.b32 s2, $11, $15, 0x7632;
    prmt.b32 s3, $12, $16, 0x7632;
    shr.u32 s0, s0, 12;
    shr.u32 s1, s1, 8;
    shr.u32 s2, s2, 4;
    lop3.b32 s3, s3, s2, 0x80008000, 0xE4;
    lop3.b32 s1, s1, s0, 0x00800080, 0xE4;
    lop3.b32 s3, s3, s1, 0x88008800, 0xE4;
    lop3.b32 $0, s3, m0, 0x88888888, 0xEC;
}""")
#: signed values to a word of E2M1 codes by the instruction of sm_100 and newer, which rounds
_CONVERT = tl.constexpr("""{
    .reg .b8 b0, b1, b2, b3;
    cvt.rn.satfinite.e2m1x2.f32 b0, $2, $1;
    cvt.rn.satfinite.e2m1x2.f32 b1, $4, $3;
    cvt.rn.satfinite.e2m1x2.f32 b2, $6, $5;
    cvt.rn.satfinite.e2m1x2.f32 b3, $8, $7;
    mov.b32 $0, {b0, b1, b2, b3};
}""")


@triton.jit
def rows_apart(x_ptr, stride, row, column, M, K, STEP: tl.constexpr, COUNT: tl.constexpr,
               ROWS: tl.constexpr, COLUMNS: tl.constexpr, HARDWARE: tl.constexpr):  # fmt: skip
    """COUNT neighbouring rows of every group, each loaded separately: fp32 [ROWS, COLUMNS, COUNT].

    Groups begin every STEP * COUNT rows from row on; the rows of a group are STEP apart.
    """
    if COUNT == 1:
        rows = tl.arange(0, ROWS)[:, None] * STEP
        columns = tl.arange(0, COLUMNS)[None, :]
        inside = (rows < M - row) & (columns < K - column)
        start = x_ptr + row.to(tl.int64) * stride + column
        x = as_fp32(tl.load(start + rows * stride + columns, mask=inside, other=0.0), HARDWARE)
    else:
        HALF: tl.constexpr = COUNT // 2
        low = rows_apart(x_ptr, stride, row, column, M, K, STEP * 2, HALF, ROWS, COLUMNS, HARDWARE)
        high = rows_apart(x_ptr, stride, row + STEP, column, M, K, STEP * 2, HALF, ROWS, COLUMNS, HARDWARE)
        x = tl.reshape(tl.join(low, high), (ROWS, COLUMNS, COUNT))
    return x


@triton.jit
def columns_apart(x_ptr, stride, row, column, M, K, STEP: tl.constexpr, LENGTH: tl.constexpr,
                  WIDE: tl.constexpr, ROWS: tl.constexpr, ACROSS: tl.constexpr,
                  HARDWARE: tl.constexpr):  # fmt: skip
    """LENGTH neighbouring columns of every STEP, WIDE per load: fp32 [ROWS, ACROSS, LENGTH]."""
    if LENGTH == WIDE:
        rows = tl.arange(0, ROWS)[:, None, None]
        columns = tl.arange(0, ACROSS)[None, :, None] * STEP + tl.arange(0, WIDE)[None, None, :]
        inside = (rows < M - row) & (columns < K - column)
        start = x_ptr + row.to(tl.int64) * stride + column
        x = as_fp32(tl.load(start + rows * stride + columns, mask=inside, other=0.0), HARDWARE)
    else:
        HALF: tl.constexpr = LENGTH // 2
        low = columns_apart(x_ptr, stride, row, column, M, K, STEP, HALF, WIDE, ROWS, ACROSS, HARDWARE)
        high = columns_apart(
            x_ptr, stride, row, column + HALF, M, K, STEP, HALF, WIDE, ROWS, ACROSS, HARDWARE
        )
        x = tl.reshape(tl.permute(tl.join(low, high), (0, 1, 3, 2)), (ROWS, ACROSS, LENGTH))
    return x


@triton.jit
def load_held(x_ptr, stride, row, column, M, K, AXIS: tl.constexpr, HELD: tl.constexpr, ROWS: tl.constexpr,
              COLUMNS: tl.constexpr, HARDWARE: tl.constexpr):  # fmt: skip
    """Like `load_tile`, with every HELD neighbours along AXIS in one thread."""
    if AXIS == 0:
        x = rows_apart(x_ptr, stride, row, column, M, K, 1, HELD, ROWS // HELD, COLUMNS, HARDWARE)
        x = tl.permute(x, (0, 2, 1))
    else:
        WIDE: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
        x = columns_apart(x_ptr, stride, row, column, M, K, HELD, HELD, WIDE, ROWS, COLUMNS // HELD, HARDWARE)
    return tl.reshape(x, (ROWS, COLUMNS))


@triton.jit
def eight(x, AXIS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Every eight neighbours along AXIS, first to last: eight tensors of a tile's words."""
    if AXIS == 1:
        x = tl.reshape(x, (ROWS, COLUMNS // 8, 4, 2))
    else:
        x = tl.permute(tl.reshape(x, (ROWS // 8, 4, 2, COLUMNS)), (0, 3, 1, 2))
    D: tl.constexpr = x.shape[0]
    A: tl.constexpr = x.shape[1]
    even, odd = tl.split(x)
    x04, x26 = tl.split(tl.reshape(even, (D, A, 2, 2)))
    x15, x37 = tl.split(tl.reshape(odd, (D, A, 2, 2)))
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def one_code(magnitude, signed, GRID: tl.constexpr):
    """Code of a magnitude on the grid with the sign of another value, int32."""
    return code_of(magnitude, GRID) | ((bits_of(signed) >> 31) & 1) << (GRID.bits - 1)


@triton.jit
def code_words(magnitude, signed, AXIS: tl.constexpr, GRID: tl.constexpr, CONVERT: tl.constexpr,
               ROWS: tl.constexpr, COLUMNS: tl.constexpr, HARDWARE: tl.constexpr):  # fmt: skip
    """Words of 4-bit codes as stored, int32: [ROWS, COLUMNS / 8] for AXIS 1, [ROWS / 8, COLUMNS] for AXIS 0.

    magnitude: fp32 on the grid; signed: fp32 with the signs. CONVERT: use the instruction of sm_100, which
    rounds `signed` and ignores the magnitudes.
    """
    s0, s1, s2, s3, s4, s5, s6, s7 = eight(signed, AXIS, ROWS, COLUMNS)
    if CONVERT:
        words = tl.inline_asm_elementwise(
            _CONVERT, "=r,f,f,f,f,f,f,f,f", [s0, s1, s2, s3, s4, s5, s6, s7], dtype=tl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        m0, m1, m2, m3, m4, m5, m6, m7 = eight(magnitude, AXIS, ROWS, COLUMNS)
        if HARDWARE and GRID.max_value == 6.0:
            words = tl.inline_asm_elementwise(
                _PACK, "=r,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f",
                [m0, m1, m2, m3, m4, m5, m6, m7, s0, s1, s2, s3, s4, s5, s6, s7], dtype=tl.int32,
                is_pure=True, pack=1,
            )  # fmt: skip
        else:
            words = one_code(m0, s0, GRID) | (one_code(m1, s1, GRID) << 4)
            words |= (one_code(m2, s2, GRID) << 8) | (one_code(m3, s3, GRID) << 12)
            words |= (one_code(m4, s4, GRID) << 16) | (one_code(m5, s5, GRID) << 20)
            words |= (one_code(m6, s6, GRID) << 24) | (one_code(m7, s7, GRID) << 28)
    return words


@triton.jit
def final_words(words, scale, row, column, M, K, CONFIG: tl.constexpr, PADDED: tl.constexpr,
                ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Words under the rules for poisoned and underflowed blocks; with PADDED, codes outside of [M, K] are 0.

    scale: block scales, [R, 1, C, 1]. A code of all ones is the largest magnitude of every 4-bit grid, and a
    NaN that arithmetic produces has no sign.
    """
    DOWN: tl.constexpr = scale.shape[0]
    ACROSS: tl.constexpr = scale.shape[2]
    if CONFIG.axis == 1:
        blocks = tl.reshape(words, (DOWN, CONFIG.block_rows, ACROSS, CONFIG.block_columns // 8))
    else:
        blocks = tl.reshape(words, (DOWN, CONFIG.block_rows // 8, ACROSS, CONFIG.block_columns))
    if not CONFIG.te_compat:
        blocks &= tl.where(scale == 0.0, -0x77777778, -1)
    blocks |= tl.where(scale != scale, 0x77777777, 0)
    words = tl.reshape(blocks, words.shape)
    if PADDED:
        if CONFIG.axis == 1:
            left = (K - column - 8 * tl.arange(0, COLUMNS // 8))[None, :]
        else:
            left = (M - row - 8 * tl.arange(0, ROWS // 8))[:, None]
        bits = 4 * tl.minimum(tl.maximum(left, 0), 8)
        words &= ((tl.full((), 1, tl.int64) << bits.to(tl.int64)) - 1).to(tl.int32)
    return words
