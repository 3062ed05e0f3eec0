"""Norm and feed-forward layers. Elementwise work is FP32 inside, and the output is rounded once."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fourbits.model.linear import Linear
from fourbits.model.regions import RegionModule


def rms_norm(x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    """Region: w x / sqrt(mean(x^2) + eps) over the last axis. x: [..., D] -> [..., D] in out_dtype."""
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).to(out_dtype)


def relu2(x: Tensor) -> Tensor:
    """Region: max(x, 0)^2 (arXiv:2109.08668), in x's dtype."""
    return F.relu(x.float()).square().to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Region: silu(gate) * up (arXiv:2002.05202), in their dtype."""
    return (F.silu(gate.float()) * up.float()).to(up.dtype)


class RMSNorm(RegionModule):
    """Root-mean-square norm with a gain (arXiv:1910.07467), mostly before linear layers.

    out_dtype: of the output; None for that of the input.
    """

    def __init__(self, d_model: int, eps: float, out_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model, dtype=torch.float32))
        self.eps = eps
        self.out_dtype = out_dtype

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D] of any float dtype -> [..., D] in out_dtype."""
        return self.run(rms_norm, x, self.weight, self.eps, self.out_dtype or x.dtype)


class FFN(RegionModule):
    """down(relu(up(x))^2), or down(silu(gate(x)) * up(x)), with the names of NemotronH and Llama."""

    def __init__(self, d_model: int, d_ffn: int, activation: Literal["relu2", "swiglu"]) -> None:
        super().__init__()
        self.gate_proj = Linear(d_model, d_ffn) if activation == "swiglu" else None
        self.up_proj = Linear(d_model, d_ffn)
        self.down_proj = Linear(d_ffn, d_model)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """x: [B, T, D] -> [B, T, D]; documents, which other mixers use, have no effect here."""
        if self.gate_proj is None:
            return self.down_proj(self.run(relu2, self.up_proj(x)))
        return self.down_proj(self.run(swiglu, self.gate_proj(x), self.up_proj(x)))
