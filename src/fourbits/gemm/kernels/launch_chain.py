"""Launches of GEMMs with an FP4 tensor core's sums: both operands, the short path, then unproven tiles.

No value returns to the host: the GPU decides which path each tile takes. docs/nvfp4.md, section 22.4.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourbits.gemm.kernels.bias import readable
from fourbits.gemm.kernels.chain_operand_triton import chain_operand_kernel
from fourbits.gemm.kernels.chain_terms_triton import chain_terms_kernel
from fourbits.gemm.kernels.chain_triton import chain_kernel
from fourbits.gemm.kernels.tiles import ceil_div, gpu_model
from fourbits.gemm.reference.tensor_core import TensorCore
from fourbits.quant.kernels import support
from fourbits.quant.kernels.allocate import allocator
from fourbits.quant.kernels.launcher import Box, Launcher
from fourbits.quant.tensor import QuantizedTensor

#: constants of a kernel
Options = dict[str, Any]


class Sizes(NamedTuple):
    """Tiles of the three kernels."""

    #: tile of the short path, its warps and stages, and registers per thread
    m: int
    n: int
    warps: int
    stages: int
    registers: int | None
    #: tile of the long path
    small: int
    #: rows and instructions of one program that prepares an operand
    height: int
    steps: int


_GPU = Sizes(m=128, n=128, warps=8, stages=3, registers=128, small=64, height=32, steps=8)
_INTERPRETED = Sizes(m=32, n=32, warps=4, stages=1, registers=None, small=16, height=16, steps=2)


class Stored(NamedTuple):
    """How the codes and scales of an FP4 operand lie in memory."""

    rows: int
    length: int
    code_strides: tuple[int, int]
    scale_strides: tuple[int, int]
    block: tuple[int, int]
    e8m0: bool


def unsupported(a: QuantizedTensor, b: QuantizedTensor, core: TensorCore) -> str | None:
    """Why no kernel computes the sums of a and b with an instruction that supports them, or None."""
    if reason := unsupported_core(core, a.codes.device):
        return reason
    return None if a.rows and b.rows and a.codes.shape[1] else "an operand is empty"


def unsupported_core(core: TensorCore, device: torch.device) -> str | None:
    """Why no kernel on a device computes the sums of an instruction, or None."""
    if reason := support.unsupported_device(device):
        return reason
    if core.operands != (torch.uint8,):
        return f"{core.name} has no kernel: only the sums of FP4 tensor cores have one"
    return None if gpu_model(device).tma else "the kernel loads tiles by TMA, which sm_90 introduced"


def matmul(
    a: QuantizedTensor,
    b: QuantizedTensor,
    products: int,
    out_dtype: torch.dtype,
    scales: tuple[Tensor, Tensor],
    bias: Tensor | None,
) -> Tensor:
    """a [M, K] @ b [N, K]^T by instructions of `products` products; the scales multiply the sums in order."""
    dtype = None if bias is None else bias.dtype
    gemm = chain_gemm(stored(a), stored(b), products, out_dtype, dtype, a.codes.device)
    return gemm(a, b, scales, bias)


def stored(q: QuantizedTensor) -> Stored:
    """The memory layout of an FP4 operand."""
    size = q.spec.block_size
    assert size is not None
    length = 2 * q.codes.shape[1]
    codes, scales = q.codes.stride(), q.block_scale.stride()
    e8m0 = q.spec.block_format.scale == "e8m0"
    return Stored(q.rows, length, (codes[0], codes[1]), (scales[0], scales[1]), size, e8m0)


@functools.lru_cache(maxsize=4096)
def chain_gemm(
    a: Stored,
    b: Stored,
    products: int,
    out_dtype: torch.dtype,
    bias: torch.dtype | None,
    device: torch.device,
    sizes: Sizes | None = None,
) -> "ChainGemm":
    """The GEMM of operands with these layouts. sizes: instead of those of the GPU."""
    own = _GPU if device.type == "cuda" else _INTERPRETED
    return ChainGemm(a, b, products, out_dtype, bias, device, sizes or own)


class ChainGemm:
    """a [M, K] @ b [N, K]^T with the sums of an FP4 tensor core."""

    def __init__(
        self,
        a: Stored,
        b: Stored,
        products: int,
        out_dtype: torch.dtype,
        bias: torch.dtype | None,
        device: torch.device,
        sizes: Sizes,
    ) -> None:
        assert a.length == b.length
        self.M, self.N, self.K, self.out_dtype = a.rows, b.rows, a.length, out_dtype
        self.steps, self.empty = ceil_div(a.length, products), allocator(device)
        self.parts = ceil_div(self.steps, sizes.steps)
        self.width = products & -products  # K of a dot: 64, or 32 if an instruction has 96 products
        self.sides = tuple(_Side(x, self, products, device, sizes) for x in (a, b))
        self.tile = sizes.m, sizes.n
        self.grid = ceil_div(self.M, sizes.m), ceil_div(self.N, sizes.n)
        options: Options = {
            "HAS_BIAS": bias is not None,
            "HEIGHT": sizes.height,
            "HARDWARE": device.type == "cuda",
            "enable_fp_fusion": False,
        }
        self.short = self._short(a, b, products, device, sizes, options)
        self.long = self._long(a, b, products, device, sizes, options)

    def _short(
        self, a: Stored, b: Stored, products: int, device: torch.device, sizes: Sizes, options: Options
    ) -> Launcher:
        return Launcher(
            chain_kernel,
            (self.grid[0] * self.grid[1],),
            device,
            tuple(_box(x, height, self.width) for x, height in ((a, sizes.m), (b, sizes.n))),
            BM=sizes.m,
            BN=sizes.n,
            BK=self.width,
            PIECES=products // self.width,
            num_warps=sizes.warps,
            num_stages=sizes.stages,
            maxnreg=sizes.registers,
            **options,
        )

    def _long(
        self, a: Stored, b: Stored, products: int, device: torch.device, sizes: Sizes, options: Options
    ) -> Launcher:
        return Launcher(
            chain_terms_kernel,
            (ceil_div(self.M, sizes.small) * ceil_div(self.N, sizes.small),),
            device,
            **{f"{name}_{side}": value for side, x in (("A", a), ("B", b)) for name, value in _of(x).items()},
            DONE_M=sizes.m,
            DONE_N=sizes.n,
            BM=sizes.small,
            BN=sizes.small,
            PRODUCTS=products,
            WIDTH=self.width,
            num_warps=8,
            num_stages=1,
            **options,
        )

    def __call__(
        self, a: QuantizedTensor, b: QuantizedTensor, scales: tuple[Tensor, Tensor], bias: Tensor | None
    ) -> Tensor:
        """The scaled GEMM, in out_dtype."""
        return self._multiply(a, b, scales, bias)[0]

    def states(self, a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
        """Each tile's state: every term was needed, no term was truncated, or the short path was exact."""
        one = torch.ones((), dtype=torch.float32, device=a.codes.device)
        return self._multiply(a, b, (one, one), None)[1]

    def _multiply(
        self, a: QuantizedTensor, b: QuantizedTensor, scales: tuple[Tensor, Tensor], bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out = self.empty((self.M, self.N), (self.N, 1), self.out_dtype)
        done = self.empty(self.grid, (self.grid[1], 1), torch.int32)
        left, right = (side.prepared(q) for side, q in zip(self.sides, (a, b), strict=True))
        bias = readable(bias, a.codes.device)
        last = scales[0] if bias is None else bias
        self.short(
            *(left.values, right.values, out, self.N, done),
            *(left.ratio, left.extent, right.ratio, right.extent),
            *(*scales, last, self.M, self.N, self.steps, self.parts),
        )
        self.long(
            *(left.values, *self.sides[0].given(a), left.ratio),
            *(right.values, *self.sides[1].given(b), right.ratio),
            *(out, self.N, done, *scales, last, self.M, self.N, self.K, self.steps),
        )
        return out, done


class Prepared(NamedTuple):
    """An operand as `chain_operand_kernel` writes it."""

    values: Tensor
    ratio: Tensor
    extent: Tensor


class _Side:
    """One FP4 operand of a ChainGemm: its layout and launch."""

    def __init__(self, x: Stored, gemm: ChainGemm, products: int, device: torch.device, sizes: Sizes) -> None:
        self.x, self.gemm = x, gemm
        self.entries = ceil_div(x.rows, sizes.height)
        self.launch = Launcher(
            chain_operand_kernel,
            (self.entries, gemm.parts),
            device,
            **_of(x),
            ROWS=sizes.height,
            PIECE=gemm.width,
            PIECES=products // gemm.width,
            STEPS=sizes.steps,
            HARDWARE=device.type == "cuda",
            num_warps=4,
            enable_fp_fusion=False,
        )

    def given(self, q: QuantizedTensor) -> tuple[Tensor | int, ...]:
        """The kernels' arguments for codes and scales, with strides."""
        return q.codes, *self.x.code_strides, q.block_scale.view(torch.uint8), *self.x.scale_strides

    def prepared(self, q: QuantizedTensor) -> Prepared:
        """Compute the values and extents of an operand."""
        gemm, rows, length = self.gemm, self.x.rows, self.x.length
        values = gemm.empty((rows, length), (length, 1), torch.bfloat16)
        ratio = gemm.empty((self.entries, gemm.steps), (gemm.steps, 1), torch.float32)
        extent = gemm.empty((3 * gemm.parts, rows), (rows, 1), torch.float32)
        self.launch(*self.given(q), values, ratio, extent, rows, length, gemm.steps)
        return Prepared(values, ratio, extent)


def _of(x: Stored) -> Options:
    """The constants of an operand's layout."""
    return {"SIDE": x.block[0], "BLOCK": x.block[1], "E8M0": x.e8m0}


def _box(x: Stored, height: int, width: int) -> Box:
    return Box((x.rows, x.length), (x.length, 1), (height, width))
