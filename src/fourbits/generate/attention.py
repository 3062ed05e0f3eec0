"""Attention with a cache, for whole prompts and for one token per sequence."""

import torch
from torch import Tensor
from torch.nn import functional as F

from fourbits.generate.cache import AttentionCache
from fourbits.model.attention import Attention, attention_core
from fourbits.model.rotary import rotate, rotations


def attend_to_prompts(mixer: Attention, x: Tensor, kept: AttentionCache, documents: Tensor | None) -> Tensor:
    """The mixer's forward pass over whole prompts, [B, T, D] -> [B, T, D]; fills the cache.

    Rows may end with padding, which has no effect because attention is causal.
    """
    positions = torch.arange(x.shape[1], device=x.device, dtype=torch.int64)
    rotation = _rotation(mixer, positions)
    q, k, v = _projected(mixer, x)
    rotated = k.unflatten(-1, (-1, mixer.head_dim))
    if rotation is not None:
        rotated = rotate(rotated, rotation).to(k.dtype)
    kept.keys[:, : x.shape[1]] = rotated
    kept.values[:, : x.shape[1]] = v.unflatten(-1, (-1, mixer.head_dim))
    return mixer.o_proj(attention_core(q, k, v, mixer.head_dim, rotation, documents, mixer.window))


def attend_to_cache(
    mixer: Attention, x: Tensor, kept: AttentionCache, lengths: Tensor, visible: Tensor
) -> Tensor:
    """Attention of one more token per row, [B, 1, D] -> [B, 1, D]; adds the token to the cache.

    lengths: the token's position, int64 [B]; visible: which cached tokens it sees, itself included, bool
    [B, S].
    """
    rows = torch.arange(len(x), device=x.device, dtype=torch.int64)
    q, k, v = (part.unflatten(-1, (-1, mixer.head_dim)).squeeze(1) for part in _projected(mixer, x))
    rotation = _rotation(mixer, lengths)
    if rotation is not None:  # each row has its own position: [2, B, 1, P/2], as for B tokens of one sequence
        q, k = (rotate(part[None], rotation)[0].to(part.dtype) for part in (q, k))
    kept.keys[rows, lengths], kept.values[rows, lengths] = k, v
    if mixer.window is not None:
        positions = torch.arange(visible.shape[1], device=x.device, dtype=torch.int64)
        visible = visible & (lengths[:, None] - positions < mixer.window)
    keys, values = (part.transpose(1, 2) for part in (kept.keys, kept.values))  # [B, G, S, P]
    # the heads that share keys are rows of one GEMM, so that keys are not repeated for them
    q = q.unflatten(1, (keys.shape[1], -1))
    dtype = q.dtype
    if q.device.type == "cpu":
        q, keys, values = q.float(), keys.float(), values.float()  # as in attention_core
    y = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible[:, None, None])
    return mixer.o_proj(y.to(dtype).flatten(1)[:, None])


def _projected(mixer: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the tokens, normalized if the mixer normalizes them."""
    q, k, v = mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)
    if mixer.q_norm is not None and mixer.k_norm is not None:
        q, k = mixer.normed(mixer.q_norm, q), mixer.normed(mixer.k_norm, k)
    return q, k, v


def _rotation(mixer: Attention, positions: Tensor) -> Tensor | None:
    if mixer.rope_theta is None:
        return None
    return rotations(positions, mixer.head_dim, mixer.rope_theta, mixer.rope_scaling)
