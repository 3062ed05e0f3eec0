"""Amaxes over the shards of a tensor: a layer that is a shard by features quantizes with the whole tensor's.

docs/nvfp4.md, section 6.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.quant.quantize import own_amaxes
from fourbits.quant.request import OperandInputs, OperandRequest

#: (int32 [n], the operands' roles) -> int32 [n], the maxima over all shards
AmaxReduction = Callable[[Tensor, tuple[str, ...]], Tensor]

#: (first feature in the shard, first feature in the whole layer) of each run of output features
OutRuns = tuple[tuple[int, int], ...]


class _Registered(NamedTuple):
    reduce: AmaxReduction
    out_runs: OutRuns
    #: None: all
    roles: frozenset[str] | None


_reductions: dict[str, _Registered] = {}


def register_amax_reduction(
    name: str, reduce: AmaxReduction, out_runs: OutRuns = (), roles: Collection[str] | None = None
) -> None:
    """Register a reduction of amaxes under a name, for `shard_features`; graphs carry the name.

    reduce: (bits int32 [n], roles) -> the elementwise maxima over all shards. bits are those of fp32
    magnitudes, whose order as integers is that of the magnitudes, with NaN largest. It is called once per
    tensor that is quantized, in the same order on all shards. The amax of a role whose tensor is not sharded
    may be returned unchanged. out_runs: for shards whose output features are not one run of the whole
    layer's, the runs in order, each of whole blocks; such layers have first_out 0. roles: the operands whose
    tensors are sharded, such as "fprop.rhs"; others are quantized as without a reduction, which is faster;
    None: all. Raises ValueError for an empty name, and for a name that is taken.
    """
    if not name:
        raise ValueError("register_amax_reduction: name must not be empty, which stands for no reduction.")
    new = _Registered(reduce, out_runs, None if roles is None else frozenset(roles))
    if _reductions.setdefault(name, new) != new:
        raise ValueError(
            f"register_amax_reduction: {name!r} is registered already, for another function, other runs or "
            "other roles. Choose another name."
        )


def reduction_for(name: str, role: str) -> str:
    """The name, if this reduction is for a role's tensor, else "", which stands for no reduction."""
    known = _reductions.get(name)
    return "" if known is None or (known.roles is not None and role not in known.roles) else name


def amax_reduction(name: str) -> AmaxReduction:
    """The reduction of a name. Raises ValueError for an unknown one."""
    if name not in _reductions:
        raise ValueError(
            f"amax_reduction: no reduction is called {name!r}, only {', '.join(_reductions) or 'none'}. "
            "Call fourbits.register_amax_reduction first, in every process."
        )
    return _reductions[name].reduce


def out_runs(name: str) -> OutRuns:
    """The runs of output features that the shards of a registered reduction hold; () for one run."""
    return _reductions[name].out_runs


def with_reduced_amaxes(
    name: str,
    roles: tuple[str, ...],
    x: Tensor,
    requests: tuple[OperandRequest, ...],
    inputs: tuple[OperandInputs, ...],
) -> tuple[OperandInputs, ...]:
    """The inputs with the amax of the whole tensor, unless a stored one is used or a format has none."""
    places = [place for place, request in enumerate(requests) if request.spec.tensor_scaled]
    if not places:
        return inputs
    own = own_amaxes(x, tuple(requests[p] for p in places), tuple(inputs[p] for p in places))
    bits = amax_reduction(name)(own.abs().view(torch.int32), tuple(roles[p] for p in places))
    if bits.dtype != torch.int32 or bits.shape != own.shape:
        raise ValueError(
            f"amax_reduction: {name!r} must return int32 {list(own.shape)}, like its argument, got "
            f"{bits.dtype} {list(bits.shape)}. Reduce a copy of its argument."
        )
    whole, found = bits.view(torch.float32), list(inputs)
    for p, amax in zip(places, whole, strict=True):
        stored = inputs[p].amax
        found[p] = inputs[p]._replace(amax=amax if stored is None else torch.where(stored < 0, amax, stored))
    return tuple(found)
