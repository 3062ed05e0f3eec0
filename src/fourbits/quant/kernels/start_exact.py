"""Launches of the kernels that make exact operands, with their amaxes and notes: outputs, tiles, grids."""
# pyright: reportCallIssue=false, reportArgumentType=false
# (kernels are launched with the options of their compiler)

from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.quant.kernels.amax_triton import amax_kernel
from fourbits.quant.kernels.exact_triton import operands_kernel
from fourbits.quant.kernels.kernel_config import NoiseKey, Plan
from fourbits.quant.kernels.start_stats import Observed, maxima_of, notes

__all__ = ["Observed", "Tile", "TurnedCodes", "amax_parts", "exact", "notes"]

#: warps of an amax pass; each of its programs leaves a partial maximum
_AMAX_WARPS = 1024
#: rows of a tile of which a thread can hold several columns
SHORT = 32


#: registers a thread with which six programs of two warps share a processor's 65,536
_SIX_PROGRAMS = 168


class Tile(NamedTuple):
    """A program's tile, its warps, and how many neighbouring columns of a column operand one thread holds."""

    rows: int
    columns: int
    warps: int
    vector: int = 8


class TurnedCodes(NamedTuple):
    """A packed column operand with its rows along the tensor's columns: what is stored, transposed."""

    #: uint8 [Mp / 2, K], two rows to a byte
    codes: Tensor
    #: uint8 [Mp / block, K]
    scales: Tensor


def amax_parts(
    x: Tensor,
    row: Plan | None,
    column: Plan | None,
    key: NoiseKey | None,
    stored: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Partial maxima of |y| for both plans in one read, fp32 [2, parts]; a missing plan's are not written.

    x: [M, K] with unit stride along K; key: of the column plan, needed where its signs are drawn; stored:
    fp32 scalars that take the place of the plans' own maxima unless they are negative.
    """
    tile = _amax_tile(x, column)
    count = _AMAX_WARPS // tile.warps if x.is_cuda else 2
    parts = torch.empty((2, count), dtype=torch.float32, device=x.device)
    entries, key_fields, stream = key or NoiseKey(parts)
    amax_kernel[(count,)](
        x,
        x.stride(0),
        x.shape[0],
        x.shape[1],
        parts[0],
        parts if stored[0] is None else stored[0],
        parts[1],
        parts if stored[1] is None else stored[1],
        entries,
        stream,
        ROW=row,
        ROW_STORED=stored[0] is not None,
        COLUMN=column,
        COLUMN_STORED=stored[1] is not None,
        FIELDS=key_fields,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        STAGES=3,
        HARDWARE=x.is_cuda,
        num_warps=tile.warps,
        enable_fp_fusion=False,
    )
    return parts


def exact(
    x: Tensor,
    row: Plan | None,
    column: Plan | None,
    amaxes: tuple[Tensor | None, Tensor | None],
    keys: tuple[NoiseKey | None, NoiseKey | None],
    observe: bool = False,
    packed_column: bool = False,
) -> tuple[Tensor | None, Tensor | TurnedCodes | None, Tensor, Observed | None]:
    """Exact values for both plans in one read, bf16 in x's layout, and both global scales, fp32 [2].

    amaxes: fp32 vectors of partial maxima (or of one maximum), for plans with a scale of the whole tensor;
    all plans have one if `observe` asks for what amax policies learn from. packed_column: the column plan,
    of 4-bit elements, gives codes and block scales instead of values.
    """
    M, K = x.shape
    scales = torch.empty(2, dtype=torch.float32, device=x.device)
    row_values = None if row is None else matrix(x, M, rounded_up(K, 16))
    column_rows = 0 if column is None else rounded_up(M, group(column))
    codes, column_values = None, None
    if column is not None and packed_column:
        codes = _turned_codes(x, column, column_rows)
    elif column is not None:
        column_values = matrix(x, column_rows, K)
    tile = _exact_tile(x, row, column)
    row_key, column_key = (key or NoiseKey(scales) for key in keys)
    row_amax, column_amax = (scales[:1] if amax is None else amax for amax in amaxes)
    row_out = scales[None] if row_values is None else row_values
    column_out = scales[None] if column_values is None else column_values
    count = programs(x, tile)
    seen = None
    if observe:
        seen = Observed(
            maxima_of(row, row_amax, tile[:2], count), maxima_of(column, column_amax, tile[:2], count)
        )
    operands_kernel[(count,)](
        x,
        x.stride(0),
        M,
        K,
        row_out,
        row_out.stride(0),
        row_out.shape[1],
        row_amax,
        row_key.entries,
        row_key.stream,
        column_out if codes is None else codes.codes,
        column_out.stride(0) if codes is None else K,
        scales if codes is None else codes.scales,
        column_rows,
        column_amax,
        column_key.entries,
        column_key.stream,
        scales,
        scales if seen is None or seen.row is None else seen.row.of_blocks,
        scales if seen is None or seen.column is None else seen.column.of_blocks,
        ROW=row,
        ROW_FIELDS=row_key.fields,
        ROW_PARTS=row_amax.shape[0],
        COLUMN=column,
        COLUMN_FIELDS=column_key.fields,
        COLUMN_PARTS=column_amax.shape[0],
        COLUMN_PACKED=packed_column,
        COLUMN_VECTOR=tile.vector,
        OBSERVE=observe,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        HARDWARE=x.is_cuda,
        num_warps=tile.warps,
        **_six_programs(row, column, tile, observe),
        enable_fp_fusion=False,
    )
    return row_values, column_values if codes is None else codes, scales, seen


def _exact_tile(x: Tensor, row: Plan | None, column: Plan | None) -> Tile:
    """For both operands 4 columns a thread, which leaves registers for more warps; for one 8, 16 bytes."""
    rows = max(tall(row), tall(column))
    if not x.is_cuda:
        return Tile(rows, 128, 4)
    if rows > SHORT:
        return wide(x, rows, 64, 1)
    if row is not None and column is not None:
        return wide(x, rows, 256, 4)
    return wide(x, max(8, rows), 1024, 8 if rows <= 16 else 4)


def _six_programs(row: Plan | None, column: Plan | None, tile: Tile, observe: bool) -> dict[str, int]:
    """Room for six programs of two warps on a processor, where maxima would take a few registers too many."""
    both = row is not None and column is not None
    return {"maxnreg": _SIX_PROGRAMS} if observe and both and tile.warps == 2 else {}


def _amax_tile(x: Tensor, column: Plan | None) -> Tile:
    if not x.is_cuda:
        return Tile(tall(column), 128, 4)
    rows = max(16, tall(column))
    return wide(x, rows, 64, 1) if rows > SHORT else wide(x, rows, 512, 4)


def wide(x: Tensor, rows: int, columns: int, vector: int) -> Tile:
    """A tile of at most `columns` columns, fewer where that wastes less of x; all threads share a row."""
    while columns > 32 * vector and x.shape[1] % columns:
        columns //= 2
    return Tile(rows, columns, columns // (32 * vector), vector)


def tall(plan: Plan | None) -> int:
    """Rows that a tile must keep together for a plan."""
    if plan is None:
        return 1
    return max(plan.block_rows, group(plan)) if plan.axis == 0 else plan.block_rows


def group(plan: Plan) -> int:
    """What a contraction is padded to: 16, or the size of the transform."""
    return max(16, plan.transform.size) if plan.transform is not None else 16


def programs(x: Tensor, tile: Tile) -> int:
    """Programs that cover x; one for an empty x, to write its global scale."""
    return max(1, -(-x.shape[0] // tile.rows) * -(-x.shape[1] // tile.columns))


def _turned_codes(x: Tensor, plan: Plan, rows: int) -> TurnedCodes:
    blocks = -(-rows // plan.block_rows)
    codes, scales = (
        torch.empty((count, x.shape[1]), dtype=torch.uint8, device=x.device) for count in (rows // 2, blocks)
    )
    return TurnedCodes(codes, scales)


def matrix(x: Tensor, rows: int, columns: int) -> Tensor:
    """Uninitialised bf16 [rows, columns] whose rows begin on 32 bytes, as bulk copies want."""
    return torch.empty((rows, rounded_up(columns, 16)), dtype=torch.bfloat16, device=x.device)[:, :columns]


def rounded_up(size: int, multiple: int) -> int:
    """The next multiple at or above size."""
    return -(-size // multiple) * multiple
