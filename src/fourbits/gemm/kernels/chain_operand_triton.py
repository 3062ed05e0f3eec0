"""FP4 operands for the kernels of sums: values in BF16, and bounds that prove that their sums are exact.

A value is an element times its block scale: a whole number of at most 8 bits times a power of two, which BF16
holds. docs/nvfp4.md, section 22.4.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.quant.kernels.rounding_triton import as_bf16, float_of

#: rows with scales below 2^-45 or above 2^45 go to the kernel that computes every term
_WIDEST = tl.constexpr(45)
#: 2 * the magnitude of each code, in four bits: 0, 1, 2, 3, 4, 6, 8, 12
_TWICE = tl.constexpr(0xC8643210 - (1 << 32))
#: exceeds the rounding errors of a norm that is summed in FP32
SLACK = tl.constexpr(1.015625)


@triton.jit
def twice(code):
    """2 * the value of E2M1 codes, int32; bits of `code` above the fourth are ignored."""
    value = (_TWICE >> ((code & 7) << 2)) & 15
    return tl.where((code & 8) != 0, -value, value)


@triton.jit
def scale_parts(byte, E8M0: tl.constexpr):
    """Scales as (eighths, exponent, is NaN): |scale| = eighths * 2^(exponent - 3). byte: int32."""
    if E8M0:
        eighths = tl.full(byte.shape, 8, tl.int32)
        exponent = byte - 127
        nan = byte == 255
    else:
        field = (byte >> 3) & 15
        eighths = tl.where(field > 0, 8, 0) + (byte & 7)
        exponent = tl.maximum(field, 1) - 7
        nan = (byte & 127) == 127
    return eighths, exponent, nan


@triton.jit
def stored_codes(codes, row_stride, byte_stride, rows, k, inside):
    """Codes, int32, at these rows and positions along K."""
    places = codes + rows.to(tl.int64)[:, None] * row_stride + (k // 2).to(tl.int64)[None, :] * byte_stride
    return (tl.load(places, mask=inside, other=0).to(tl.int32) >> ((k % 2) * 4)[None, :]) & 15


@triton.jit
def code_pairs(codes, row_stride, byte_stride, rows, first, R, K, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """Twice a row's elements from `first` on, even and odd ones: int32 [rows, PIECE / BLOCK, BLOCK / 2]."""
    byte = first // 2 + tl.arange(0, PIECE // 2)
    places = codes + rows.to(tl.int64)[:, None] * row_stride + byte.to(tl.int64)[None, :] * byte_stride
    inside = (rows < R)[:, None] & (byte < K // 2)[None, :]
    pair = tl.load(places, mask=inside, other=0).to(tl.int32)
    pair = tl.reshape(pair, (rows.shape[0], PIECE // BLOCK, BLOCK // 2))
    return twice(pair), twice(pair >> 4)


@triton.jit(do_not_specialize=["scales_row", "R", "steps"])
def chain_operand_kernel(
    codes_ptr, codes_row, codes_byte, scales_ptr, scales_row, scales_block,
    values_ptr, ratio_ptr, extent_ptr, R, K, steps,
    SIDE: tl.constexpr, BLOCK: tl.constexpr, E8M0: tl.constexpr,
    ROWS: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, STEPS: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Write values [R, K] and extents for part of some rows: STEPS instructions of PIECES * PIECE products.

    ratio: [R / ROWS, steps], for each instruction the largest quotient of a row's norm and its values' last
    bit; extent: [3, parts, R], for each part of a row the square of its norm, its last bit, the largest power
    of two of a scale. A row with a scale that is NaN or beyond 2^+-45 has the last bit 0.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    squares = tl.zeros((ROWS,), tl.float32)
    last = tl.full((ROWS,), float("inf"), tl.float32)
    top = tl.zeros((ROWS,), tl.float32)
    lost = tl.zeros((ROWS,), tl.int32)
    for at in range(STEPS):
        step = part * STEPS + at
        step_squares = tl.zeros((ROWS,), tl.float32)
        step_last = tl.full((ROWS,), float("inf"), tl.float32)
        for piece in tl.static_range(PIECES):
            first = (step * PIECES + piece) * PIECE
            low, high = code_pairs(codes_ptr, codes_row, codes_byte, rows, first, R, K, PIECE, BLOCK)
            block = first // BLOCK + tl.arange(0, PIECE // BLOCK)
            inside = (rows < R)[:, None] & (block * BLOCK < K)[None, :]
            places = scales_ptr + (rows // SIDE).to(tl.int64)[:, None] * scales_row
            places = places + block.to(tl.int64)[None, :] * scales_block
            eighths, exponent, nan = scale_parts(tl.load(places, mask=inside, other=0).to(tl.int32), E8M0)
            near = tl.minimum(tl.maximum(exponent, -_WIDEST), _WIDEST)
            unit = float_of((near + 123) << 23)
            factor = eighths.to(tl.float32) * unit
            values = tl.join(low.to(tl.float32), high.to(tl.float32)) * factor[:, :, None, None]
            k = first + tl.arange(0, PIECE)
            target = values_ptr + rows.to(tl.int64)[:, None] * K + k[None, :]
            stored = (rows < R)[:, None] & (k < K)[None, :]
            tl.store(target, as_bf16(tl.reshape(values, (ROWS, PIECE)), HARDWARE), mask=stored)
            # Sums and last bits of whole numbers, then scaled once per block: exact, as they are below 2^24.
            step_squares += tl.sum(tl.sum(low * low + high * high, 2).to(tl.float32) * factor * factor, 1)
            bits = tl.reduce_or(low | high, 2)  # its last bit is the lowest of all elements' last bits
            counts = (bits != 0) & (eighths != 0)
            lowest = ((bits & -bits) * (eighths & -eighths)).to(tl.float32) * unit
            step_last = tl.minimum(step_last, tl.min(tl.where(counts, lowest, float("inf")), 1))
            top = tl.maximum(top, tl.max(tl.where(counts, 16 * unit, 0.0), 1))
            unfit = inside & (nan | (counts & (near != exponent)))
            lost = tl.maximum(lost, tl.max(unfit.to(tl.int32), 1))
        ratio = tl.max(tl.sqrt(step_squares) * SLACK / step_last, 0)
        tl.store(ratio_ptr + tl.program_id(0) * steps + step, ratio, mask=step < steps)
        squares += step_squares
        last = tl.minimum(last, step_last)
    found = extent_ptr + part * R + rows
    parts = tl.num_programs(1)
    tl.store(found, squares, mask=rows < R)
    tl.store(found + parts * R, tl.where(lost > 0, 0.0, last), mask=rows < R)
    tl.store(found + 2 * parts * R, tl.where(lost > 0, float("inf"), top), mask=rows < R)
