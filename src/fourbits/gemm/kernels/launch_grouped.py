"""Launches GEMMs of groups of rows, one launch for all groups."""

from typing import Any

import torch
from torch import Tensor

from fourbits.gemm.kernels.grouped_triton import (
    grouped_columns_kernel,
    grouped_rows_kernel,
    grouped_sums_kernel,
)
from fourbits.gemm.kernels.launch_bf16 import LEAVING
from fourbits.gemm.kernels.tiles import GpuModel, Tile, ceil_div, gpu_model, grouped_tile, sums_tile
from fourbits.quant.grouped_layout import GroupedOperand, GroupTiles, most_tiles
from fourbits.quant.kernels.allocate import allocator
from fourbits.quant.kernels.launcher import Box, Launcher

_ROWS, _COLUMNS = 32, 128
#: registers per thread times warps of a program if two programs share an SM
_OF_TWO = 65536 // 2 // 32


class GroupedRows:
    """a [rows of e, K] @ b of e [N, K]^T for every group e."""

    def __init__(
        self,
        a: GroupedOperand,
        b: GroupedOperand,
        groups: int,
        sizes: tuple[int, int],
        out_dtype: torch.dtype,
        bias: torch.dtype | None,
        device: torch.device,
    ) -> None:
        """b: padded to equal rows per group; sizes: (N, K), beyond which columns may hold any values."""
        self.M, self.groups, self.out_dtype = a.values.shape[0], groups, out_dtype
        self.N, self.K = sizes
        self.b_rows, gpu = b.values.shape[0] // groups, gpu_model(device)
        tile = grouped_tile(gpu, self.M, self.N, groups)
        #: rows per tile in the map that a call receives
        self.height, self.empty = tile.m, allocator(device)
        works = most_tiles(self.M, groups, tile.m) * ceil_div(self.N, tile.n)
        size = torch.empty(0, dtype=out_dtype, device="cpu").element_size()
        self.launch = Launcher(
            grouped_rows_kernel,
            (min(gpu.sms, works),),
            device,
            (
                _box(a.values, 1, tile.m, tile.k, self.K),
                _box(b.values, b.axis, tile.n, tile.k, self.K if b.axis == 1 else self.N),
            ),
            B_TRANSPOSED=b.axis == 1,
            HAS_BIAS=bias is not None,
            BM=tile.m,
            BN=tile.n,
            BK=tile.k,
            PARTS=_parts(tile, size),
            PROGRAMS=min(gpu.sms, works),
            HARDWARE=device.type == "cuda",
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )

    def __call__(
        self, a: GroupedOperand, b: GroupedOperand, tiles: GroupTiles, bias: Tensor | None
    ) -> Tensor:
        """[M, N] in out_dtype; rows outside all groups are not written."""
        out = self.empty((self.M, self.N), (self.N, 1), self.out_dtype)
        self.launch(
            *(a.values, b.values, out, self.N, a.scale, b.scale, a.scale if bias is None else bias),
            *(tiles.entries, tiles.starts, self.groups, self.N, self.K, self.b_rows),
        )
        return out


class GroupedSums:
    """a of e [rows, M]^T @ b of e [rows, N] for every group e, fp32."""

    def __init__(
        self,
        a: GroupedOperand,
        b: GroupedOperand,
        groups: int,
        sizes: tuple[int, int],
        height: int,
        device: torch.device,
    ) -> None:
        """a, b: contracted along axis 0, in tiles of `height` rows; sizes: (M, N)."""
        self.sizes, self.groups, gpu = sizes, groups, gpu_model(device)
        tile, self.empty = sums_tile(gpu), allocator(device)
        works = groups * ceil_div(sizes[0], tile.m) * ceil_div(sizes[1], tile.n)
        assert height % tile.k == 0, "groups are whole steps along the contraction"
        # two programs share the registers of an SM
        options: dict[str, Any] = {"maxnreg": _OF_TWO // tile.warps} if device.type == "cuda" else {}
        self.launch = Launcher(
            grouped_sums_kernel,
            (min(2 * gpu.sms, works),),
            device,
            (_box(a.values, 0, tile.m, tile.k, sizes[0]), _box(b.values, 0, tile.n, tile.k, sizes[1])),
            HEIGHT=height,
            BM=tile.m,
            BN=tile.n,
            BK=tile.k,
            PARTS=_parts(tile, 4),
            PROGRAMS=min(2 * gpu.sms, works),
            HARDWARE=device.type == "cuda",
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
            **options,
        )

    def __call__(
        self, a: GroupedOperand, b: GroupedOperand, scales: tuple[Tensor, Tensor], tiles: GroupTiles
    ) -> Tensor:
        """[groups, M, N]. scales: both operands', in the order in which they multiply the sum."""
        (M, N), groups = self.sizes, self.groups
        out = self.empty((groups, M, N), (M * N, N, 1), torch.float32)
        self.launch(a.values, b.values, out, *scales, tiles.starts, groups, M, N)
        return out


class GroupedColumns:
    """The sum of each group's rows, fp32 [groups, N]: the gradient of experts' biases."""

    def __init__(self, columns: int, stride: int, groups: int, device: torch.device) -> None:
        self.shape, self.stride, self.empty = (groups, columns), stride, allocator(device)
        self.launch = Launcher(
            grouped_columns_kernel,
            (ceil_div(columns, _COLUMNS), groups),
            device,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            HARDWARE=device.type == "cuda",
            num_warps=4,
            enable_fp_fusion=False,
        )

    def __call__(self, x: Tensor, offsets: Tensor) -> Tensor:
        """x: [M, N] with unit stride along rows; offsets: int32 [groups + 1]."""
        out = self.empty(self.shape, (self.shape[1], 1), torch.float32)
        self.launch(x, self.stride, out, offsets, self.shape[1])
        return out


def has_grouped_gemms(device: torch.device) -> bool:
    """Whether a device that has kernels loads tiles by TMA."""
    gpu: GpuModel = gpu_model(device)
    return gpu.tma


def _box(values: Tensor, axis: int, rows: int, step: int, columns: int) -> Box:
    """An operand's TMA box, cropped to its first columns, in tiles of rows by step along its contraction."""
    box = (rows, step) if axis == 1 else (step, rows)
    return Box((values.shape[0], columns), (values.stride(0), 1), box)


def _parts(tile: Tile, size: int) -> int:
    """The number of column ranges in which a tile is written, which bounds the memory for staging."""
    return max(1, tile.m * tile.n * size // LEAVING)
