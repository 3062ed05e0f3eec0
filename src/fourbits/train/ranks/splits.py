"""The split of a parameter over the ranks that share layers: from the whole to a rank's part, and back."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Split(NamedTuple):
    """How a parameter of a model is split over the ranks that share its layer.

    shape: of the whole. dim: the dimension that is split into equal parts; None: every rank holds all of it.
    segments: sizes along dim of consecutive segments, each of which is split separately; a rank holds its
    parts one after the other. Empty for a single segment.
    """

    shape: torch.Size
    dim: int | None = None
    segments: tuple[int, ...] = ()

    def part(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """A rank's part of the whole, contiguous."""
        if self.dim is None or ranks == 1:
            return whole
        pieces = whole.split(self.segments or whole.shape[self.dim], self.dim)
        own = [piece.chunk(ranks, self.dim)[rank] for piece in pieces]
        return own[0].contiguous() if len(own) == 1 else torch.cat(own, self.dim)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole from the parts of all ranks."""
        if self.dim is None or len(parts) == 1:
            return parts[0]
        sizes = [size // len(parts) for size in self.segments] or parts[0].shape[self.dim]
        split = [part.split(sizes, self.dim) for part in parts]
        return torch.cat([piece for pieces in zip(*split, strict=True) for piece in pieces], self.dim)


#: where runs of rows begin, in a rank's part of a tensor and in the whole
Runs = tuple[tuple[int, int], ...]


def rows_of(segments: Sequence[int], rank: int, ranks: int) -> Runs:
    """The runs of rows in a rank's part of a tensor of these segments."""
    found: list[tuple[int, int]] = []
    own = first = 0
    for size in segments:
        each = size // ranks
        found.append((own, first + rank * each))
        own, first = own + each, first + size
    return tuple(found)
