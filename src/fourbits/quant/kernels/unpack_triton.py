"""Unpacks FP4 operands to exact BF16 values, for Wgrad if inputs are saved in 4.5 bits.

Each value is written once and each code and scale read once. An element times its block scale has at most six
significant bits, so nothing is rounded. docs/nvfp4.md, sections 4 and 5.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.quant.kernels.rounding_triton import as_bf16, float_of, rounded_to


@triton.jit
def e2m1_value(code):
    """fp32 of an E2M1 code, int32 in [0, 16)."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    normal = ((exponent + 126) << 23) | (mantissa << 22)
    subnormal = mantissa * 0x3F000000  # 0.5
    return float_of(tl.where(exponent == 0, subnormal, normal) | ((code >> 3) << 31))


@triton.jit
def scale_value(byte, POWER_OF_TWO: tl.constexpr):
    """fp32 of a block scale's byte, int32: E8M0 if POWER_OF_TWO, else E4M3 without sign."""
    if POWER_OF_TWO:
        bits = tl.where(byte == 0, 0x400000, byte << 23)
        bits = tl.where(byte == 255, 0x7FC00000, bits)
    else:
        exponent, mantissa = (byte >> 3) & 15, byte & 7
        subnormal = mantissa.to(tl.float32) * 0.001953125  # 2^-9
        normal = ((exponent + 120) << 23) | (mantissa << 20)
        bits = tl.where(exponent == 0, subnormal.to(tl.int32, bitcast=True), normal)
        bits = tl.where(byte == 127, 0x7FC00000, bits)
    return float_of(bits)


@triton.jit
def unpack_kernel(
    codes_ptr, scales_ptr, out_ptr, R, width, across,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr, BYTES: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """out [R, 2 width] bf16 from codes [R, width], two to a byte, and scales [.., across] of their blocks.

    A scale serves BLOCK_ROWS rows and BLOCK elements of a row.
    """
    wide = tl.cdiv(width, BYTES)
    rows = (tl.program_id(0) // wide) * ROWS + tl.arange(0, ROWS)[:, None]
    places = (tl.program_id(0) % wide) * BYTES + tl.arange(0, BYTES)[None, :]
    inside = (rows < R) & (places < width)
    byte = tl.load(codes_ptr + rows.to(tl.int64) * width + places, mask=inside, other=0).to(tl.int32)
    block = (rows // BLOCK_ROWS).to(tl.int64) * across + places // (BLOCK // 2)
    scale = scale_value(tl.load(scales_ptr + block, mask=inside, other=0).to(tl.int32), POWER_OF_TWO)
    low, high = e2m1_value(byte & 15) * scale, e2m1_value(byte >> 4) * scale
    values = tl.reshape(tl.join(low, high), (ROWS, 2 * BYTES))
    elements = (tl.program_id(0) % wide) * (2 * BYTES) + tl.arange(0, 2 * BYTES)[None, :]
    out = out_ptr + rows.to(tl.int64) * (2 * width) + elements
    tl.store(out, as_bf16(values, HARDWARE), mask=(rows < R) & (elements < 2 * width))


@triton.jit
def unpack_transposed_kernel(
    codes_ptr, scales_ptr, global_ptr, out_ptr, M, out_stride, K,
    BLOCK: tl.constexpr, POWER_OF_TWO: tl.constexpr, DEQUANTIZED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """out [M, K] from codes [Mp / 2, K], two rows to a byte, and scales [Mp / BLOCK, K].

    Mp, which is M with padding, and BLOCK are multiples of ROWS. DEQUANTIZED: values times the global scale.
    """
    wide = tl.cdiv(K, COLUMNS)
    row = (tl.program_id(0) // wide) * ROWS
    columns = (tl.program_id(0) % wide) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    pairs = row // 2 + tl.arange(0, ROWS // 2)[:, None]
    byte = tl.load(codes_ptr + pairs.to(tl.int64) * K + columns, mask=columns < K, other=0).to(tl.int32)
    block = (row // BLOCK).to(tl.int64) * K + columns
    scale = scale_value(tl.load(scales_ptr + block, mask=columns < K, other=0).to(tl.int32), POWER_OF_TWO)
    low, high = e2m1_value(byte & 15) * scale, e2m1_value(byte >> 4) * scale
    if DEQUANTIZED:
        global_scale = tl.load(global_ptr)
        low, high = low * global_scale, high * global_scale
    out = out_ptr + (2 * pairs).to(tl.int64) * out_stride + columns
    low, high = (
        rounded_to(low, out_ptr.dtype.element_ty, HARDWARE),
        rounded_to(high, out_ptr.dtype.element_ty, HARDWARE),
    )
    tl.store(out, low, mask=(2 * pairs < M) & (columns < K))
    tl.store(out + out_stride, high, mask=(2 * pairs + 1 < M) & (columns < K))
