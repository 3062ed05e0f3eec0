"""The GEMM of FP8 operands in blocks of 128 on Hopper: cuBLAS, through PyTorch's scaled_mm.

FP8 training on Hopper uses it, so it is the speed baseline for 4-bit training: about 1.5 times the rate of a
BF16 GEMM, with sums as accurate as those of this package's FP8 kernel, which runs other shapes and GPUs.
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


def unsupported(a: ExactOperand, b: ExactOperand) -> str | None:
    """Why cuBLAS does not support the GEMM of these FP8 operands, or None."""
    rows = (a.values.shape[1 - a.axis], b.values.shape[1 - b.axis])
    lengths = a.values.shape[a.axis], b.values.shape[b.axis]
    if not _is_hopper(a.values.device):
        return "cuBLAS scales FP8 in blocks of 128 on sm_90 only"
    if not a.values.dtype == b.values.dtype == torch.float8_e4m3fn:
        return f"operands must be E4M3, got {a.values.dtype} and {b.values.dtype}"
    if a.scale_block != (1, 128) or b.scale_block not in ((1, 128), (128, 128)):
        return f"blocks must be 1x128, on the right also 128x128, got {a.scale_block} and {b.scale_block}"
    if any(size == 0 or size % _ROWS for size in rows):
        return f"rows must be a multiple of {_ROWS}, got {rows}"
    return None if lengths[0] == lengths[1] > 0 else f"K must be equal and not 0, got {lengths}"


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
