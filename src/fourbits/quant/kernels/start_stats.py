"""What amax policies learn from: the maxima of blocks, and the launch that brings them together."""
# pyright: reportCallIssue=false, reportArgumentType=false
# (kernels are launched with the options of their compiler)

from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.quant.kernels.exact_triton import notes_kernel
from fourbits.quant.kernels.kernel_config import Plan

#: notes that a program reads at a time, and the most programs that read them
_NOTES_CHUNK, _NOTES_PROGRAMS = 4096, 1024


class Maxima(NamedTuple):
    """What amax policies learn from of one operand, as `operands_kernel` leaves it."""

    #: fp32: maxima of the blocks of all tiles, and the amax in parts that scaled them
    of_blocks: Tensor
    amax: Tensor
    plan: Plan


class Observed(NamedTuple):
    """The same of both operands."""

    row: Maxima | None
    column: Maxima | None


def maxima_of(plan: Plan | None, amax: Tensor, tile: tuple[int, int], programs: int) -> Maxima | None:
    """Room for the maxima of a plan's blocks, in all tiles [rows, columns]; None without a plan."""
    if plan is None:
        return None
    blocks = (tile[0] // plan.block_rows) * (tile[1] // plan.block_columns)
    of_blocks = torch.empty(programs * blocks, dtype=torch.float32, device=amax.device)
    return Maxima(of_blocks, amax, plan)


def notes(
    seen: Observed, blocks: tuple[int, int], places: tuple[int, int], into: tuple[Tensor, Tensor]
) -> None:
    """Add largest magnitudes, saturated and all blocks of the row and the column plan.

    blocks: of each plan; places: where each belongs in `into`, fp32 [n] (negative before) and int64 [n, 2 or
    more] (zero before); negative for a plan that is missing.
    """
    largest, counts = into
    of_row, of_column = (_facts(maxima, largest) for maxima in seen)
    entries = max(of_row[0].numel(), of_column[0].numel())
    notes_kernel[(min(_NOTES_PROGRAMS, max(1, -(-entries // _NOTES_CHUNK))),)](
        of_row[0],
        of_row[0].numel(),
        blocks[0],
        places[0],
        of_row[1],
        of_column[0],
        of_column[0].numel(),
        blocks[1],
        places[1],
        of_column[1],
        largest.view(torch.int32),
        counts,
        counts.stride(0),
        ROW=of_row[2],
        ROW_PARTS=of_row[1].shape[0],
        COLUMN=of_column[2],
        COLUMN_PARTS=of_column[1].shape[0],
        CHUNK=_NOTES_CHUNK,
        num_warps=8,
    )


def _facts(maxima: Maxima | None, nothing: Tensor) -> tuple[Tensor, Tensor, Plan | None]:
    return (nothing[:0], nothing[:1], None) if maxima is None else maxima
