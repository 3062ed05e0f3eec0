"""Both exact operands from a single pass over a tensor: the kernel behind the emulated backend.

A program owns a tile. The row operand (blocks along the columns) and the column operand (blocks and transform
down the rows) are computed from the same registers and written as BF16 values in the tensor's own layout, the
inputs of a BF16 GEMM.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.quant.kernels.packed_triton import scale_codes, tile_words
from fourbits.quant.kernels.packing_triton import load_held
from fourbits.quant.kernels.rounding_triton import bits_of, float_of, rounded_to, with_sign
from fourbits.quant.kernels.scaling_triton import block_amax, max_target
from fourbits.quant.kernels.tile_triton import (
    amax_of_parts,
    global_scale,
    load_factor,
    load_tile,
    prepared_tile,
    rounded_tile,
    tensor_amax,
    tile_start,
    times,
)


@triton.jit
def store_tile(out_ptr, stride, values, row, column, M, K, VECTOR: tl.constexpr, ROWS: tl.constexpr,
               COLUMNS: tl.constexpr):  # fmt: skip
    """Write the part of a tile inside [M, K] to out from (row, column) on; a thread holds VECTOR columns."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.max_contiguous(tl.multiple_of(tl.arange(0, COLUMNS), VECTOR), VECTOR)[None, :]
    inside = (rows < M - row) & (columns < K - column)
    start = out_ptr + row.to(tl.int64) * stride + column
    tl.store(start + rows * stride + columns, values, mask=inside)


@triton.jit
def bytes_of(words, DOWN: tl.constexpr, COLUMNS: tl.constexpr):
    """Bytes of words of eight rows, lowest first: uint8 [4 DOWN, COLUMNS]. words: int32 [DOWN, COLUMNS]."""
    even = tl.join(words, words >> 16)
    pairs = tl.join(even, even >> 8)
    return tl.reshape(tl.permute(pairs, (0, 2, 3, 1)), (4 * DOWN, COLUMNS)).to(tl.uint8)


@triton.jit
def store_maxima(amax_bits, maxima_ptr, VECTOR: tl.constexpr):
    """Store the maximum of every block, fp32, for amax policies. docs/nvfp4.md, section 16.

    Maxima are stored in the operand's register layout. A reduction here would need another layout, and the
    compiler would compute the whole operand a second time in that layout.
    """
    ABOVE: tl.constexpr = amax_bits.shape[0]
    ACROSS: tl.constexpr = amax_bits.shape[2]
    across = tl.max_contiguous(tl.multiple_of(tl.arange(0, ACROSS), VECTOR), VECTOR)[None, :]
    places = tl.program_id(0) * (ABOVE * ACROSS) + tl.arange(0, ABOVE)[:, None] * ACROSS + across
    tl.store(maxima_ptr + places, float_of(tl.reshape(amax_bits, (ABOVE, ACROSS))))


@triton.jit
def write_operand(x, IS_BF16: tl.constexpr, out_ptr, out_stride, scales_ptr, row, column, out_m, out_k, m,
                  amax_ptr, global_ptr, key_ptr, stream, FIELDS: tl.constexpr, PARTS: tl.constexpr,
                  CONFIG: tl.constexpr, PACKED: tl.constexpr, maxima_ptr, OBSERVE: tl.constexpr,
                  VECTOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                  HARDWARE: tl.constexpr, DEQUANTIZED: tl.constexpr = False,
                  HELD: tl.constexpr = False, GROUPED: tl.constexpr = False):  # fmt: skip
    """Quantize a tile by one config and write element * block scale, or if PACKED codes and scales.

    HELD: one thread holds every row of a block. DEQUANTIZED: multiply the values by the global scale, too,
    and round to the type of out. GROUPED: the tensor is a group of rows, and any program may have its first
    tile.
    """
    y = prepared_tile(x, IS_BF16, key_ptr, stream, FIELDS, CONFIG, ROWS, COLUMNS, HARDWARE, HELD)
    tensor_bits = tensor_amax(amax_ptr, global_ptr, CONFIG, PARTS, GROUPED)
    amax_bits = block_amax(y, CONFIG, ROWS, COLUMNS, HELD)
    if OBSERVE:
        store_maxima(amax_bits, maxima_ptr, VECTOR if CONFIG.axis == 0 else 1)
    rounded, scaled, scale = rounded_tile(
        y, amax_bits, tensor_bits, row, column, key_ptr, stream, FIELDS, CONFIG, ROWS, COLUMNS
    )
    if PACKED:
        words = tile_words(
            y, rounded, scaled, scale, row, column, m, out_k, CONFIG, False, True, ROWS, COLUMNS, HARDWARE
        )
        codes = bytes_of(words, ROWS // 8, COLUMNS)
        store_tile(
            out_ptr, out_stride, codes, row // 2, column, out_m // 2, out_k, VECTOR, ROWS // 2, COLUMNS
        )
        BLOCKS: tl.constexpr = ROWS // CONFIG.block_rows
        bytes_ = tl.reshape(scale_codes(scale, CONFIG), (BLOCKS, COLUMNS)).to(tl.uint8)
        store_tile(scales_ptr, out_stride, bytes_, row // CONFIG.block_rows, column,
                   tl.cdiv(out_m, CONFIG.block_rows), out_k, VECTOR, BLOCKS, COLUMNS)  # fmt: skip
    else:
        values = tl.reshape(with_sign(rounded * scale, scaled), (ROWS, COLUMNS))
        if DEQUANTIZED:
            values = values * global_scale(tensor_bits, CONFIG)
        values = rounded_to(values, out_ptr.dtype.element_ty, HARDWARE)
        store_tile(out_ptr, out_stride, values, row, column, out_m, out_k, VECTOR, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["row_stream", "column_stream"])
def operands_kernel(
    x_ptr, x_stride, M, K, factor_ptr,
    row_ptr, row_stride, row_k, row_amax_ptr, row_key_ptr, row_stream,
    column_ptr, column_stride, column_scales_ptr, column_m, column_amax_ptr, column_key_ptr, column_stream,
    row_global_ptr, column_global_ptr, row_maxima_ptr, column_maxima_ptr,
    ROW: tl.constexpr, ROW_FIELDS: tl.constexpr, ROW_PARTS: tl.constexpr,
    COLUMN: tl.constexpr, COLUMN_FIELDS: tl.constexpr, COLUMN_PARTS: tl.constexpr,
    COLUMN_PACKED: tl.constexpr, COLUMN_VECTOR: tl.constexpr, ROW_HELD: tl.constexpr,
    COLUMN_HELD: tl.constexpr, OBSERVE: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HARDWARE: tl.constexpr,
    DEQUANTIZED: tl.constexpr = False,
):  # fmt: skip
    """Exact operands of x [M, K]: row_ptr [M, row_k] by the config ROW, column_ptr [column_m, K] by
    COLUMN.

    Either config may be None. With COLUMN_PACKED column_ptr is uint8 [column_m / 2, K], two rows to a byte,
    and column_scales_ptr uint8 [column_m / 16, K] (32 for MX): the packed form transposed, so that
    neighbouring bytes stay together. global_ptr: receives the global scale. amax: fp32 partial maxima.
    DEQUANTIZED: outputs are multiplied by the global scale and rounded to their type. SCALED: x is multiplied
    by the factor, and only the column operand exists. ROW_HELD, COLUMN_HELD: number of neighbours along the
    contraction that a thread reads for either operand, 0 for any. With OBSERVE row_maxima_ptr and
    column_maxima_ptr, fp32 [blocks of all tiles], take the blocks' maxima.
    """
    row, column = tile_start(K, ROWS, COLUMNS)
    IS_BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16 and not SCALED
    if ROW is not None:
        if ROW_HELD == 0:
            x = load_tile(x_ptr, x_stride, row, column, M, K, ROWS, COLUMNS, HARDWARE)
        else:
            x = load_held(x_ptr, x_stride, row, column, M, K, 1, ROW_HELD, ROWS, COLUMNS, HARDWARE)
        write_operand(x, IS_BF16, row_ptr, row_stride, row_ptr, row, column, M, row_k, M, row_amax_ptr,
                      row_global_ptr, row_key_ptr, row_stream, ROW_FIELDS, ROW_PARTS, ROW, False,
                      row_maxima_ptr, OBSERVE, 8, ROWS, COLUMNS, HARDWARE, DEQUANTIZED,
                      ROW_HELD > 0)  # fmt: skip
    if COLUMN is not None:
        if ROW is None or ROW_HELD > 0 or COLUMN_HELD > 0:  # the tile is in a cache by now
            if COLUMN_HELD == 0:
                x = load_tile(x_ptr, x_stride, row, column, M, K, ROWS, COLUMNS, HARDWARE)
            else:
                x = load_held(x_ptr, x_stride, row, column, M, K, 0, COLUMN_HELD, ROWS, COLUMNS, HARDWARE)
        x = times(x, load_factor(factor_ptr, SCALED), SCALED)
        write_operand(x, IS_BF16, column_ptr, column_stride, column_scales_ptr, row, column, column_m, K, M,
                      column_amax_ptr, column_global_ptr, column_key_ptr, column_stream, COLUMN_FIELDS,
                      COLUMN_PARTS, COLUMN, COLUMN_PACKED, column_maxima_ptr, OBSERVE, COLUMN_VECTOR, ROWS,
                      COLUMNS, HARDWARE, DEQUANTIZED, COLUMN_HELD > 0)  # fmt: skip


@triton.jit(do_not_specialize=["row_blocks", "column_blocks"])
def stats_kernel(row_maxima_ptr, row_entries, row_blocks, row_place, row_amax_ptr, column_maxima_ptr,
                 column_entries, column_blocks, column_place, column_amax_ptr, largest_ptr, counts_ptr,
                 counts_stride, ROW: tl.constexpr, ROW_PARTS: tl.constexpr, COLUMN: tl.constexpr,
                 COLUMN_PARTS: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Reduce the block maxima of both operands to the largest, and count saturated blocks.

    Updates an operand's entry of largest_ptr (int32: bit patterns of magnitudes, negative before) and of
    counts_ptr (int64: saturated blocks; all blocks, counts_stride apart). Either config may be None.
    """
    if ROW is not None:
        add_stats(row_maxima_ptr, row_entries, row_blocks, row_place, row_amax_ptr, largest_ptr, counts_ptr,
                  counts_stride, ROW, ROW_PARTS, CHUNK)  # fmt: skip
    if COLUMN is not None:
        add_stats(column_maxima_ptr, column_entries, column_blocks, column_place, column_amax_ptr,
                  largest_ptr, counts_ptr, counts_stride, COLUMN, COLUMN_PARTS, CHUNK)  # fmt: skip


@triton.jit
def add_stats(maxima_ptr, entries, blocks, place, amax_ptr, largest_ptr, counts_ptr, counts_stride,
              CONFIG: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Compute one operand's stats with any number of programs; maxima and counts are exact in any order.

    A block is saturated when the scale that maps its maximum to the largest element would have rounded above
    the largest of the format (448 for E4M3). Padding has the scale 0.
    """
    LIMIT: tl.constexpr = CONFIG.scale.saturation_limit
    tensor_bits = amax_of_parts(amax_ptr, PARTS)
    largest = tl.zeros((CHUNK,), tl.int32)
    saturated = tl.zeros((CHUNK,), tl.int32)
    for first in range(tl.program_id(0) * CHUNK, entries, tl.num_programs(0) * CHUNK):
        i = first + tl.arange(0, CHUNK)
        bits = bits_of(tl.load(maxima_ptr + i, mask=i < entries, other=0.0))
        largest = tl.maximum(largest, bits)
        saturated += ((i < entries) & (max_target(bits, tensor_bits, CONFIG) > LIMIT)).to(tl.int32)
    tl.atomic_max(largest_ptr + place, tl.max(largest, axis=0))
    tl.atomic_add(counts_ptr + place * counts_stride, tl.sum(saturated, axis=0).to(tl.int64))
    if tl.program_id(0) == 0:
        tl.store(counts_ptr + place * counts_stride + 1, blocks.to(tl.int64))
