"""Sequence parallelism: ranks that share layers have all tokens inside mixers, and a part of them in between.

Before a mixer the tokens are gathered; after it, each rank has a summand of every token, and the sums are
scattered, in the dtype of the activations (BF16). In the backward pass the two swap roles.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# newer names of the same collectives; PyTorch 2.11 and 2.12 have the older ones alone
_all_gather: Any = getattr(dist, "all_gather_single", None) or vars(dist)["all_gather_into_tensor"]
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or vars(dist)["reduce_scatter_tensor"]

#: (tokens, process group) -> tokens
Exchange = Callable[[Tensor, Any], Tensor]


def gathered(x: Tensor, group: Any) -> Tensor:
    """The tokens of all ranks. x: [B, T / ranks, D] -> [B, T, D]."""
    ranks = dist.get_world_size(group)
    parts = x.new_empty(ranks, *x.shape)
    _all_gather(parts.flatten(0, 1), x.contiguous(), group=group)
    return parts.transpose(0, 1).flatten(1, 2)


def scattered(x: Tensor, group: Any) -> Tensor:
    """The sums over ranks of this rank's tokens. x: [B, T, D] -> [B, T / ranks, D], in x's dtype."""
    ranks = dist.get_world_size(group)
    parts = x.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
    own = torch.empty_like(parts[0])
    _reduce_scatter(own, parts.flatten(0, 1), group=group)
    return own


class _Exchange(torch.autograd.Function):
    """`gathered` or `scattered`, and the other one for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Exchange, back: Exchange, group: Any) -> Tensor:
        ctx.back, ctx.group = back, group
        return there(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.group), None, None, None


def share_tokens(mixer: nn.Module, group: Any) -> None:
    """Make a mixer, whose layers are split over the ranks of a group, take and return this rank's tokens."""

    def gather(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return _Exchange.apply(args[0], gathered, scattered, group), *args[1:]

    def scatter(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return _Exchange.apply(output, scattered, gathered, group)

    mixer.register_forward_pre_hook(gather)
    mixer.register_forward_hook(scatter)
