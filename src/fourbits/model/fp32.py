"""What is computed in FP32 whatever the activations are, and in FP64 where a test gives that."""

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """x in FP32; FP64 stays FP64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
