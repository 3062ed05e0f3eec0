"""A Transformer written directly in PyTorch, as a baseline without libraries.

Pre-norm, rotary positions, grouped-query attention, squared ReLU, untied head, cross-entropy over all logits.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fourbits.model.config import ModelConfig


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, inner = config.d_model, config.num_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q, self.k, self.v = (
            nn.Linear(width, heads * config.head_dim, bias=False)
            for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        )
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        projected = (self.q(x), self.k(x), self.v(x))
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in projected)
        y = F.scaled_dot_product_attention(
            _rotated(q, cos, sin), _rotated(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return self.out(y.transpose(1, 2).flatten(2))


class _Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = _Attention(config)
        self.up = nn.Linear(config.d_model, config.d_ffn, bias=False)
        self.down = nn.Linear(config.d_ffn, config.d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(_normed(x), cos, sin)
        return x + self.down(F.relu(self.up(_normed(x))).square())


class PlainTransformer(nn.Module):
    """Maps tokens and targets, int64 [B, T] each, to the mean cross-entropy."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(_Block(config) for _ in config.pattern)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        half = config.head_dim // 2
        frequency = (config.rope_theta or 1e4) ** -(
            torch.arange(half, dtype=torch.float32, device="cpu") / half
        )
        angle = torch.arange(config.max_seq_len, dtype=torch.int64, device="cpu")[:, None] * frequency
        self.register_buffer("cos", angle.cos().bfloat16(), persistent=False)
        self.register_buffer("sin", angle.sin().bfloat16(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy, FP32 scalar."""
        length = tokens.shape[1]
        cos, sin = self.get_buffer("cos")[:length], self.get_buffer("sin")[:length]
        x = self.embed(tokens).bfloat16()
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(_normed(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
