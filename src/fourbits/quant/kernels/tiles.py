"""Chooses tiles of the quantizing kernels: rows, columns and warps of a program."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourbits.quant.kernels.kernel_config import KernelConfig

#: rows of a tile in which a thread can hold several columns
SHORT = 32
#: registers per thread with which twelve warps share the 65,536 of an SM
TWELVE_WARPS = 168
#: elements per thread of a scale search, which keeps two registers for each, and the registers with which
#: sixteen warps share an SM
SEARCHED, SIXTEEN_WARPS = 32, 128


class Tile(NamedTuple):
    """A program's tile, its warps, and the number of neighbouring columns of a column operand per thread.

    held: number of neighbours along a row that a thread reads for a row operand, 0 for any; column_held: the
    same along a column for a column operand.
    """

    rows: int
    columns: int
    warps: int
    vector: int = 8
    held: int = 0
    column_held: int = 0


class Shape(NamedTuple):
    """The tensor that is read, [M, K], and whether it is on a GPU or read by Triton's interpreter."""

    M: int
    K: int
    on_gpu: bool


def exact_tile(shape: Shape, row: KernelConfig | None, column: KernelConfig | None) -> Tile:
    """4 columns per thread for both operands, which leaves registers for more warps; 8 (16 bytes) for one.

    Errors of candidate scales are summed along a row of a block, so with a scale search one thread reads a
    whole row.
    """
    rows = max(tall(row), tall(column))
    held = row.block_columns if row is not None and row.metric else 0
    # 128 rows per thread spill registers and exceed the instruction cache
    column_held = 32 if rows > 64 and row is None else 0
    if not shape.on_gpu:
        return Tile(rows, 128, 4, held=held, column_held=column_held)
    if column_held:
        return Tile(rows, 32, 4, 1, column_held=column_held)
    if rows > SHORT:
        return wide(shape.K, rows, 64, 1)._replace(held=held)
    if any(config is not None and config.search for config in (row, column)):
        return searching_tile(shape, rows, column)._replace(held=held)
    if row is not None and column is not None:
        return wide(shape.K, rows, 256, 4 if rows <= 16 else 2)._replace(held=held)
    if held and rows > 1:
        return wide(shape.K, rows, 256, 2)._replace(held=held)
    if held:
        return wide(shape.K, 8, 1024, 8)._replace(held=held)
    return wide(shape.K, max(8, rows), 1024, 8 if rows <= 16 else 4)


def searching_tile(shape: Shape, rows: int, column: KernelConfig | None) -> Tile:
    """SEARCHED elements per thread. shape: on a GPU; rows: at most SHORT, that operands need together."""
    if rows == 1:
        return wide(shape.K, SEARCHED // 8, 1024, 8)
    tile = wide(shape.K, rows, 256, SEARCHED // max(16, rows))
    return tile._replace(column_held=rows) if column is not None and column.search else tile


def amax_tile(shape: Shape, column: KernelConfig | None) -> Tile:
    """The tile of the amax pass."""
    if not shape.on_gpu:
        return Tile(tall(column), 128, 4)
    rows = max(16, tall(column))
    return wide(shape.K, rows, 64, 1) if rows > SHORT else wide(shape.K, rows, 512, 4)


def amax_options(shape: Shape, tile: Tile) -> dict[str, Any]:
    """The launch options of the amax pass for a tile."""
    return {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "STAGES": 3,
        "HARDWARE": shape.on_gpu,
        "num_warps": tile.warps,
        "enable_fp_fusion": False,
    }


def packed_tile(shape: Shape, config: KernelConfig) -> tuple[Tile, int]:
    """The tile of a packed operand, and the neighbours along the contraction per thread (0: any)."""
    rows, square = tall(config), config.block_rows == config.block_columns
    if not shape.on_gpu:
        return Tile(rows, 128, 4), min(16, rows) if config.axis == 0 else 16
    if rows > 64:
        return Tile(rows, 32, 4), 32
    if rows > SHORT:
        return wide(shape.K, rows, 64, 1), 0
    if square and config.metric:  # errors are summed along the contraction, 16 elements in one thread
        return Tile(rows, 128, 4), rows
    if square:  # 64 elements per thread
        tile = wide(shape.K, rows, 512 * 16 // rows, 8)
        return tile._replace(warps=tile.columns * rows // (32 * 64)), 0
    if config.axis == 1:
        return Tile(4, 512, 2), config.block_columns
    simple = config.metric == "" and config.rounding == "rne"
    return Tile(64, 128 if simple or rows > 16 else 64, 4), rows


def wide(K: int, rows: int, columns: int, vector: int) -> Tile:
    """A tile of at most `columns` columns, fewer if that wastes less of K; all threads share a row."""
    while columns > 32 * vector and K % columns:
        columns //= 2
    return Tile(rows, columns, columns // (32 * vector), vector)


def tall(config: KernelConfig | None) -> int:
    """Rows that a tile must keep together for an operand."""
    if config is None:
        return 1
    return max(config.block_rows, group(config)) if config.axis == 0 else config.block_rows


def group(config: KernelConfig) -> int:
    """The multiple that a contraction is padded to: 16, or the size of the transform."""
    return max(16, config.transform.size) if config.transform is not None else 16


def programs(shape: Shape, tile: Tile) -> int:
    """The number of programs that cover the tensor; one for an empty tensor, to write its global scale."""
    return max(1, -(-shape.M // tile.rows) * -(-shape.K // tile.columns))


def matrix(rows: int, columns: int, device: torch.device) -> Tensor:
    """Uninitialised bf16 [rows, columns] with rows aligned to 32 bytes, which TMA can read."""
    width = rounded_up(columns, 16)
    full = torch.empty((rows, width), dtype=torch.bfloat16, device=device)
    return full if width == columns else full[:, :columns]


def rounded_up(size: int, multiple: int) -> int:
    """The next multiple at or above size."""
    return -(-size // multiple) * multiple
