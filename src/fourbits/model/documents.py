"""Packed documents: which tokens of a sequence belong together, from the token that ends each document.

A training sequence is a part of concatenated documents. The number of a token's document is the count of end
tokens before it, so it follows from the tokens alone.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def document_numbers(tokens: Tensor, end: int) -> Tensor:
    """Number of each token's document in its sequence. tokens: int [B, T] -> int32 [B, T].

    Numbers start at 0 and do not decrease. An end token belongs to the document that it ends.
    """
    ends = F.pad(tokens == end, (1, -1))
    return ends.cumsum(1, dtype=torch.int32)


def begins_document(documents: Tensor) -> Tensor:
    """Whether a token is the first of its document in the sequence. int [B, T] -> bool [B, T]."""
    return ~same_as_before(documents, 1)


def same_as_before(documents: Tensor, back: int) -> Tensor:
    """Whether the token `back` positions earlier is in the same document. int [B, T] -> bool [B, T]."""
    return documents == F.pad(documents, (back, 0), value=-1)[:, : documents.shape[1]]


def same_document(documents: Tensor) -> Tensor:
    """Mask of the pairs of tokens that share a document. int [B, T] -> bool [B, T (t), T (s)]."""
    return documents[:, :, None] == documents[:, None, :]
