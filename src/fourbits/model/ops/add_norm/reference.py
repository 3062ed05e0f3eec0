"""A branch added to the residual stream, and the RMS norm of the sum, in PyTorch."""

import torch
from torch import Tensor

from fourbits.model.layers import rms_norm


def add_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x + branch in x's dtype, and its norm in out_dtype; see `op.add_norm`."""
    x = x if branch is None else x + branch
    return x, rms_norm(x, weight, eps, out_dtype)
