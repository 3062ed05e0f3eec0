"""Samples of the health of layers that ranks share, taken from whole tensors, as in one process."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from fourbits.linear.layer_state import FeatureShard, Tap, TappedCall
from fourbits.linear.monitor.health import Sampling
from fourbits.linear.sr_counter import of_shard
from fourbits.train.ranks.splits import Split
from fourbits.train.ranks.tensor_parallel import TensorRanks


class WholeTap:
    """Gathers the tensors of a layer's call and passes them to a tap. All ranks sample together."""

    def __init__(self, tap: Tap, shard: FeatureShard, split: Split, ranks: TensorRanks) -> None:
        """split: of the layer's weight."""
        self._tap, self._shard, self._split, self._ranks = tap, shard, split, ranks

    @property
    def waits(self) -> bool:
        """Whether it has seen no call yet."""
        return self._tap.waits

    @torch.no_grad()
    def forward(self, x: Tensor, weight: Tensor, call: TappedCall) -> bool:
        """A forward pass. x: [M, K]; weight: [N, K], or the whole one if it was gathered as codes."""
        if self._split.dim == 1:
            x = self._whole(x, self._split)
        if weight.shape != self._split.shape:
            weight = self._whole(weight, self._split)
        counter = of_shard(call.counter, -self._shard.first_in, -self._shard.first_out)
        return self._tap.forward(x, weight, call._replace(counter=counter))

    @torch.no_grad()
    def backward(self, dy: Tensor) -> None:
        """The backward pass of the same call. dy: [M, N]."""
        self._tap.backward(self._whole(dy, self._split._replace(dim=1)) if self._split.dim == 0 else dy)

    def _whole(self, part: Tensor, split: Split) -> Tensor:
        part = part.detach().contiguous()
        parts = [torch.empty_like(part) for _ in range(self._ranks.size)]
        dist.all_gather(parts, part, group=self._ranks.group)
        return split.whole(parts)


def sample_whole(taken: Sampling, split_of: Callable[[str], Split], ranks: TensorRanks) -> None:
    """Put a gathering tap before the tap of each layer that is split. split_of: a parameter's split."""
    for name, (state, tap) in taken.taps.items():
        if state.shard is not None:
            state.tap = WholeTap(tap, state.shard, split_of(f"{name}.weight"), ranks)
