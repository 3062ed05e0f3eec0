"""Products of experts, one after the other: the specification, and the fallback without grouped kernels.

Expert e of a parameter is linear layer number `layer + e`: its rows and its weight are quantized by
themselves, with their own amaxes and random streams, whatever the other experts get. docs/nvfp4.md, section
11.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.linear import compute
from fourbits.linear.compute import LinearCall, SavedOperands
from fourbits.linear.layer_state import CallConfig, LayerState
from fourbits.linear.module import eager_matmul, runs_eagerly, traced_matmul
from fourbits.linear.plan import LinearPlan, linear_plan
from fourbits.quant.request import signature_of


class GroupedCall(NamedTuple):
    """The tensors of a product of experts, and what selects its bits."""

    #: [M, K], the rows of expert 0 first; None in a backward pass that does not need it
    x: Tensor | None
    #: [E, N, K], or [E, K, N] if transposed
    weight: Tensor
    #: [E, N]
    bias: Tensor | None
    #: int32 [E + 1]: where each expert's rows begin, and where the last one's end
    offsets: Tensor
    #: int64 [E, 9], `sr_counter.COUNTER_FIELDS` of each expert, or [1, 9] for all
    counters: Tensor
    #: number of expert 0 as a linear layer
    layer: int
    #: as text
    table: str
    transposed: bool


class _Part(NamedTuple):
    """One expert's share of a call."""

    rows: slice
    x: Tensor
    weight: Tensor
    counter: Tensor
    layer: int
    place: int


def forward(call: GroupedCall) -> Tensor:
    """Y [M, N] in x's dtype; rows that belong to no expert are zero."""
    assert call.x is not None
    y = call.x.new_zeros((call.x.shape[0], call.weight.shape[2 if call.transposed else 1]))
    for part in _parts(call):
        bias = None if call.bias is None else call.bias[part.place]
        plan = _plan(call, part, bias)
        linear = LinearCall(part.x, part.weight, part.counter, part.layer)
        y[part.rows] = compute.forward(plan, linear, bias)[0]
    return y


def backward(call: GroupedCall, dy: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    """dX in dY's dtype, dW in FP32 and in W's layout, dbias in FP32; None where not needed.

    dy: [M, N]. Nothing but the tensors of the forward is saved: operands are quantized again, to the same
    bits.
    """
    assert call.x is not None
    dx = torch.zeros_like(call.x, dtype=dy.dtype) if needs[0] else None
    dw = torch.zeros_like(call.weight, dtype=torch.float32) if needs[1] else None
    db = dy.new_zeros((len(call.weight), dy.shape[1]), dtype=torch.float32) if needs[2] else None
    for part in _parts(call):
        linear = LinearCall(part.x, part.weight, part.counter, part.layer)
        found = compute.backward(
            _plan(call, part, None),
            linear,
            SavedOperands(None, None),
            dy[part.rows].contiguous(),
            (needs[0], needs[1], needs[2]),
        )
        if dx is not None and found.x is not None:
            dx[part.rows] = found.x
        if dw is not None and found.weight is not None:
            dw[part.place] = found.weight.t() if call.transposed else found.weight
        if db is not None and found.bias is not None:
            db[part.place] = found.bias
    return [dx, dw, db]


def each(
    state: LayerState,
    config: CallConfig,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counts: Sequence[int],
    transposed: bool = False,
) -> Tensor:
    """Y [M, N] as a loop of linear layers computes it, which saves operands for the backward pass."""
    rest = x.shape[0] - sum(counts)
    parts = x.split([*counts, rest])
    used = [place for place, rows in enumerate(counts) if rows]
    # unbind's gradient is one stack; indexing would allocate a tensor of all experts' size for each
    weights = weight.unbind(0)
    biases = [None] * len(weights) if bias is None else bias.unbind(0)
    outputs: list[Tensor] = []
    for place in used:
        of_one = weights[place].t() if transposed else weights[place]
        # the last expert counts the group's own steps
        last = config.counts_itself and place == used[-1]
        one = config._replace(layer=config.layer + place, counts_itself=last)
        matmul = eager_matmul if runs_eagerly(x) else traced_matmul
        outputs.append(matmul(state, one, parts[place], of_one, biases[place]))
    if rest or not outputs:
        dtype = outputs[0].dtype if outputs else x.dtype
        outputs.append(x.new_zeros((rest, weight.shape[2 if transposed else 1]), dtype=dtype))
    return torch.cat(outputs)


def counts_of(offsets: Tensor) -> list[int]:
    """The rows of each expert, on the host. On a GPU this waits for the device."""
    return offsets.diff().tolist()


def _parts(call: GroupedCall) -> Iterator[_Part]:
    """The experts that have rows."""
    assert call.x is not None
    ends: list[int] = call.offsets.tolist()
    for place, (first, last) in enumerate(itertools.pairwise(ends)):
        if last > first:
            rows = slice(first, last)
            weight = call.weight[place].t() if call.transposed else call.weight[place]
            counter = call.counters[min(place, len(call.counters) - 1)]
            yield _Part(rows, call.x[rows], weight, counter, call.layer + place, place)


def _plan(call: GroupedCall, part: _Part, bias: Tensor | None) -> LinearPlan:
    """One expert's plan, whose forward keeps no operand for the backward."""
    of_bias = None if bias is None else bias.dtype
    signatures = signature_of(part.x), signature_of(part.weight)
    return linear_plan(call.table, *signatures, part.x.dtype, (False, False), of_bias, False)
