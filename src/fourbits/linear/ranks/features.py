"""The ranks of a process group that split a layer's features evenly: its table, and the reduction of amaxes.

A rank has a part of W, of X where input features are split, and of dY where output features are. Only the
amaxes of those are reduced; what all ranks have in full has the same amax on each of them.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from fourbits.linear.amax_reduction import OutRuns, register_amax_reduction
from fourbits.linear.feature_shard import sharded
from fourbits.linear.layer_state import FeatureShard
from fourbits.recipe.recipe import GemmTable

#: the split dimension of the weight -> the operands of which each rank has a part
_IN_PARTS = {
    0: {"fprop.rhs", "dgrad.rhs", "dgrad.lhs", "wgrad.lhs"},
    1: {"fprop.rhs", "dgrad.rhs", "fprop.lhs", "wgrad.rhs"},
}


class _Maxima:
    """The reduction over a group. A group that is created again, of the same ranks, takes its place."""

    def __init__(self) -> None:
        self.group: Any = None

    def __call__(self, bits: Tensor, roles: tuple[str, ...]) -> Tensor:
        """Maxima over the group, written over those of this rank, which nothing else reads."""
        dist.all_reduce(bits, dist.ReduceOp.MAX, group=self.group)
        return bits


#: the reductions of this process, by name
_reductions: dict[str, _Maxima] = {}


def group_reduction(group: Any, dim: int, runs: OutRuns = ()) -> str:
    """The name of a reduction over exactly the ranks that share a layer, whose weight is split along dim.

    group: None for all processes; runs: as for `register_amax_reduction`. All ranks of the group must call
    the layer in the same order.
    """
    ranks = "of all" if group is None else dist.get_process_group_ranks(group)
    name = f"{('output', 'input')[dim]} features of ranks {ranks} {runs or ''}".rstrip()
    if name not in _reductions:
        _reductions[name] = _Maxima()
        register_amax_reduction(name, _reductions[name], runs, _IN_PARTS[dim])
    _reductions[name].group = group
    return name


def split_table(table: GemmTable, dim: int, size: int, ranks: int, reduction: str) -> GemmTable:
    """The table of a layer of which each rank has size / ranks features.

    Raises ValueError, on all ranks, where a table does not support it: where the second rank begins inside a
    block, so do others or none.
    """
    return sharded(table, reduction, shard_at(dim, size // ranks))


def shard_at(dim: int, first: int) -> FeatureShard:
    """The shard that begins at a feature of the weight's dimension dim."""
    return FeatureShard(first_in=first if dim == 1 else 0, first_out=first if dim == 0 else 0)
