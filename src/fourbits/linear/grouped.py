"""Groups of linear layers whose weights are one parameter: the experts of a mixture, in the same recipe.

A group returns bit for bit what one QuantizedLinear per expert would: each expert's rows and weight are
quantized as separate tensors, with separate scales and random bits. An expert without rows is skipped, and
its gradient is zero.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fourbits.linear.layer_state import LayerState
from fourbits.linear.stacked.product import grouped_product


class QuantizedGroup(nn.Module):
    """A group of linear layers that `convert` has given a table. Created by `convert` only."""

    groups_linears = True
    casts_weight = True

    quantization: LayerState
    weight: nn.Parameter
    in_features: int
    out_features: int

    def forward(self, input: Tensor, counts: Sequence[int]) -> Tensor:
        """input: [M, in_features], the rows of expert 0 first; counts: rows of each -> [M, out_features]."""
        state = self.quantization
        if state.runs_original(self.training):
            original: Any = state.original
            return original.forward(self, input, counts)
        if len(counts) != len(self.weight) or sum(counts) != len(input):
            raise ValueError(
                f"QuantizedGroup: counts must be the rows of each of {len(self.weight)} linear layers, "
                f"{len(input)} in all, got {len(counts)} entries that sum to "
                f"{sum(counts)}. Count the rows of each layer in order."
            )
        if input.shape[1] != self.in_features:
            raise ValueError(
                f"QuantizedGroup: the input must have in_features={self.in_features} columns, got shape "
                f"{list(input.shape)}. Pass the rows of all layers as one matrix."
            )
        offsets = offsets_of(counts, input.device)
        return grouped_product(state, self.training, input, self.weight, None, offsets, False, counts)


def offsets_of(counts: Sequence[int], device: torch.device) -> Tensor:
    """Where each expert's rows begin and the last one's end, int32 [E + 1], without waiting for a GPU."""
    ends = [0, *itertools.accumulate(counts)]
    if device.type != "cuda":
        return torch.tensor(ends, dtype=torch.int32, device=device)
    return torch.tensor(ends, dtype=torch.int32, device="cpu", pin_memory=True).to(device, non_blocking=True)
