"""Residual addition and RMS norm, a token per program, in a single pass over the inputs, FP32 inside."""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false
# (Triton types the kernels, and launches also pass compiler options)

import torch
import triton
import triton.language as tl
from torch import Tensor

#: columns per warp
_WARP_COLUMNS = 512


@triton.jit
def add_norm_kernel(x_ptr, branch_ptr, weight_ptr, sum_ptr, out_ptr, eps, D: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """Write sum [M, D], unless branch_ptr is None, and out [M, D], its norm. Grid: M."""
    column = tl.arange(0, BLOCK)
    inside = column < D
    place = tl.program_id(0).to(tl.int64) * D + column
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if branch_ptr is not None:
        x += tl.load(branch_ptr + place, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + place, rounded, mask=inside)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    normed = x * tl.rsqrt(tl.sum(x * x) / D + eps) * weight
    tl.store(out_ptr + place, normed.to(out_ptr.dtype.element_ty), mask=inside)


def add_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The sum, x itself without a branch, and its norm; see `op.add_norm`."""
    total = x if branch is None else torch.empty_like(x)
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    add_norm_kernel[(x.numel() // width,)](
        x,
        branch,
        weight,
        total,
        out,
        eps,
        D=width,
        BLOCK=block,
        num_warps=min(max(block // _WARP_COLUMNS, 1), 8),
    )
    return total, out
