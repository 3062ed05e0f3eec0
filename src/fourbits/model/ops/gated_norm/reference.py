"""The gated norm in PyTorch."""

import torch
from torch import Tensor
from torch.nn import functional as F

from fourbits.model.ops.inputs import at_least_fp32


def gated_group_norm(y: Tensor, z: Tensor, weight: Tensor, num_groups: int, eps: float) -> Tensor:
    """RMS norm of y * silu(z) over each of num_groups equal parts of the last axis, times a gain; FP32.

    y, z: [B, T, M]; weight: fp32 [M] -> [B, T, M].
    """
    gated = (y * F.silu(at_least_fp32(z))).unflatten(-1, (num_groups, -1))
    scaled = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
    return scaled.flatten(-2) * weight
