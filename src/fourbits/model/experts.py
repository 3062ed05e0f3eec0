"""Several linear layers in one parameter, each applied to some of the rows: the experts of a mixture."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fourbits.model.linear import LinearFunction


class GroupedLinear(nn.Module):
    """num_linears linear layers without bias whose weights are one FP32 parameter [E, N, K].

    `groups_linears` and `casts_weight` declare to a precision recipe what this class computes.
    """

    groups_linears = True
    casts_weight = True

    def __init__(self, num_linears: int, in_features: int, out_features: int, init_std: float = 0.02) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(num_linears, out_features, in_features, dtype=torch.float32))
        nn.init.normal_(self.weight, std=init_std)

    def forward(self, input: Tensor, counts: Sequence[int]) -> Tensor:
        """Apply each linear layer to its rows; the result has input's dtype.

        input: [M, K], the rows of layer 0 first, then those of layer 1 and so on; counts: the rows of each, E
        numbers whose sum is M -> [M, N]. Raises ValueError for other counts.
        """
        if len(counts) != len(self.weight) or sum(counts) != len(input):
            raise ValueError(
                f"GroupedLinear: counts must be {len(self.weight)} numbers whose sum is {len(input)}, "
                f"the number of rows, got {len(counts)} numbers whose sum is "
                f"{sum(counts)}. Count the rows of each layer in order."
            )
        parts = zip(input.split(list(counts)), self.weight.unbind(0), strict=True)
        outputs: list[Tensor] = [LinearFunction.apply(part, weight) for part, weight in parts if len(part)]
        return torch.cat(outputs) if outputs else input.new_empty(0, self.out_features)

    def extra_repr(self) -> str:
        """The number of linear layers and their sizes."""
        return f"{len(self.weight)} linears, in_features={self.in_features}, out_features={self.out_features}"
