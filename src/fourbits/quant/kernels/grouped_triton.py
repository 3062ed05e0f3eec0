"""Quantizes groups of rows, such as the tokens of experts: the quantizer's tiles, placed by a map.

A first kernel computes the map of tiles from the groups' offsets, on the device. The others look up their
tile's group, rows and position in the map, and quantize it like the kernels for whole tensors, with the
group's own amax, key and scale. The reference is reference/grouped.py.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.quant.kernels.amax_triton import largest_of, with_tile
from fourbits.quant.kernels.exact_triton import write_operand
from fourbits.quant.kernels.packing_triton import load_held
from fourbits.quant.kernels.rounding_triton import bits_of
from fourbits.quant.kernels.tile_triton import load_tile, tile_start


@triton.jit
def tile_map_kernel(
    offsets_ptr, entries_ptr, starts_ptr, tiles, groups,
    HEIGHT: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Write the map of tiles of HEIGHT rows, int32 [tiles, 4], and each group's first tile, [groups + 1].

    offsets_ptr: int32 [groups + 1]. GROUPS: a power of two from `groups` on; a program fills TILES entries.
    """
    group = tl.arange(0, GROUPS)
    first = tl.load(offsets_ptr + group, mask=group < groups, other=0)
    last = tl.load(offsets_ptr + group + 1, mask=group < groups, other=0)
    ends = tl.cumsum((last - first + (HEIGHT - 1)) // HEIGHT, axis=0)
    if tl.program_id(0) == 0:
        tl.store(starts_ptr + group + 1, ends, mask=group < groups)
        tl.store(starts_ptr, 0)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    over = ends[None, :] <= tile[:, None]
    its_group = tl.minimum(tl.sum(over.to(tl.int32), axis=1), groups - 1)
    place = (tile - tl.max(tl.where(over, ends[None, :], 0), axis=1)) * HEIGHT
    begin = tl.load(offsets_ptr + its_group) + place
    rows = tl.minimum(tl.load(offsets_ptr + its_group + 1) - begin, HEIGHT)
    inside = tile < tl.max(ends, axis=0)
    entry = entries_ptr + tile * 4
    tl.store(entry, tl.where(inside, its_group, 0), mask=tile < tiles)
    tl.store(entry + 1, tl.where(inside, begin, 0), mask=tile < tiles)
    tl.store(entry + 2, tl.where(inside, rows, 0), mask=tile < tiles)
    tl.store(entry + 3, tl.where(inside, place, 0), mask=tile < tiles)


@triton.jit(do_not_specialize=["stream"])
def grouped_amax_kernel(
    x_ptr, x_stride, K, entries_ptr, row_amax_ptr, column_amax_ptr, key_ptr, key_stride, stream,
    ROW: tl.constexpr, COLUMN: tl.constexpr, FIELDS: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Find the largest |y| of each group for the configs ROW and COLUMN (either may be None), as int32 bits.

    PARTS programs share an entry of the map. Maxima of bit patterns are exact in any order; they start at 0.
    """
    entry = entries_ptr + (tl.program_id(0) // PARTS) * 4
    group, begin, rows = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    IS_BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    across = tl.cdiv(K, COLUMNS)
    row_largest = tl.zeros((1, COLUMNS), tl.float32)
    column_largest = tl.zeros((1, COLUMNS), tl.float32)
    keys = key_ptr + group * key_stride
    its_stream = stream + group * 8
    tiles = across * tl.cdiv(rows, ROWS)
    for tile in tl.range(tl.program_id(0) % PARTS, tiles, PARTS, num_stages=STAGES):
        row = begin + (tile // across) * ROWS
        x = load_tile(
            x_ptr, x_stride, row, (tile % across) * COLUMNS, begin + rows, K, ROWS, COLUMNS, HARDWARE
        )
        row_largest, column_largest = with_tile(
            row_largest, column_largest, x, IS_BF16, keys, its_stream, FIELDS, ROW, COLUMN, ROWS, COLUMNS,
            HARDWARE,
        )  # fmt: skip
    if ROW is not None:
        tl.atomic_max(row_amax_ptr + group, bits_of(largest_of(row_largest, ROW)))
    if COLUMN is not None:
        tl.atomic_max(column_amax_ptr + group, bits_of(largest_of(column_largest, COLUMN)))


@triton.jit(do_not_specialize=["row_stream", "column_stream"])
def grouped_operands_kernel(
    x_ptr, x_stride, K, entries_ptr, key_ptr, key_stride,
    row_ptr, row_stride, row_k, row_amax_ptr, row_global_ptr, row_stream,
    column_ptr, column_stride, column_amax_ptr, column_global_ptr, column_stream,
    ROW: tl.constexpr, ROW_FIELDS: tl.constexpr, ROW_PADDED: tl.constexpr, ROW_HELD: tl.constexpr,
    COLUMN: tl.constexpr, COLUMN_FIELDS: tl.constexpr, COLUMN_VECTOR: tl.constexpr,
    COLUMN_HELD: tl.constexpr, HEIGHT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Exact operands of the groups of x [.., K], as `operands_kernel` computes them for a whole tensor.

    The row operand goes to the group's rows of row_ptr, or with ROW_PADDED to the tile's rows in an array of
    all tiles of HEIGHT rows. The column operand always goes to such an array. global_ptr: fp32 [groups].
    amax: fp32 [groups].
    """
    tile_row, column = tile_start(K, ROWS, COLUMNS)
    entry = entries_ptr + (tile_row // HEIGHT) * 4
    group, begin, rows, place = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    if rows > 0:
        within = tile_row % HEIGHT
        local = place + within  # the row within its group, on which random bits depend
        first = begin + within
        end = begin + rows
        keys = key_ptr + group * key_stride
        IS_BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
        if ROW is not None:
            if ROW_HELD == 0:
                x = load_tile(x_ptr, x_stride, first, column, end, K, ROWS, COLUMNS, HARDWARE)
            else:
                x = load_held(x_ptr, x_stride, first, column, end, K, 1, ROW_HELD, ROWS, COLUMNS, HARDWARE)
            if ROW_PADDED:
                out_row, out_end = tile_row, local + ROWS
            else:
                out_row, out_end = first, place + rows
            out = row_ptr + (out_row - local).to(tl.int64) * row_stride
            write_operand(x, IS_BF16, out, row_stride, out, local, column, out_end, row_k, out_end,
                          row_amax_ptr + group, row_global_ptr + group, keys, row_stream + group * 8,
                          ROW_FIELDS, 1, ROW, False, row_global_ptr, False, 8, ROWS, COLUMNS, HARDWARE,
                          False, ROW_HELD > 0, True)  # fmt: skip
        if COLUMN is not None:
            if ROW is None or ROW_HELD > 0 or COLUMN_HELD > 0:  # a cache has the tile by now
                if COLUMN_HELD == 0:
                    x = load_tile(x_ptr, x_stride, first, column, end, K, ROWS, COLUMNS, HARDWARE)
                else:
                    x = load_held(
                        x_ptr, x_stride, first, column, end, K, 0, COLUMN_HELD, ROWS, COLUMNS, HARDWARE
                    )
            out = column_ptr + (tile_row - local).to(tl.int64) * column_stride
            write_operand(x, IS_BF16, out, column_stride, out, local, column, local + ROWS, K, local + ROWS,
                          column_amax_ptr + group, column_global_ptr + group, keys, column_stream + group * 8,
                          COLUMN_FIELDS, 1, COLUMN, False, column_global_ptr, False, COLUMN_VECTOR, ROWS,
                          COLUMNS, HARDWARE, False, COLUMN_HELD > 0, True)  # fmt: skip
