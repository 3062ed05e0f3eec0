"""The GEMM in plain torch: dequantized BF16 operands, FP32 accumulation, global scales in the FP32 epilogue.

An NVFP4 element times its block scale has at most six significant bits, so BF16 holds it exactly and only the
order of the FP32 additions differs from an FP4 tensor core. Folding the global scale into the operand would
not be exact. docs/nvfp4.md, section 12.4, states the error bound.
"""

import torch
from torch import Tensor

from fourbits.gemm.reference.matmul import finish, segments
from fourbits.quant.cpu.compiled import runner_for
from fourbits.quant.tensor import ExactOperand


def matmul(a: ExactOperand, b: ExactOperand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """a [M, K] @ b [N, K]^T -> [M, N] in out_dtype, for any operand layouts."""
    left = a.values if a.axis == 1 else a.values.t()
    right = b.values.t() if b.axis == 1 else b.values
    length = min(left.shape[1], right.shape[0])  # beyond it, one operand has only zero padding
    left, right = left[:, :length], right[:length]
    one = torch.ones((), dtype=torch.float32, device=left.device)
    scale_a, scale_b = (op.scale if op.scale.dim() == 0 else one for op in (a, b))
    constant = a.scale.dim() == b.scale.dim() == 0
    total = _sum(left, right) if constant else _scaled_sum(left, right, a, b)
    return runner_for(total)(finish)(total, scale_a, scale_b, out_dtype, bias)


def _sum(left: Tensor, right: Tensor) -> Tensor:
    """left [M, K] @ right [K, N] with FP32 accumulation and result."""
    if left.is_cuda and left.dtype == right.dtype == torch.bfloat16:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left.to(torch.float32), right.to(torch.float32))


def _scaled_sum(left: Tensor, right: Tensor, a: ExactOperand, b: ExactOperand) -> Tensor:
    """FP32 sum over segments of K, each scaled in FP32 before it is added (FP8 in blocks of 128)."""
    rows_a, rows_b = _scale_rows(a, left.shape[0]), _scale_rows(b, right.shape[1])
    length_a, length_b = _segment_length(a), _segment_length(b)
    total = torch.zeros((left.shape[0], right.shape[1]), dtype=torch.float32, device=left.device)
    for first, last in segments(left.shape[1], (length_a, length_b)):
        part = _sum(left[:, first:last], right[first:last])
        if rows_a is not None:
            part = part * rows_a[:, first // length_a, None]
        if rows_b is not None:
            part = part * rows_b[None, :, first // length_b]
        total += part
    return total


def _scale_rows(operand: ExactOperand, rows: int) -> Tensor | None:
    """FP32 scale of every row and segment, [rows, segments]; None for a scalar."""
    if operand.scale.dim() == 0:
        return None
    stored = operand.scale if operand.axis == 1 else operand.scale.t()
    size = operand.scale_block
    return stored.repeat_interleave(size[0], 0)[:rows]


def _segment_length(operand: ExactOperand) -> int:
    return 0 if operand.scale.dim() == 0 else operand.scale_block[1]
