"""The random Hadamard transform inside kernels, down the rows of a tile. docs/nvfp4.md, section 9.

One thread's registers hold the rows of a group, so the butterfly consists of fp32 additions in the
specification's order, without a GEMM or shared memory.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.quant.kernels.philox_triton import one_of_four, sign_words
from fourbits.quant.kernels.rounding_triton import to_bf16


@triton.jit
def drawn_signs(key_ptr, stream, FIELDS: tl.constexpr, TRANSFORM: tl.constexpr):
    """Four uint32 words of sign bits: the transform's constants, or drawn for this layer and step."""
    if len(TRANSFORM.words) == 0:
        w0, w1, w2, w3 = sign_words(key_ptr, stream, FIELDS, 1 if TRANSFORM.per_call else 0)
    else:
        w0 = tl.full((), TRANSFORM.words[0], tl.uint32)
        w1 = tl.full((), TRANSFORM.words[1], tl.uint32)
        w2 = tl.full((), TRANSFORM.words[2], tl.uint32)
        w3 = tl.full((), TRANSFORM.words[3], tl.uint32)
    return w0, w1, w2, w3


@triton.jit
def sign_column(w0, w1, w2, w3, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """+1 or -1 for every row of a tile, fp32 [ROWS, 1]; bit i of the words negates row i of a group."""
    i = tl.arange(0, ROWS) % SIZE
    negative = (one_of_four(w0, w1, w2, w3, i // 32) >> (i % 32).to(tl.uint32)) & 1
    return tl.where(negative != 0, -1.0, 1.0)[:, None]


@triton.jit
def rotated(x, key_ptr, stream, FIELDS: tl.constexpr, TRANSFORM: tl.constexpr, ROWS: tl.constexpr,
            COLUMNS: tl.constexpr):  # fmt: skip
    """Transform every group of rows, without the last factor. x: bf16 values in fp32 [ROWS, COLUMNS]."""
    w0, w1, w2, w3 = drawn_signs(key_ptr, stream, FIELDS, TRANSFORM)
    z = x * sign_column(w0, w1, w2, w3, TRANSFORM.size, ROWS)
    for stage in tl.static_range(TRANSFORM.size.bit_length() - 1):
        pairs = tl.reshape(z, (ROWS // (2 << stage), 2, 1 << stage, COLUMNS))
        low, high = tl.split(tl.permute(pairs, (0, 2, 3, 1)))
        pairs = tl.permute(tl.join(low + high, low - high), (0, 3, 1, 2))
        z = tl.reshape(pairs, (ROWS, COLUMNS))
    return z


@triton.jit
def transformed(x, key_ptr, stream, FIELDS: tl.constexpr, TRANSFORM: tl.constexpr, ROWS: tl.constexpr,
                COLUMNS: tl.constexpr, HARDWARE: tl.constexpr, WIDE: tl.constexpr = False):  # fmt: skip
    """x with every group of rows transformed: fp32 values that bf16 holds. WIDE: as for `to_bf16`."""
    z = rotated(x, key_ptr, stream, FIELDS, TRANSFORM, ROWS, COLUMNS)
    return to_bf16(z * TRANSFORM.scale, HARDWARE, WIDE)
