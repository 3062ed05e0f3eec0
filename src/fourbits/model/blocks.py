"""One block per letter of the pattern: x + mixer(norm(x)) on the residual stream."""

import torch
from torch import Tensor, nn

from fourbits.model.attention import Attention
from fourbits.model.config import ModelConfig
from fourbits.model.layers import FFN, RMSNorm
from fourbits.model.mamba2 import Mamba2


class Block(nn.Module):
    """A norm and one mixer (Mamba-2, attention or FFN)."""

    def __init__(self, norm: RMSNorm, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.mixer = mixer

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """x: [B, T, D] in the residual dtype -> the same; documents: int [B, T], or None for one context."""
        return x + self.mixer(self.norm(x), documents)


class TransformerBlock(nn.Module):
    """Attention, then FFN, each with its norm and residual."""

    def __init__(self, config: ModelConfig, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps, compute_dtype)
        self.attention = make_attention(config)
        self.ffn_norm = RMSNorm(config.d_model, config.norm_eps, compute_dtype)
        self.ffn = make_ffn(config)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """x: [B, T, D] in the residual dtype -> the same; documents: int [B, T], or None for one context."""
        x = x + self.attention(self.attention_norm(x), documents)
        return x + self.ffn(self.ffn_norm(x))


def make_attention(config: ModelConfig) -> Attention:
    """The attention mixer of this configuration."""
    return Attention(config)


def make_ffn(config: ModelConfig) -> FFN:
    """The feed-forward mixer of this configuration."""
    return FFN(config.d_model, config.d_ffn, config.activation)


def make_mamba(config: ModelConfig) -> Mamba2:
    """The Mamba-2 mixer of this configuration."""
    return Mamba2(
        config.d_model,
        num_heads=config.mamba_num_heads,
        head_dim=config.mamba_head_dim,
        state_size=config.state_size,
        num_groups=config.num_groups,
        conv_width=config.conv_width,
        chunk_size=config.chunk_size,
        eps=config.norm_eps,
        min_time_step=config.min_time_step,
    )


MIXERS = {"M": make_mamba, "*": make_attention, "-": make_ffn}


def make_block(letter: str, config: ModelConfig, compute_dtype: torch.dtype) -> nn.Module:
    """The block that a letter of the pattern stands for; its branch runs in compute_dtype."""
    if letter == "T":
        return TransformerBlock(config, compute_dtype)
    return Block(RMSNorm(config.d_model, config.norm_eps, compute_dtype), MIXERS[letter](config))
