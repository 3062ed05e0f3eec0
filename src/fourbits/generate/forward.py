"""A model's forward pass with a cache: `read_prompts` fills it, `read_token` adds one token per sequence."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fourbits.generate.attention import attend_to_cache, attend_to_prompts
from fourbits.generate.cache import Cache
from fourbits.generate.mamba import scan_prompts, scan_token
from fourbits.model.attention import Attention
from fourbits.model.blocks import Block, TransformerBlock
from fourbits.model.documents import document_numbers
from fourbits.model.layers import FFN, RMSNorm
from fourbits.model.lm import LanguageModel
from fourbits.model.mamba2 import Mamba2
from fourbits.model.ops.add_norm.op import add_norm, fusable

#: (mixer, normalized input [B, T, D]) -> what the mixer adds to the residual stream
Mix = Callable[[nn.Module, Tensor], Tensor]


def read_prompts(model: LanguageModel, tokens: Tensor, lengths: Tensor, cache: Cache) -> Tensor:
    """Logits [B, V] after the last token of each prompt; fills an empty cache.

    tokens: int64 [B, T]; lengths: of each prompt, int64 [B], at least 1. What follows a prompt in its row is
    padding, which has no effect.
    """
    end, last = model.config.document_end, lengths[:, None] - 1
    documents = None if end is None else document_numbers(tokens, end)
    cache.lengths.copy_(lengths)
    if cache.documents is not None and documents is not None:
        cache.documents[:, : tokens.shape[1]] = documents
        cache.ended.copy_(tokens.gather(1, last)[:, 0] == end)

    def mix(mixer: nn.Module, x: Tensor) -> Tensor:
        if isinstance(mixer, Attention):
            return attend_to_prompts(mixer, x, cache.attention[mixer], documents)
        if isinstance(mixer, Mamba2):
            return scan_prompts(mixer, x, cache.mamba[mixer], lengths, documents)
        assert isinstance(mixer, FFN)
        return _feed_forward(mixer, x)

    hidden = _through(model, tokens, mix)
    return model.head(hidden.gather(1, last[..., None].expand(-1, -1, hidden.shape[-1])))[:, 0]


def read_token(model: LanguageModel, tokens: Tensor, cache: Cache) -> Tensor:
    """Logits [B, V] after one more token of each sequence; adds it to the cache. tokens: int64 [B]."""
    visible = _visible(cache)

    def mix(mixer: nn.Module, x: Tensor) -> Tensor:
        if isinstance(mixer, Attention):
            return attend_to_cache(mixer, x, cache.attention[mixer], cache.lengths, visible)
        if isinstance(mixer, Mamba2):
            return scan_token(mixer, x, cache.mamba[mixer], cache.ended)
        assert isinstance(mixer, FFN)
        return _feed_forward(mixer, x)

    logits = model.head(_through(model, tokens[:, None], mix))[:, 0]
    if model.config.document_end is not None:
        cache.ended.copy_(tokens == model.config.document_end)
    cache.lengths.add_(1)
    return logits


def _visible(cache: Cache) -> Tensor:
    """Which tokens of the cache the next token of each row sees, itself included, bool [B, S].

    S is 0 without attention. Records the token's document in the cache.
    """
    capacity = next((kept.keys.shape[1] for kept in cache.attention.values()), 0)
    positions = torch.arange(capacity, device=cache.lengths.device, dtype=torch.int64)
    visible = positions <= cache.lengths[:, None]
    if cache.documents is not None and capacity:
        rows = torch.arange(len(visible), device=visible.device, dtype=torch.int64)
        current = cache.documents[rows, cache.lengths - 1] + cache.ended
        cache.documents[rows, cache.lengths] = current.to(torch.int32)
        visible = visible & (cache.documents == current[:, None])
    return visible


def _through(model: LanguageModel, tokens: Tensor, mix: Mix) -> Tensor:
    """The head's input, [B, T, D]; mix(mixer, x) runs a mixer."""
    x, branch = model.embed(tokens).to(model.residual_dtype), None
    for block in model.blocks:
        if isinstance(block, TransformerBlock):
            parts = ((block.attention_norm, block.attention), (block.ffn_norm, block.ffn))
        else:
            assert isinstance(block, Block)
            parts = ((block.norm, block.mixer),)
        for norm, mixer in parts:
            x, normed = _added(norm, x, branch)
            branch = mix(mixer, normed)
    return _added(model.norm, x, branch)[1]


def _added(norm: RMSNorm, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
    """The residual stream with a branch added, and its norm."""
    return add_norm(x, branch, norm.weight, norm.eps, norm.out_dtype or x.dtype, fusable(x.device))


def _feed_forward(ffn: FFN, x: Tensor) -> Tensor:
    """The FFN's own forward pass, [B, T, D] -> [B, T, D]; squared ReLU overwrites its input."""
    if ffn.gate_proj is not None:
        return ffn(x)
    return ffn.down_proj(ffn.up_proj(x).relu_().square_())  # a BF16 square is rounded once, as in the region
