"""The correction that removes the mean over tokens before quantizing. docs/nvfp4.md, section 21.

arXiv:2603.10444 finds most outliers of activations in the mean. It takes one reduction and one subtraction;
no kernel fuses them with quantization, which reads the residual in FP32.
"""

import torch
from torch import Tensor


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, F] -> (x minus its mean row, contiguous fp32 [M, F]; the mean row, fp32 [F], 0 without rows)."""
    mean = x.sum(0, dtype=torch.float32) / max(1, x.shape[0])
    return (x - mean).contiguous(), mean


def product(mean: Tensor, weight: Tensor, tokens: int) -> Tensor:
    """The mean row times weight^T, which every token has in common: fp32 [N]. weight: fp32 [N, F]."""
    return mean @ weight.t()


def outer_product(of_dy: Tensor, of_x: Tensor, tokens: int) -> Tensor:
    """(1 of_dy)^T (1 of_x) over M tokens, fp32 [N, K]."""
    return torch.outer(of_dy * tokens, of_x)
