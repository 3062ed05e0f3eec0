"""Causal grouped-query attention (arXiv:2305.13245) through PyTorch's scaled_dot_product_attention.

The hybrids have no position embedding: their Mamba layers encode positions. The Transformer rotates queries
and keys (RoPE), after it normalized every head of them if `qk_norm` is set.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from fourbits.model.config import ModelConfig
from fourbits.model.layers import RMSNorm
from fourbits.model.linear import Linear
from fourbits.model.masked_attention import masked_attention
from fourbits.model.regions import RegionModule
from fourbits.model.rotary import rotate, rotations


def attention_core(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_dim: int,
    rotation: Tensor | None,
    documents: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Region: softmax(q k^T / sqrt(P)) v over a token and those before it, of its document if given.

    q: [B, T, H*P]; k, v: [B, T, G*P] with H a multiple of G; rotation: of q and k, from `rotations`, or None;
    documents: int [B, T] or None; window: tokens that a token sees, itself included, or None for all -> [B,
    T, H*P] in q's dtype. Positions need not restart in a document, because scores depend on differences of
    positions only.
    """
    dtype = q.dtype
    q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in (q, k, v))
    if rotation is not None:
        q, k = (rotate(x, rotation).to(dtype) for x in (q, k))
    if q.device.type == "cpu":
        q, k, v = q.float(), k.float(), v.float()  # the BF16 kernel is several times slower on a CPU
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if documents is None and (window is None or window >= q.shape[2]):
        grouped = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    else:
        y = masked_attention(q, k, v, documents, window)
    return y.transpose(1, 2).flatten(2).to(dtype)


class Attention(RegionModule):
    """Attention mixer: separate q, k, v and output projections around the core."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, head_dim = config.d_model, config.head_dim
        self.head_dim = head_dim
        self.rope_theta, self.rope_scaling = config.rope_theta, config.rope_scaling
        self.window = config.sliding_window
        self.q_proj = Linear(width, config.num_heads * head_dim)
        self.k_proj = Linear(width, config.num_kv_heads * head_dim)
        self.v_proj = Linear(width, config.num_kv_heads * head_dim)
        self.o_proj = Linear(config.num_heads * head_dim, width)
        self.q_norm = RMSNorm(head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """x: [B, T, D] -> [B, T, D]; position t sees positions up to t, of its document and window."""
        rotation = None
        if self.rope_theta is not None:
            positions = torch.arange(x.shape[1], device=x.device, dtype=torch.int64)
            rotation = self.run(rotations, positions, self.head_dim, self.rope_theta, self.rope_scaling)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.normed(self.q_norm, q), self.normed(self.k_norm, k)
        core = self.run(attention_core, q, k, v, self.head_dim, rotation, documents, self.window)
        return self.o_proj(core)

    def normed(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """x with every head normalized, [..., H*P]."""
        return norm(x.unflatten(-1, (-1, self.head_dim))).flatten(-2)
