"""Causal grouped-query attention (arXiv:2305.13245) through PyTorch's scaled_dot_product_attention.

The hybrids have no position embedding: their Mamba layers tell positions apart. The Transformer rotates
queries and keys (RoPE, arXiv:2104.09864) in the half-split layout of Llama and Hugging Face: channel i is
paired with channel i + P/2.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from fourbits.model.documents import same_document
from fourbits.model.linear import Linear
from fourbits.model.regions import RegionModule


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Turn pair i of every head by positions * theta^(-2i/P). x: [B, T, H, P], positions: [T] -> FP32."""
    half = x.shape[-1] // 2
    exponent = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angle = positions.float()[:, None, None] * theta**-exponent  # [T, 1, P/2]
    first, second = x.float().split(half, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention_core(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_dim: int,
    rope_theta: float | None,
    documents: Tensor | None = None,
) -> Tensor:
    """Region: softmax(q k^T / sqrt(P)) v over a token and those before it, of its document if given.

    q: [B, T, H*P]; k, v: [B, T, G*P] with H a multiple of G; documents: int [B, T] or None -> [B, T, H*P] in
    q's dtype. Rotations need no restart in a document, as they act through differences of positions.
    """
    dtype = q.dtype
    q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in (q, k, v))
    if rope_theta is not None:
        positions = torch.arange(q.shape[1], device=q.device)
        q, k = (rotate(x, positions, rope_theta).to(dtype) for x in (q, k))
    if q.device.type == "cpu":
        q, k, v = q.float(), k.float(), v.float()  # the BF16 kernel is several times slower on a CPU
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = None if documents is None else same_document(documents).tril()[:, None]  # [B, 1, T, T]
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y.transpose(1, 2).flatten(2).to(dtype)


class Attention(RegionModule):
    """Attention mixer: separate q, k, v and output linears around the core."""

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
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(self.run(attention_core, q, k, v, self.head_dim, self.rope_theta, documents))
