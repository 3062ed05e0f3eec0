"""Attention that sees less than all earlier tokens: those of its document, or of a window, or both.

On a GPU, scores are computed in blocks of 128 x 128. Because document numbers do not decrease, those at a
block's corners decide whether the block has any visible score, and so do the corners' distances. So nothing
of size T^2 is stored, and blocks without a visible score cost nothing. PyTorch's flex_attention generates the
kernels, under torch.compile only: without it, it would materialize all scores. Elsewhere the plain operator
gets a boolean mask [B, 1, T, T].
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from fourbits.model.documents import same_document

BLOCK = 128


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None = None
) -> Tensor:
    """softmax(q k^T / sqrt(P)) v over the last `window` tokens of its document up to a token.

    q: [B, H, T, P]; k, v: [B, G, T, P] with H a multiple of G; documents: int [B, T], non-decreasing, or None
    for one; window: at least 1, or None for all -> [B, H, T, P].
    """
    if documents is None:
        documents = torch.zeros(q.shape[0], q.shape[2], dtype=torch.int32, device=q.device)
    if q.is_cuda and torch.compiler.is_compiling() and q.shape[2] % BLOCK == 0:
        return by_blocks(q, k, v, documents, window)
    return by_mask(q, k, v, documents, window)


def by_blocks(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, window: int | None = None) -> Tensor:
    """`masked_attention` in the blocks of `visible_blocks`. T must be a multiple of 128."""
    grouped = q.shape[1] != k.shape[1]
    y = flex_attention(q, k, v, block_mask=visible_blocks(documents, window), enable_gqa=grouped)
    assert isinstance(y, Tensor)  # not a tuple, as no statistics were requested
    return y


def by_mask(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, window: int | None = None) -> Tensor:
    """`masked_attention` with a boolean mask, for any T."""
    if q.is_cuda:
        # No fused GPU kernel supports both a mask and grouped heads; other kernels need T^2 memory.
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    mask = visible_pairs(documents, window)[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def visible_pairs(documents: Tensor, window: int | None = None) -> Tensor:
    """The tokens s that a token t attends to. documents: int [B, T] -> bool [B, T (t), T (s)]."""
    visible = same_document(documents).tril()
    return visible if window is None else visible.triu(1 - window)


def visible_blocks(documents: Tensor, window: int | None = None) -> BlockMask:
    """The blocks in which some scores are visible, and those in which all are.

    documents: int [B, T], non-decreasing, T a multiple of 128.
    """
    reach = documents.shape[1] if window is None else window
    first, last = documents[:, ::BLOCK], documents[:, BLOCK - 1 :: BLOCK]  # [B, N]
    number = torch.arange(first.shape[1], device=documents.device, dtype=torch.int64)
    blocks_back = number[:, None] - number  # [N (of queries), N (of keys)]
    nearest, farthest = blocks_back * BLOCK - (BLOCK - 1), blocks_back * BLOCK + (BLOCK - 1)  # distances
    # Some: the first query sees the last key, or the block is on the diagonal. All: the last query sees the
    # first key.
    some = (last[:, None, :] >= first[:, :, None]) & (blocks_back >= 0) & (nearest < reach)
    whole = (first[:, None, :] == last[:, :, None]) & (blocks_back > 0) & (farthest < reach)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key <= query) & (documents[batch, query] == documents[batch, key])
        return seen if window is None else seen & (query - key < window)

    partly, wholly = _numbered(some & ~whole), _numbered(whole)
    return BlockMask.from_kv_blocks(*partly, *wholly, BLOCK_SIZE=BLOCK, mask_mod=visible)


def _numbered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The number of chosen blocks in each row, and the indices of all blocks, chosen ones first.

    bool [B, N, N] -> int32 [B, 1, N] and [B, 1, N, N].
    """
    chosen = chosen[:, None].int()
    order = chosen.argsort(stable=True, dim=-1, descending=True)
    return chosen.sum(-1, dtype=torch.int32), order.int()
