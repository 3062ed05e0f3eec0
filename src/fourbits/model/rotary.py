"""Rotary position embedding (RoPE, arXiv:2104.09864) in the half-split layout of Llama and Hugging Face.

Channel i of a head is paired with channel i + P/2; the angle of this pair is position * frequency(i).
"""

import math

import torch
from torch import Tensor

from fourbits.model.config import RopeScaling


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Radians per token of every pair i: theta^(-2i/P), scaled. FP32 [P/2].

    The formulas of scaled frequencies are those of transformers, in their order.
    """
    half = head_dim // 2
    exponent = torch.arange(half, device=device, dtype=torch.float32) / half
    plain = theta**-exponent
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    return _llama3(plain, scaling)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow pairs divided by the factor, fast ones unchanged, and a blend of both in between."""
    low, high, seq_len = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_seq_len
    wavelength = 2 * math.pi / plain
    share = (seq_len / wavelength - low) / (high - low)  # of the unchanged frequency
    blend = (1 - share) * plain / scaling.factor + share * plain
    scaled = torch.where(wavelength > seq_len / low, plain / scaling.factor, blend)
    return torch.where(wavelength < seq_len / high, plain, scaled)


def rotations(positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Region: cosine and sine of the angle of every pair i at every position, positions * frequency(i).

    positions: int [T] -> FP32 [2, T, 1, P/2]. This is a separate region because fused into `attention_core`
    it would be recomputed for every head of every sequence, which takes longer than reading the results.
    """
    angle = positions.float()[:, None, None] * frequencies(head_dim, theta, scaling, positions.device)
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate every pair of every head. x: [B, T, H, P]; rotation: from `rotations` -> FP32 [B, T, H, P]."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rotation
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
