"""A branch added to the residual stream, and the norm before the next layer, without gradients.

In PyTorch these are eight operations, each of which reads and writes the stream in FP32; the kernel reads and
writes it once.
"""

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fourbits.device import probe, unsupported_triton
from fourbits.model.ops.add_norm import reference
from fourbits.triton_version import HAS_TRITON

if TYPE_CHECKING or HAS_TRITON:
    from fourbits.model.ops.add_norm.kernels import add_norm_triton as kernels


def add_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, out_dtype: torch.dtype, fused: bool
) -> tuple[Tensor, Tensor]:
    """x + branch in x's dtype, and w s / sqrt(mean(s^2) + eps) of that sum s in out_dtype.

    x: [..., D], the residual stream; branch: [..., D], or None for zero; weight: FP32 [D]; FP32 inside.
    fused: by the kernel, for contiguous x and branch.
    """
    if fused:
        return kernels.add_norm(x, branch, weight, eps, out_dtype)
    return reference.add_norm(x, branch, weight, eps, out_dtype)


@functools.cache
def fusable(device: torch.device) -> bool:
    """Whether the kernel runs on a device."""
    return device.type == "cuda" and unsupported_triton(probe(device)) is None
