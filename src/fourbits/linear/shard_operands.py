"""Operands of a layer that is a shard by features: the slices of the whole layer's, byte for byte.

A shard may hold several runs of output features, which lie apart in the whole layer (the segments of a Mamba
mixer's in_proj). Random bits follow an element's place in the whole, so each run is quantized with a separate
counter, and the parts are joined. docs/nvfp4.md, section 11.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fourbits.linear.amax_reduction import out_runs, with_reduced_amaxes
from fourbits.linear.plan import Side
from fourbits.linear.sr_counter import of_shard
from fourbits.quant.quantize import Operand, quantizer
from fourbits.quant.request import OperandInputs, StatsTarget, signature_of
from fourbits.quant.tensor import ExactOperand

#: the operands of which a dimension of the tensor is output features -> which one
_OUT_FEATURES = {"fprop.rhs": 0, "dgrad.rhs": 0, "dgrad.lhs": 1, "wgrad.lhs": 1}


def shard_operands(
    side: Side, x: Tensor, inputs: tuple[OperandInputs, ...], target: StatsTarget | None
) -> tuple[Operand, ...]:
    """The operands of a shard's tensor, with the amax of the whole and the whole's random bits."""
    inputs = with_reduced_amaxes(side.reduction, side.roles, x, side.requests, inputs)
    runs, dim = out_runs(side.reduction), _OUT_FEATURES.get(side.roles[0])
    if not runs or dim is None or not any(request.draws for request in side.requests):
        return side.quantize(x, inputs, target)
    assert target is None, "amax policies are refused where a shard has several runs"
    counter = inputs[0].counter  # of the call, so the same for all of its operands
    ends = [*(own for own, _ in runs[1:]), x.shape[dim]]
    found: list[tuple[Operand, ...]] = []
    for (own, whole), end in zip(runs, ends, strict=True):
        part = x.narrow(dim, own, end - own).contiguous()
        moved = None if counter is None else of_shard(counter, 0, whole)
        given = tuple([one._replace(counter=moved) for one in inputs])
        found.append(quantizer(signature_of(part), side.requests)(part, given, None))
    return tuple(_joined(parts, dim) for parts in zip(*found, strict=True))


def _joined(parts: Sequence[Operand], dim: int) -> Operand:
    """One operand from those of consecutive parts of its tensor along a dimension, which split no block."""
    exact = [part for part in parts if isinstance(part, ExactOperand)]
    assert len(exact) == len(parts), "packed operands are refused where a shard has several runs"
    first = exact[0]
    scale = first.scale
    if scale.dim():  # [other axis, contraction axis]
        scale = torch.cat([part.scale for part in exact], dim if first.axis == 1 else 1 - dim)
    return replace(first, values=torch.cat([part.values for part in exact], dim), scale=scale)
