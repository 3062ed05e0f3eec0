"""Which tokens of a sequence belong together: packed documents, told apart by the token that ends each.

A sequence of training tokens is cut from documents laid end to end. The number of a token's document is the
count of end tokens before it, so the tokens say all there is to know, and nothing has to travel beside them.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def document_numbers(tokens: Tensor, end: int) -> Tensor:
    """Which document of its sequence each token is in. tokens: int [B, T] -> int32 [B, T], from 0, rising.

    An end token belongs to the document that it ends.
    """
    ends = F.pad(tokens == end, (1, -1))
    return ends.cumsum(1, dtype=torch.int32)


def begins_document(documents: Tensor) -> Tensor:
    """Whether a token is the first of its document in the sequence. int [B, T] -> bool [B, T]."""
    return ~same_as_before(documents, 1)


def same_as_before(documents: Tensor, back: int) -> Tensor:
    """Whether the token `back` places earlier is of the same document. int [B, T] -> bool [B, T]."""
    return documents == F.pad(documents, (back, 0), value=-1)[:, : documents.shape[1]]


def same_document(documents: Tensor) -> Tensor:
    """Which pairs of tokens share a document. int [B, T] -> bool [B, T (t), T (s)]."""
    return documents[:, :, None] == documents[:, None, :]
