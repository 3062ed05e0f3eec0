"""Prepares a bias for kernels, which read it by address and need contiguous entries."""

import torch
from torch import Tensor


def readable(bias: Tensor | None, device: torch.device) -> Tensor | None:
    """The bias, copied if it is not contiguous. Raises ValueError for a bias on another device."""
    if bias is None:
        return None
    if bias.device != device:
        raise ValueError(
            f"matmul: bias must be on the operands' device, {device}, got {bias.device}. Move it there."
        )
    return bias.contiguous()
