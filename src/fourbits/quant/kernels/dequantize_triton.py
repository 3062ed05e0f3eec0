"""Dequantizes packed FP4 operands to the tensor's own orientation, and transposes packed operands.

value = fp32(fp32(code * block scale) * global scale), then rounded to the output's dtype. docs/nvfp4.md,
sections 5 and 8.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.quant.kernels.rounding_triton import float_of, rounded_to
from fourbits.quant.kernels.unpack_triton import scale_value


@triton.jit
def value(word, J: tl.constexpr, scale, global_scale):
    """Element J of a word of E2M1 codes, int32, as a value, fp32.

    The three bits of magnitude, placed at the lowest two bits of fp32's exponent and the first of its
    mantissa, are the element times 2^-126.
    """
    bits = ((word << (28 - 4 * J)) >> 6) & -0x7E400000
    return ((float_of(bits) * 2.0**126) * scale) * global_scale


@triton.jit
def entry_values(word, s, g, PER: tl.constexpr):
    """The PER elements of each entry, in order along the last dimensions. s, g: block and global scale."""
    if PER == 8:
        v04 = tl.join(value(word, 0, s, g), value(word, 4, s, g))
        v26 = tl.join(value(word, 2, s, g), value(word, 6, s, g))
        v15 = tl.join(value(word, 1, s, g), value(word, 5, s, g))
        v37 = tl.join(value(word, 3, s, g), value(word, 7, s, g))
        values = tl.join(tl.join(v04, v26), tl.join(v15, v37))
    else:
        even = tl.join(value(word, 0, s, g), value(word, 2, s, g))
        values = tl.join(even, tl.join(value(word, 1, s, g), value(word, 3, s, g)))
    return values


@triton.jit
def dequantize_kernel(
    codes_ptr, scales_ptr, global_ptr, out_ptr, R, C, width, across,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr, ENTRIES: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """out [R, C] from codes [R, width], and scales [.., across] of their blocks.

    An entry of codes fills one store of 16 bytes: eight codes, int32, or for fp32 four, int16.
    """
    PER: tl.constexpr = codes_ptr.dtype.element_ty.primitive_bitwidth // 4
    wide = tl.cdiv(width, ENTRIES)
    first = (tl.program_id(0) // wide) * ROWS
    places = (tl.program_id(0) % wide) * ENTRIES + tl.arange(0, ENTRIES)
    columns = (tl.program_id(0) % wide) * (PER * ENTRIES) + tl.arange(0, PER * ENTRIES)
    g = tl.load(global_ptr)
    for i in tl.static_range(ROWS):
        row = (first + i).to(tl.int64)
        inside = (row < R) & (places < width)
        word = tl.load(codes_ptr + row * width + places, mask=inside, other=0).to(tl.int32)
        block = (row // BLOCK_ROWS) * across + places // (BLOCK // PER)
        s = scale_value(tl.load(scales_ptr + block, mask=inside, other=0).to(tl.int32), POWER_OF_TWO)
        values = rounded_to(entry_values(word, s, g, PER), out_ptr.dtype.element_ty, HARDWARE)
        values = tl.reshape(values, (PER * ENTRIES,))
        tl.store(out_ptr + row * C + columns, values, mask=(row < R) & (columns < C))


@triton.jit
def dequantize_transposed_kernel(
    codes_ptr, scales_ptr, global_ptr, out_ptr, M, K, width, across,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    WORDS: tl.constexpr, COLUMNS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """out [M, K] from the codes of its columns [K, width], int32 words of eight, and scales [.., across].

    A scale serves BLOCK_ROWS columns of out and BLOCK elements of a column.
    """
    wide = tl.cdiv(K, COLUMNS)
    first = (tl.program_id(0) // wide) * WORDS
    column = (tl.program_id(0) % wide) * COLUMNS
    stored = column + tl.arange(0, COLUMNS)[:, None]
    words = first + tl.arange(0, WORDS)[None, :]
    inside = (stored < K) & (words < width)
    word = tl.load(codes_ptr + stored.to(tl.int64) * width + words, mask=inside, other=0)
    word = tl.trans(word)[
        None, :, :
    ]  # so that the compiler moves words between threads here instead of values later
    block = (stored // BLOCK_ROWS).to(tl.int64) * across + words // (BLOCK // 8)
    byte = tl.trans(tl.load(scales_ptr + block, mask=inside, other=0))[None, :, :]
    s = scale_value(byte.to(tl.int32), POWER_OF_TWO)
    columns = column + tl.arange(0, COLUMNS)[None, None, :]
    down = first + tl.arange(0, WORDS)[None, :, None]
    g = tl.load(global_ptr)
    out = out_ptr + (8 * down).to(tl.int64) * K + columns
    for j in tl.static_range(8):
        values = rounded_to(value(word, j, s, g), out_ptr.dtype.element_ty, HARDWARE)
        tl.store(out + j * K, values, mask=(columns < K) & (8 * down + j < M))


@triton.jit
def exchanged(a, b, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """Swap the upper fields of a with the lower fields of b, MASK wide and SHIFT apart; uint32."""
    difference = ((a >> SHIFT) ^ b) & MASK
    return a ^ (difference << SHIFT), b ^ difference


@triton.jit
def eight_transposed(w0, w1, w2, w3, w4, w5, w6, w7):
    """Transpose eight words of eight codes: word j of the result has code j of every word. uint32."""
    w0, w4 = exchanged(w0, w4, 16, 0x0000FFFF)
    w1, w5 = exchanged(w1, w5, 16, 0x0000FFFF)
    w2, w6 = exchanged(w2, w6, 16, 0x0000FFFF)
    w3, w7 = exchanged(w3, w7, 16, 0x0000FFFF)
    w0, w2 = exchanged(w0, w2, 8, 0x00FF00FF)
    w1, w3 = exchanged(w1, w3, 8, 0x00FF00FF)
    w4, w6 = exchanged(w4, w6, 8, 0x00FF00FF)
    w5, w7 = exchanged(w5, w7, 8, 0x00FF00FF)
    w0, w1 = exchanged(w0, w1, 4, 0x0F0F0F0F)
    w2, w3 = exchanged(w2, w3, 4, 0x0F0F0F0F)
    w4, w5 = exchanged(w4, w5, 4, 0x0F0F0F0F)
    w6, w7 = exchanged(w6, w7, 4, 0x0F0F0F0F)
    return w0, w1, w2, w3, w4, w5, w6, w7


@triton.jit
def row_of_eights(codes_ptr, rows, words, R, width):
    """Words of rows, uint32; 0 outside of [R, width]."""
    inside = (rows < R) & (words < width)
    return tl.load(codes_ptr + rows.to(tl.int64) * width + words, mask=inside, other=0).to(
        tl.uint32, bitcast=True
    )


@triton.jit
def store_transposed(out_ptr, word, rows, words, R, width):
    """Write words [rows / 8, columns / 8] of a tile to out [R, width], transposed."""
    place = out_ptr + rows.to(tl.int64) * width + words
    tl.store(place, tl.trans(word).to(tl.int32, bitcast=True), mask=(rows < R) & (words < width))


@triton.jit
def transpose_kernel(
    codes_ptr, scales_ptr, out_ptr, out_scales_ptr, R, width, C, out_width, down, across,
    BLOCK: tl.constexpr, EIGHTS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """out [C, out_width] from codes [R, width], int32 words; scales [across, down] from [down, across]."""
    wide = tl.cdiv(width, WORDS)
    i = (tl.program_id(0) // wide) * EIGHTS
    j = (tl.program_id(0) % wide) * WORDS
    rows = 8 * (i + tl.arange(0, EIGHTS))[:, None]
    words = (j + tl.arange(0, WORDS))[None, :]
    w0, w1, w2, w3, w4, w5, w6, w7 = eight_transposed(
        row_of_eights(codes_ptr, rows, words, R, width),
        row_of_eights(codes_ptr, rows + 1, words, R, width),
        row_of_eights(codes_ptr, rows + 2, words, R, width),
        row_of_eights(codes_ptr, rows + 3, words, R, width),
        row_of_eights(codes_ptr, rows + 4, words, R, width),
        row_of_eights(codes_ptr, rows + 5, words, R, width),
        row_of_eights(codes_ptr, rows + 6, words, R, width),
        row_of_eights(codes_ptr, rows + 7, words, R, width),
    )
    columns = 8 * (j + tl.arange(0, WORDS))[:, None]
    eights = (i + tl.arange(0, EIGHTS))[None, :]
    store_transposed(out_ptr, w0, columns, eights, C, out_width)
    store_transposed(out_ptr, w1, columns + 1, eights, C, out_width)
    store_transposed(out_ptr, w2, columns + 2, eights, C, out_width)
    store_transposed(out_ptr, w3, columns + 3, eights, C, out_width)
    store_transposed(out_ptr, w4, columns + 4, eights, C, out_width)
    store_transposed(out_ptr, w5, columns + 5, eights, C, out_width)
    store_transposed(out_ptr, w6, columns + 6, eights, C, out_width)
    store_transposed(out_ptr, w7, columns + 7, eights, C, out_width)
    ABOVE: tl.constexpr = 8 * EIGHTS // BLOCK
    BESIDE: tl.constexpr = 8 * WORDS // BLOCK
    r = (8 * i // BLOCK + tl.arange(0, ABOVE))[:, None]
    c = (8 * j // BLOCK + tl.arange(0, BESIDE))[None, :]
    inside = (r < down) & (c < across)
    byte = tl.load(scales_ptr + r * across + c, mask=inside, other=0)
    tl.store(out_scales_ptr + c * down + r, byte, mask=inside)
