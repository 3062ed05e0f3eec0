"""A bias as kernels read it: by its address, one entry after the other."""

import torch
from torch import Tensor


def readable(bias: Tensor | None, device: torch.device) -> Tensor | None:
    """The bias, copied where its entries are apart. Raises ValueError for one on another device."""
    if bias is None:
        return None
    if bias.device != device:
        raise ValueError(
            f"matmul: bias must be on the operands' device, {device}, got {bias.device}. Move it there."
        )
    return bias.contiguous()
