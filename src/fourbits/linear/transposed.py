"""QuantizedConv1D: transformers' Conv1D, whose weight is [in, out], with GEMMs that follow a table."""

from typing import Any

import torch
from torch import Tensor, nn

from fourbits.linear.layer_state import LayerState
from fourbits.linear.module import blended, eager_matmul, runs_eagerly, traced_call


class QuantizedConv1D(nn.Module):
    """A Conv1D that `convert` has given a table; it computes the bits of a linear layer with its weight
    transposed. Created by `convert` only, as a base of the layer's own class.
    """

    quantization: LayerState
    #: [in_features, out_features]
    weight: nn.Parameter
    bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] float -> [..., out_features] in the original's output dtype."""
        state = self.quantization
        if state.runs_original(self.training):
            original: Any = state.original
            return original.forward(self, x)
        weight = self.weight.t()  # autograd transposes the gradient back
        if not runs_eagerly(x):
            return traced_call(self, x, weight)
        width = weight.shape[1]
        if x.shape[-1:] != (width,):
            raise ValueError(
                f"QuantizedConv1D: the last dimension of the input must be {width}, got shape "
                f"{list(x.shape)}. Pass an input of that width."
            )
        config = state.config(self.training, self.training and torch.is_grad_enabled())
        y = eager_matmul(state, config, x, weight, self.bias)
        y = y.view(*x.shape[:-1], weight.shape[0])
        return y if state.blend is None else blended(self, y, x, weight, config)
