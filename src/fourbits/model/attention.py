"""Causal grouped-query attention (arXiv:2305.13245) through PyTorch's scaled_dot_product_attention.

The hybrids have no position embedding: their Mamba layers encode positions. The Transformer rotates queries
and keys (RoPE, arXiv:2104.09864) in the half-split layout of Llama and Hugging Face: channel i is paired with
channel i + P/2.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from fourbits.model.document_attention import document_attention
from fourbits.model.linear import Linear
from fourbits.model.regions import RegionModule


def rotations(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """Region: cosine and sine of the angle of every pair i at every position, positions * theta^(-2i/P).

    positions: int [T] -> FP32 [2, T, 1, P/2]. This is a separate region because fused into `attention_core`
    it would be recomputed for every head of every sequence, which takes longer than reading the results.
    """
    half = head_dim // 2
    exponent = torch.arange(half, device=positions.device, dtype=torch.float32) / half
    angle = positions.float()[:, None, None] * theta**-exponent
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate every pair of every head. x: [B, T, H, P]; rotation: from `rotations` -> FP32 [B, T, H, P]."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rotation
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention_core(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_dim: int,
    rotation: Tensor | None,
    documents: Tensor | None = None,
) -> Tensor:
    """Region: softmax(q k^T / sqrt(P)) v over a token and those before it, of its document if given.

    q: [B, T, H*P]; k, v: [B, T, G*P] with H a multiple of G; rotation: of q and k, from `rotations`, or None;
    documents: int [B, T] or None -> [B, T, H*P] in q's dtype. Positions need not restart in a document,
    because scores depend on differences of positions only.
    """
    dtype = q.dtype
    q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in (q, k, v))
    if rotation is not None:
        q, k = (rotate(x, rotation).to(dtype) for x in (q, k))
    if q.device.type == "cpu":
        q, k, v = q.float(), k.float(), v.float()  # the BF16 kernel is several times slower on a CPU
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if documents is None:
        grouped = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    else:
        y = document_attention(q, k, v, documents)
    return y.transpose(1, 2).flatten(2).to(dtype)


class Attention(RegionModule):
    """Attention mixer: separate q, k, v and output projections around the core."""

    def __init__(
        self, d_model: int, num_heads: int, num_kv_heads: int, head_dim: int, rope_theta: float | None
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.rope_theta = rope_theta
        self.q_proj = Linear(d_model, num_heads * head_dim)
        self.k_proj = Linear(d_model, num_kv_heads * head_dim)
        self.v_proj = Linear(d_model, num_kv_heads * head_dim)
        self.o_proj = Linear(num_heads * head_dim, d_model)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """x: [B, T, D] -> [B, T, D]; position t sees positions up to t, of its document if given."""
        rotation = None
        if self.rope_theta is not None:
            positions = torch.arange(x.shape[1], device=x.device, dtype=torch.int64)
            rotation = self.run(rotations, positions, self.head_dim, self.rope_theta)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(self.run(attention_core, q, k, v, self.head_dim, rotation, documents))
