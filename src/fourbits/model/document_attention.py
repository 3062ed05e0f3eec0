"""Attention over packed documents: a token attends to itself and earlier tokens of its document.

On a GPU, scores are computed in blocks of 128 x 128. Because document numbers do not decrease, those at a
block's corners decide whether the block has any visible score. So nothing of size T^2 is stored, and blocks
between two documents cost nothing. PyTorch's flex_attention generates the kernels, under torch.compile only:
without it, it would materialize all scores. Elsewhere the plain operator gets a boolean mask [B, 1, T, T].
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from fourbits.model.documents import same_document

BLOCK = 128


def document_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(P)) v over a token and the earlier ones of its document.

    q: [B, H, T, P]; k, v: [B, G, T, P] with H a multiple of G; documents: int [B, T], non-decreasing -> [B,
    H, T, P].
    """
    if q.is_cuda and torch.compiler.is_compiling() and q.shape[2] % BLOCK == 0:
        return by_blocks(q, k, v, documents)
    return by_mask(q, k, v, documents)


def by_blocks(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """`document_attention` in the blocks of `document_blocks`. T must be a multiple of 128."""
    grouped = q.shape[1] != k.shape[1]
    y = flex_attention(q, k, v, block_mask=document_blocks(documents), enable_gqa=grouped)
    assert isinstance(y, Tensor)  # not a tuple, as no statistics were requested
    return y


def by_mask(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """`document_attention` with a boolean mask, for any T."""
    if q.is_cuda:
        # No fused GPU kernel supports both a mask and grouped heads; other kernels need T^2 memory.
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    mask = same_document(documents).tril()[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def document_blocks(documents: Tensor) -> BlockMask:
    """The blocks in which some scores are visible, and those in which all are.

    documents: int [B, T], non-decreasing, T a multiple of 128.
    """
    first, last = documents[:, ::BLOCK], documents[:, BLOCK - 1 :: BLOCK]  # [B, N]
    number = torch.arange(first.shape[1], device=documents.device, dtype=torch.int64)
    earlier = number[:, None] > number  # [N (of queries), N (of keys)]
    # Some: the last key is in the first query's document. All: the first key is in the last query's document.
    some = (last[:, None, :] >= first[:, :, None]) & (earlier | (number[:, None] == number))
    whole = (first[:, None, :] == last[:, :, None]) & earlier

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (documents[batch, query] == documents[batch, key])

    partly, wholly = _numbered(some & ~whole), _numbered(whole)
    return BlockMask.from_kv_blocks(*partly, *wholly, BLOCK_SIZE=BLOCK, mask_mod=visible)


def _numbered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The number of chosen blocks in each row, and the indices of all blocks, chosen ones first.

    bool [B, N, N] -> int32 [B, 1, N] and [B, 1, N, N].
    """
    chosen = chosen[:, None].int()
    order = chosen.argsort(stable=True, dim=-1, descending=True)
    return chosen.sum(-1, dtype=torch.int32), order.int()
