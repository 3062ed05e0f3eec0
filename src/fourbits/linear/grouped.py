"""Groups of linear layers whose weights are one parameter: the experts of a mixture, in the same recipe.

A group returns bit for bit what one QuantizedLinear per expert would: each expert's rows and weight are
quantized as separate tensors, with separate scales and random bits. An expert without rows is skipped, and
its gradient is zero.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fourbits.linear.flat import autocast
from fourbits.linear.layer_state import CallConfig, LayerState
from fourbits.linear.module import eager_matmul, runs_eagerly, traced_matmul


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
        if not (self.training or state.quantize_eval):
            original: Any = state.original
            return original.forward(self, input, counts)
        if len(counts) != len(self.weight) or sum(counts) != len(input):
            raise ValueError(
                f"QuantizedGroup: counts must be the rows of each of {len(self.weight)} linear layers, "
                f"{len(input)} in all, got {len(counts)} entries that sum to {sum(counts)}."
            )
        if input.shape[1] != self.in_features:
            raise ValueError(
                f"QuantizedGroup: the input must have in_features={self.in_features} columns, got shape "
                f"{list(input.shape)}."
            )
        config = state.config(self.training, self.training and torch.is_grad_enabled())
        parts = input.split(list(counts))
        used = [place for place, part in enumerate(parts) if len(part)]
        # unbind's gradient is one stack; indexing would allocate a tensor of all experts' size for each
        weights = self.weight.unbind(0)
        outputs = [_matmul(state, config, parts[i], weights[i], i, i == used[-1]) for i in used]
        return torch.cat(outputs) if outputs else autocast(input).new_empty(0, self.out_features)


def _matmul(
    state: LayerState, config: CallConfig, x: Tensor, weight: Tensor, place: int, last: bool
) -> Tensor:
    """One expert's GEMM, as layer number layer + place; the last expert counts the layer's own steps."""
    config = config._replace(layer=config.layer + place, counts_itself=config.counts_itself and last)
    if runs_eagerly(x):
        return eager_matmul(state, config, x, weight, None)
    return traced_matmul(state, config, x, weight, None)
