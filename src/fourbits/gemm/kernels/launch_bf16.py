"""Launches of GEMMs of BF16 operands: by TMA where the operands' rows allow it, else by pointers."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.gemm.kernels.pointer_triton import pointer_kernel
from fourbits.gemm.kernels.tiles import GpuModel, Tile, best_work, ceil_div, gpu_model
from fourbits.gemm.kernels.tma_triton import sum_kernel, tma_kernel
from fourbits.quant.kernels.allocate import allocator
from fourbits.quant.kernels.launcher import Box, Launcher

_SUM_COLUMNS = 512
#: bytes of shared memory of an SM for staging output tiles of the TMA kernel
LEAVING = 32 << 10


class OperandLayout(NamedTuple):
    """Memory layout of a BF16 operand with unit stride along its rows."""

    shape: tuple[int, int]
    row_stride: int
    #: the contraction axis
    axis: int
    #: whether its base address is a multiple of 16 bytes
    aligned: bool

    @property
    def rows(self) -> int:
        """The extent of the other axis."""
        return self.shape[1 - self.axis]


class Problem(NamedTuple):
    """The signature of a GEMM, without the GPU."""

    a: OperandLayout
    b: OperandLayout
    out_dtype: torch.dtype
    #: dtype of the bias, if there is one
    bias: torch.dtype | None
    device: torch.device

    @property
    def length(self) -> int:
        """The length of the contraction; beyond it, one operand has only zero padding."""
        return min(self.a.shape[self.a.axis], self.b.shape[self.b.axis])


@functools.lru_cache(maxsize=1 << 14)
def bf16_gemm(
    a: OperandLayout, b: OperandLayout, out_dtype: torch.dtype, bias: torch.dtype | None, device: torch.device
) -> "TmaGemm | PointerGemm":
    """The GEMM of operands with these layouts."""
    gpu = gpu_model(device)
    out_bytes = b.rows * torch.empty(0, dtype=out_dtype, device="cpu").element_size()
    by_tma = gpu.tma and _tma_reads(a) and _tma_reads(b) and out_bytes % 16 == 0 and a.rows * b.rows > 0
    return (TmaGemm if by_tma else PointerGemm)(Problem(a, b, out_dtype, bias, device), gpu)


class TmaGemm:
    """a [M, K] @ b [N, K]^T by persistent programs, split-K where that fills more SMs."""

    def __init__(self, problem: Problem, gpu: GpuModel) -> None:
        a, b, self.out_dtype, bias, device = problem
        self.M, self.N, self.K, self.empty = a.rows, b.rows, problem.length, allocator(device)
        tile, self.split_k = best_work(gpu, self.M, self.N, self.K, a.axis == 0)
        self.slab = ceil_div(self.M, tile.m) * tile.m
        self.parts_shape = (self.split_k * self.slab, ceil_div(self.N, 4) * 4)
        self.launch = self._product(tile, (a, b), bias is not None and self.split_k == 1, device, gpu.sms)
        self.add = Launcher(
            sum_kernel,
            (self.M, ceil_div(self.N, _SUM_COLUMNS)),
            device,
            HAS_BIAS=bias is not None,
            SPLIT_K=self.split_k,
            COLUMNS=_SUM_COLUMNS,
            HARDWARE=device.type == "cuda",
            num_warps=4,
            enable_fp_fusion=False,
        )

    def _product(
        self,
        tile: Tile,
        operands: tuple[OperandLayout, OperandLayout],
        bias: bool,
        device: torch.device,
        sms: int,
    ) -> Launcher:
        """The launch of the GEMM, which writes the output or the split-K sums."""
        split = self.split_k > 1
        a, b = operands
        rows, columns = self.parts_shape if split else (self.M, self.N)
        size = 4 if split else torch.empty(0, dtype=self.out_dtype, device="cpu").element_size()
        pieces = max(1, tile.m * tile.n * size * tile.programs // LEAVING)
        works = ceil_div(self.M, tile.m) * ceil_div(self.N, tile.n) * self.split_k
        programs = min(sms * tile.programs, works)
        return Launcher(
            tma_kernel,
            (programs,),
            device,
            (
                _box(a, self.K, tile.m, tile.k),
                _box(b, self.K, tile.n, tile.k),
                Box((rows, columns), (columns, 1), (tile.m, tile.n // pieces)),
            ),
            A_TRANSPOSED=a.axis == 0,
            B_TRANSPOSED=b.axis == 1,
            HAS_BIAS=bias,
            BM=tile.m,
            BN=tile.n,
            BK=tile.k,
            SPLIT_K=self.split_k,
            PARTS=pieces,
            PROGRAMS=programs,
            HARDWARE=device.type == "cuda",
            num_warps=tile.warps,
            num_stages=tile.stages - split,  # split-K sums are staged at full width
            enable_fp_fusion=False,
        )

    def __call__(self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None) -> Tensor:
        """The scaled GEMM, in out_dtype. a, b: bf16; scales: fp32 scalars."""
        target = out = self.empty((self.M, self.N), (self.N, 1), self.out_dtype)
        if self.split_k > 1:
            target = self.empty(self.parts_shape, (self.parts_shape[1], 1), torch.float32)
        last = scale_a if bias is None else bias
        self.launch(a, b, target, scale_a, scale_b, last, self.M, self.N, self.K)
        if self.split_k > 1:
            self.add(target, self.parts_shape[1], self.slab, out, self.N, scale_a, scale_b, last, self.N)
        return out


class PointerGemm:
    """Like `TmaGemm`, with pointer loads, for any strides."""

    def __init__(self, problem: Problem, gpu: GpuModel) -> None:
        a, b, self.out_dtype, bias, device = problem
        self.M, self.N, self.K, self.empty = a.rows, b.rows, problem.length, allocator(device)
        tile = best_work(gpu, self.M, self.N, self.K, a.axis == 0, splits=(1,)).tile
        self.a, self.b = _strides(a), _strides(b)
        programs = ceil_div(self.M, tile.m) * ceil_div(self.N, tile.n)
        self.launch = None if not programs else Launcher(
            pointer_kernel,
            (programs,),
            device,
            HAS_BIAS=bias is not None,
            BM=tile.m,
            BN=tile.n,
            BK=tile.k,
            HARDWARE=device.type == "cuda",
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )  # fmt: skip

    def __call__(self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None) -> Tensor:
        """As `TmaGemm`."""
        out = self.empty((self.M, self.N), (self.N, 1), self.out_dtype)
        if self.launch is not None:
            last = scale_a if bias is None else bias
            self.launch(
                *(a, *self.a, b, *self.b, out, self.N),
                *(scale_a, scale_b, last, self.M, self.N, self.K),
            )
        return out


def _box(x: OperandLayout, length: int, rows: int, step: int) -> Box:
    """An operand's TMA box: cropped to `length` along K, in tiles of rows by step."""
    strides = (x.row_stride, 1)
    if x.axis == 1:
        return Box((x.shape[0], length), strides, (rows, step))
    return Box((length, x.shape[1]), strides, (step, rows))


def _strides(x: OperandLayout) -> tuple[int, int]:
    """Strides of an operand: across its rows in the GEMM, and along K."""
    return (x.row_stride, 1) if x.axis == 1 else (1, x.row_stride)


def _tma_reads(x: OperandLayout) -> bool:
    """Whether TMA can address a BF16 operand: not empty, row stride and base multiples of 16 bytes."""
    return x.row_stride * 2 % 16 == 0 and x.aligned and x.shape[0] * x.shape[1] > 0
