"""The largest magnitudes of both operands of a tensor, in a single pass.

Each program writes one partial maximum per operand; the kernel that quantizes takes their maximum. So nothing
needs atomics or clearing. An amax that a policy has stored replaces the operand's own; if both are stored,
the pass ends at once, which the GPU decides.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.quant.kernels.hadamard_triton import rotated
from fourbits.quant.kernels.rounding_triton import ABS_BITS, bf16_bits, bits_of, float_of, to_bf16
from fourbits.quant.kernels.scaling_triton import halved_rows, larger
from fourbits.quant.kernels.tile_triton import load_factor, load_tile, times


@triton.jit
def stored_amax(ptr, STORED: tl.constexpr):
    """The amax that a policy has stored, fp32; negative if the operand's own amax is to be used."""
    if STORED:
        stored = tl.load(ptr)
    else:
        stored = tl.full((), -1.0, tl.float32)
    return stored


@triton.jit
def largest_of(x, CONFIG: tl.constexpr):
    """The largest of magnitudes [1, COLUMNS], fp32; rounded last, because rounding preserves order."""
    largest = float_of(tl.max(tl.max(bits_of(x) & ABS_BITS, axis=1), axis=0))
    if CONFIG.transform is not None:
        largest = largest * CONFIG.transform.scale
    if CONFIG.transform is not None or CONFIG.through_bf16:
        largest = float_of(bf16_bits(largest))
    return largest


@triton.jit
def store_largest(out_ptr, x, stored, CONFIG: tl.constexpr):
    """One partial maximum from magnitudes [1, COLUMNS]."""
    tl.store(out_ptr + tl.program_id(0), tl.where(stored < 0.0, largest_of(x, CONFIG), stored))


@triton.jit
def with_tile(row_largest, column_largest, x, IS_BF16: tl.constexpr, key_ptr, stream, FIELDS: tl.constexpr,
              ROW: tl.constexpr, COLUMN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
              HARDWARE: tl.constexpr):  # fmt: skip
    """The largest magnitudes [1, COLUMNS] of both operands so far, updated with another tile x."""
    TALL: tl.constexpr = ROWS.bit_length() - 1
    if ROW is not None:
        row_largest = larger(row_largest, halved_rows(x, TALL, ROWS, COLUMNS))
    if COLUMN is not None:
        if COLUMN.transform is not None:
            TRANSFORM: tl.constexpr = COLUMN.transform
            if not IS_BF16:
                x = to_bf16(x, HARDWARE)
            x = rotated(x, key_ptr, stream, FIELDS, TRANSFORM, ROWS, COLUMNS)
        column_largest = larger(column_largest, halved_rows(x, TALL, ROWS, COLUMNS))
    return row_largest, column_largest


@triton.jit(do_not_specialize=["stream"])
def amax_kernel(
    x_ptr, x_stride, M, K, factor_ptr, row_amax_ptr, row_stored_ptr, column_amax_ptr, column_stored_ptr,
    key_ptr, stream,
    ROW: tl.constexpr, ROW_STORED: tl.constexpr, COLUMN: tl.constexpr, COLUMN_STORED: tl.constexpr,
    FIELDS: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Partial maxima of |y| over x [M, K] for the configs ROW and COLUMN (one may be None), one per program.

    key_ptr, stream: of COLUMN's transform, if its signs are random; stored_ptr: the amaxes that a policy has
    stored, if ROW_STORED or COLUMN_STORED. SCALED: x is multiplied by the factor. Programs read x from its
    start.
    """
    IS_BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16 and not SCALED
    factor = load_factor(factor_ptr, SCALED)
    across = tl.cdiv(K, COLUMNS)
    row_largest = tl.zeros((1, COLUMNS), tl.float32)
    column_largest = tl.zeros((1, COLUMNS), tl.float32)
    row_stored = stored_amax(row_stored_ptr, ROW_STORED)
    column_stored = stored_amax(column_stored_ptr, COLUMN_STORED)
    tiles = across * tl.cdiv(M, ROWS)
    if ROW is None or COLUMN is None:
        tiles = tl.where((row_stored < 0.0) & (column_stored < 0.0), tiles, 0)
    else:
        tiles = tl.where((row_stored < 0.0) | (column_stored < 0.0), tiles, 0)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        row = (tile // across) * ROWS
        x = load_tile(x_ptr, x_stride, row, (tile % across) * COLUMNS, M, K, ROWS, COLUMNS, HARDWARE)
        x = times(x, factor, SCALED)
        row_largest, column_largest = with_tile(
            row_largest, column_largest, x, IS_BF16, key_ptr, stream, FIELDS, ROW, COLUMN, ROWS, COLUMNS,
            HARDWARE,
        )  # fmt: skip
    if ROW is not None:
        store_largest(row_amax_ptr, row_largest, row_stored, ROW)
    if COLUMN is not None:
        store_largest(column_amax_ptr, column_largest, column_stored, COLUMN)
