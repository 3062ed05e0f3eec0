"""The tiles of a GEMM that kernels of FP4 sums compute by one dot per instruction, and the proof.

The twin of the proof in `kernels/chain_operand_triton.py` and `chain_triton.py`. docs/nvfp4.md, section 22.4.
"""

import torch
from torch import Tensor

from fourbits.gemm.reference.tensor_core import TensorCore, split
from fourbits.gemm.reference.tensor_core_sums import Rows, last_bits

#: a tile's rows and columns
TILE = 128
#: the path of a tile: every term is needed; no term is truncated; one dot per instruction is exact
EVERY_TERM, EXACT, SHORT = 0, 1, 2
#: scales below and above 2^-45 and 2^45 prove nothing; norms are taken larger than they are
_WIDEST, _SLACK = 45, 1.015625


def paths(a: Rows, b: Rows, core: TensorCore, tile: tuple[int, int] = (TILE, TILE)) -> Tensor:
    """The path that each tile of a [M, K] times b [N, K] takes: int64 [M / tile, N / tile], rounded up."""
    (ratio_a, spread_a), (ratio_b, spread_b) = (
        _extents(rows, core, height) for rows, height in zip((a, b), tile, strict=True)
    )
    exact = spread_a[:, None] * spread_b[None, :] < 2.0**core.fraction_bits  # false for NaN, 0 times infinity
    short = exact & (ratio_a[:, None] * ratio_b[None, :] < 2.0**24).all(2)
    return exact.to(torch.int64) + short.to(torch.int64)


def _extents(rows: Rows, core: TensorCore, height: int) -> tuple[Tensor, Tensor]:
    """Per tile of rows: norm over last bit per instruction [tiles, steps], and of whole rows [tiles]."""
    values = rows.values().abs()
    missing = -values.shape[1] % core.products
    padded = torch.nn.functional.pad(torch.nan_to_num(values, posinf=0.0), (0, missing))
    steps = padded.unflatten(1, (-1, core.products))
    lowest = torch.where(steps == 0, torch.inf, torch.exp2(last_bits(steps).to(torch.float64))).amin(2)
    norms = torch.linalg.vector_norm(steps, dim=2)
    top, lost = _scales(rows, values)
    largest = torch.maximum(torch.linalg.vector_norm(norms, dim=1) * _SLACK, top)
    spread = torch.where(lost, torch.inf, largest / lowest.amin(1))
    return _of_tiles(norms * _SLACK / lowest, height), _of_tiles(spread[:, None], height)[:, 0]


def _scales(rows: Rows, values: Tensor) -> tuple[Tensor, Tensor]:
    """Per row, the largest power of two of a scale whose values are not all 0, and whether one is unfit."""
    assert rows.scales is not None
    scales = rows.scales.to(torch.float64).abs()
    exponent = split(scales, rows.scales.dtype)[1]
    counts = (values.unflatten(1, (scales.shape[1], -1)) > 0).any(2)
    top = torch.where(counts, torch.exp2(exponent.to(torch.float64)), 0.0).amax(1)
    unfit = torch.isnan(scales) | (counts & (exponent.abs() > _WIDEST))
    return top, unfit.any(1)


def _of_tiles(x: Tensor, height: int) -> Tensor:
    """The largest entry of each `height` rows."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % height)).unflatten(0, (-1, height)).amax(1)
