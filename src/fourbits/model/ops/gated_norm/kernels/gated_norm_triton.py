"""The gated norm, a group of a token at a time, in a single pass; FP32, the gain's gradient in registers."""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false
# (Triton types the kernels, and launches also pass compiler options)

import torch
import triton
import triton.language as tl
from torch import Tensor

#: tokens per program, forward and backward
_SPANS = 8, 32
#: tokens from which on spans fill a GPU
_MANY = 1024
#: columns per warp
_WARP_COLUMNS = 1024


@triton.jit
def _gated(y_ptr, z_ptr, column, inside):
    """y, z and the sigmoid of z, in FP32; the norm is that of y * z * sigmoid."""
    y = tl.load(y_ptr + column, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return y, z, 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def gated_norm_kernel(y_ptr, z_ptr, z_batch, z_token, weight_ptr, out_ptr, rows, T, eps, GROUP: tl.constexpr,
                      GROUPS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write out [B * T, GROUPS * GROUP]; y has the same layout. Grid: spans of tokens times groups."""
    column = tl.arange(0, BLOCK)
    inside = column < GROUP
    group, span = tl.program_id(0) % GROUPS, tl.program_id(0) // GROUPS
    weight = tl.load(weight_ptr + group * GROUP + column, mask=inside, other=0.0)
    first = span * SPAN
    for step in range(min(SPAN, rows - first)):
        row = first + step
        at = (row.to(tl.int64) * GROUPS + group) * GROUP
        z_at = (row // T).to(tl.int64) * z_batch + (row % T).to(tl.int64) * z_token + group * GROUP
        y, z, sigmoid = _gated(y_ptr + at, z_ptr + z_at, column, inside)
        gated = y * (z * sigmoid)
        scale = tl.rsqrt(tl.sum(gated * gated) / GROUP + eps)
        out = (gated * scale * weight).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at + column, out, mask=inside)


@triton.jit
def gated_norm_backward_kernel(dout_ptr, y_ptr, z_ptr, z_batch, z_token, weight_ptr, dy_ptr, dz_ptr, sums_ptr,
                               rows, T, eps, GROUP: tl.constexpr, GROUPS: tl.constexpr,
                               SPAN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write dy and dz [B * T, GROUPS * GROUP], in the layout of dout and y, and the gain's partial gradients.

    sums: fp32 [spans, GROUPS * GROUP], the latter. Grid: see `gated_norm_kernel`.
    """
    column = tl.arange(0, BLOCK)
    inside = column < GROUP
    group, span = tl.program_id(0) % GROUPS, tl.program_id(0) // GROUPS
    weight = tl.load(weight_ptr + group * GROUP + column, mask=inside, other=0.0)
    first = span * SPAN
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(min(SPAN, rows - first)):
        row = first + step
        at = (row.to(tl.int64) * GROUPS + group) * GROUP
        z_at = (row // T).to(tl.int64) * z_batch + (row % T).to(tl.int64) * z_token + group * GROUP
        y, z, sigmoid = _gated(y_ptr + at, z_ptr + z_at, column, inside)
        dout = tl.load(dout_ptr + at + column, mask=inside, other=0.0).to(tl.float32)
        gate = z * sigmoid
        gated = y * gate
        scale = tl.rsqrt(tl.sum(gated * gated) / GROUP + eps)
        normed = gated * scale
        total += dout * normed
        dnormed = dout * weight
        dgated = scale * (dnormed - normed * (tl.sum(dnormed * normed) / GROUP))
        dz = dgated * y * (sigmoid * (1.0 + z * (1.0 - sigmoid)))
        tl.store(dy_ptr + at + column, (dgated * gate).to(dy_ptr.dtype.element_ty), mask=inside)
        tl.store(dz_ptr + at + column, dz.to(dz_ptr.dtype.element_ty), mask=inside)
    sums_ptr += tl.program_id(0).to(tl.int64) * GROUP
    tl.store(sums_ptr + column, total, mask=inside)


def forward(y: Tensor, z: Tensor, weight: Tensor, num_groups: int, eps: float) -> Tensor:
    """[B, T, M] in y's dtype, contiguous. y: [B, T, M], contiguous; z: [B, T, M] with unit stride along M."""
    out = y.new_empty(y.shape)
    rows = y.shape[0] * y.shape[1]
    span = _SPANS[0] if rows >= _MANY else 1
    options, spans = _options(y, num_groups, span), triton.cdiv(rows, span)
    gated_norm_kernel[(spans * num_groups,)](
        y, z, *z.stride()[:2], weight, out, rows, y.shape[1], eps, **options
    )
    return out


def backward(
    dout: Tensor, y: Tensor, z: Tensor, weight: Tensor, num_groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dy and dz in their dtypes, dweight in fp32; all contiguous. Arguments: see `forward`; dout as y."""
    dy, dz = y.new_empty(y.shape), z.new_empty(z.shape)
    rows, options = y.shape[0] * y.shape[1], _options(y, num_groups, _SPANS[1])
    spans = triton.cdiv(rows, _SPANS[1])
    sums = torch.empty((spans, y.shape[2]), dtype=torch.float32, device=y.device)
    gated_norm_backward_kernel[(spans * num_groups,)](
        dout, y, z, *z.stride()[:2], weight, dy, dz, sums, rows, y.shape[1], eps, **options
    )
    return dy, dz, sums.sum(0)


def _options(y: Tensor, num_groups: int, span: int) -> dict[str, int]:
    group = y.shape[2] // num_groups
    block = 1 << (group - 1).bit_length()
    warps = min(max(block // _WARP_COLUMNS, 1), 8)
    return {"GROUP": group, "GROUPS": num_groups, "SPAN": span, "BLOCK": block, "num_warps": warps}
