"""The cache of the tokens that a model has read, so that the next token costs the work of one token.

Attention keeps keys and values. A Mamba layer keeps the last inputs of its convolution and the state of its
scan, whose sizes do not depend on the number of tokens. Tensors keep their addresses, so that a
captured CUDA graph can be replayed on them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fourbits.model.attention import Attention
from fourbits.model.lm import LanguageModel
from fourbits.model.mamba2 import Mamba2


@dataclass(frozen=True, slots=True)
class AttentionCache:
    """Keys (rotated) and values of all tokens so far, [B, S, G, P] each, in the dtype of activations."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class MambaCache:
    """The last W - 1 inputs of the convolution, [B, W - 1, C], and the scan's state, fp32 [B, H, P, N]."""

    inputs: Tensor
    state: Tensor


@dataclass(frozen=True, slots=True)
class Cache:
    """The caches of a model's mixers.

    lengths: tokens read, int64 [B]; documents: number of each token's document, int32 [B, S], or None if the
    model's attention spans documents; ended: whether a row's last token ended its document, bool [B].
    """

    attention: dict[nn.Module, AttentionCache]
    mamba: dict[nn.Module, MambaCache]
    lengths: Tensor
    documents: Tensor | None
    ended: Tensor


def empty_cache(model: LanguageModel, rows: int, capacity: int) -> Cache:
    """An empty cache for `rows` sequences of at most `capacity` tokens."""
    device, dtype = model.embed.weight.device, model.norm.out_dtype or model.residual_dtype
    separate = model.config.document_end is not None
    return Cache(
        {m: _of_attention(m, rows, capacity, dtype) for m in model.modules() if isinstance(m, Attention)},
        {m: _of_mamba(m, rows, dtype) for m in model.modules() if isinstance(m, Mamba2)},
        lengths=torch.zeros(rows, dtype=torch.int64, device=device),
        documents=torch.zeros(rows, capacity, dtype=torch.int32, device=device) if separate else None,
        ended=torch.zeros(rows, dtype=torch.bool, device=device),
    )


def _of_attention(mixer: Attention, rows: int, capacity: int, dtype: torch.dtype) -> AttentionCache:
    weight, head_dim = mixer.k_proj.weight, mixer.head_dim
    shape = (rows, capacity, len(weight) // head_dim, head_dim)
    keys, values = (torch.zeros(shape, dtype=dtype, device=weight.device) for _ in range(2))
    return AttentionCache(keys, values)


def _of_mamba(mixer: Mamba2, rows: int, dtype: torch.dtype) -> MambaCache:
    channels, _, width = mixer.conv_weight.shape
    (head_dim, state_size), device = mixer.sizes, mixer.conv_weight.device
    inputs = torch.zeros(rows, width - 1, channels, dtype=dtype, device=device)
    shape = (rows, len(mixer.A_log), head_dim, state_size)
    return MambaCache(inputs, torch.zeros(shape, dtype=torch.float32, device=device))
