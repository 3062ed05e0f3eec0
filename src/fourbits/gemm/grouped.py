"""The entry of GEMMs of groups of rows, which only kernels serve; see quant/grouped.py.

docs/nvfp4.md, section 12: sums in FP32, both scales and the bias after them.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fourbits.quant.grouped_layout import GroupedOperand
from fourbits.triton_version import HAS_TRITON

if TYPE_CHECKING or HAS_TRITON:
    from fourbits.gemm.kernels.launch_grouped import (
        GroupedColumns,
        GroupedRows,
        GroupedSums,
        has_grouped_gemms,
    )


def unsupported_grouped_gemms(device: torch.device) -> str | None:
    """Why no grouped GEMM runs on a device that has kernels, or None."""
    return None if has_grouped_gemms(device) else "grouped GEMMs load tiles by TMA, from sm_90 on"


def rows_gemm(
    a: GroupedOperand,
    b: GroupedOperand,
    groups: int,
    sizes: tuple[int, int],
    out_dtype: torch.dtype,
    bias: torch.dtype | None,
) -> "GroupedRows":
    """The GEMM a [rows of e, K] @ b of e [N, K]^T for operands of these shapes. sizes: (N, K)."""
    return GroupedRows(a, b, groups, sizes, out_dtype, bias, a.values.device)


def sums_gemm(
    a: GroupedOperand, b: GroupedOperand, groups: int, sizes: tuple[int, int], height: int
) -> "GroupedSums":
    """The GEMM a of e [rows, M]^T @ b of e [rows, N], fp32 [groups, M, N]. sizes: (M, N)."""
    return GroupedSums(a, b, groups, sizes, height, a.values.device)


@functools.lru_cache(maxsize=1 << 10)
def column_sums(columns: int, groups: int, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """The sum of each group's rows: (x [M, N], contiguous, offsets) -> fp32 [groups, N]."""
    return GroupedColumns(columns, columns, groups, device)
