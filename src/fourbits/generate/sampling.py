"""Chooses a token from logits: the most likely one, or a draw that depends on the token's sequence only."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of sampling. Raises ValueError for values out of range.

    temperature: 0 takes the most likely token. top_k: draw among the k most likely tokens; top_p: among the
    fewest tokens whose probabilities sum to at least top_p. seed: determines the draws.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be at least 0 and finite, got {self.temperature}. Set it to 0 for the "
                "most probable token, or 1 to sample as the model predicts."
            )
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}. Omit it for 0.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(
                f"top_k must be at least 1, got {self.top_k}. Omit it to sample from all tokens."
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}. Omit it to sample from all tokens.")

    def draws(self, sequence: int, count: int) -> Tensor:
        """Uniform numbers in [0, 1) for the tokens of a sequence, FP32 [count].

        They depend on seed and sequence only, so a sequence's tokens do not depend on its batch.
        """
        drawn = np.random.default_rng((self.seed, sequence)).random(count, dtype=np.float32)
        return torch.from_numpy(drawn)


def chosen(logits: Tensor, draws: Tensor, sampling: Sampling) -> Tensor:
    """A token for every row of logits [B, V]: int64 [B]. draws: uniform in [0, 1), FP32 [B]."""
    logits = logits.float()
    if sampling.temperature == 0:
        return logits.argmax(-1)
    values, tokens = (logits / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    probabilities = values.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    if sampling.top_k is not None:
        probabilities[:, sampling.top_k :] = 0
    if sampling.top_p is not None:
        probabilities = torch.where(before < sampling.top_p, probabilities, 0)
    upto = probabilities.cumsum(-1)
    place = (upto <= draws[:, None] * upto[:, -1:]).sum(-1, keepdim=True)
    # rounding may leave the largest draws above the last sum; they get the last token that can be drawn
    place = torch.minimum(place, (probabilities > 0).sum(-1, keepdim=True) - 1)
    return tokens.gather(1, place)[:, 0]
