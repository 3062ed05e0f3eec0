"""The GEMM of FP8 operands in blocks of 128 on Hopper: cuBLAS, through PyTorch's scaled_mm.

FP8 training on Hopper uses it, so it is the speed baseline for 4-bit training: about 1.5 times the rate of a
BF16 GEMM, with sums as accurate as those of this package's FP8 kernel, which serves other shapes and GPUs.
docs/nvfp4.md, section 12.5, states their accuracy.
"""

import functools

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from fourbits.quant.tensor import ExactOperand

#: the row counts of both operands must be multiples of this
_ROWS = 16
#: cuBLAS requires the scales of square blocks in groups of four along K
_GROUP = 4


def takes(a: ExactOperand, b: ExactOperand) -> bool:
    """Whether cuBLAS supports these FP8 operands: on sm_90, a in 1x128 blocks, rows in full groups."""
    rows = (a.values.shape[1 - a.axis], b.values.shape[1 - b.axis])
    contraction = a.values.shape[a.axis]
    return (
        _is_hopper(a.values.device)
        and a.values.dtype == b.values.dtype == torch.float8_e4m3fn
        and a.scale_block == (1, 128)
        and b.scale_block in ((1, 128), (128, 128))
        and all(size > 0 and size % _ROWS == 0 for size in rows)
        and contraction == b.values.shape[b.axis] > 0
    )


def matmul(a: ExactOperand, b: ExactOperand, out_dtype: torch.dtype) -> Tensor:
    """a [M, K] @ b [N, K]^T -> [M, N]; out_dtype: bf16 or fp32."""
    left, right = _contraction_last(a.values, a.axis), _contraction_last(b.values, b.axis)
    scale_b, how = _scale(b), ScalingType.BlockWise1x128
    if b.scale_block[0] == 128:
        scale_b, how = _square_scale(scale_b), ScalingType.BlockWise128x128
    return torch.nn.functional.scaled_mm(
        left, right.t(), _scale(a), ScalingType.BlockWise1x128, scale_b, how, output_dtype=out_dtype
    )


def _contraction_last(values: Tensor, axis: int) -> Tensor:
    stored = values if axis == 1 else values.t()
    return stored if stored.stride(1) == 1 else stored.contiguous()


def _scale(operand: ExactOperand) -> Tensor:
    """Scales [R', C']; for 1x128 blocks contiguous along R'."""
    scale = operand.scale if operand.axis == 1 else operand.scale.t()
    if operand.scale_block[0] == 1 and scale.stride(0) != 1:
        return scale.t().contiguous().t()
    return scale


def _square_scale(scale: Tensor) -> Tensor:
    """Scales [N', K'] of square blocks as [K' padded to full groups, N'], contiguous along K'."""
    padded = scale.new_zeros((scale.shape[0], -(-scale.shape[1] // _GROUP) * _GROUP))
    padded[:, : scale.shape[1]] = scale
    return padded.t()


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
