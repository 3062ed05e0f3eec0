"""A quantized linear layer as operators, for graphs that torch.compile traces.

They are compute.py's functions with flat tuples, opaque to the compiler (docs/decisions.md, R 15). The table
is passed as text. Operands that only depend on X have a separate operator, so that the compiler, which
computes equal nodes once, shares them among layers that read the same tensor.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fourbits.linear.compute import LinearCall, backward, forward
from fourbits.linear.dominant_tokens import measure_first_gradient_in_graph
from fourbits.linear.fake_shapes import (
    fake_gradients,
    fake_hot,
    fake_input,
    fake_row,
    fake_weight,
    kept_parts,
)
from fourbits.linear.flat import flattened, input_parts, unflattened, weight_of, without_e8m0
from fourbits.linear.observer import BACKWARD, FORWARD, Observer, nothing_recorded
from fourbits.linear.plan import LinearPlan, input_side, keeps_row, linear_plan
from fourbits.operators import operator
from fourbits.quant.request import OperandInputs, Signature, signature_of
from fourbits.quant.tensor import ExactOperand
from fourbits.recipe.recipe import table_from_text

#: (layer number, out_features, in_features) of calls, which the audit compares with what was converted
calls_seen: set[tuple[int, ...]] = set()


def _fake_inputs(x: Tensor, table: str, needs_dw: bool) -> list[Tensor]:
    parsed = table_from_text(table)
    keeps = kept_parts(x, parsed, (False, needs_dw), observed=False, received=False)[2]
    of_wgrad = fake_input(x, parsed, observed=False) if keeps and not keeps_row(parsed) else ()
    return [*fake_row(x, parsed), *of_wgrad]


@operator("linear_inputs(Tensor x, str table, bool needs_dw) -> Tensor[]", _fake_inputs)
def linear_inputs(x: Tensor, table: str, needs_dw: bool) -> list[Tensor]:
    """Operands of X that depend on nothing else: values and scale for Fprop, and the parts of Wgrad's operand
    if one pass makes both or if it is kept packed. For tables that `plan.shares_input` allows.

    x: [M, K], contiguous; needs_dw: whether Wgrad will run.
    """
    side = input_side(table, signature_of(x), needs_dw)
    row, *column = side.quantize(x, (OperandInputs(),) * len(side.roles), None)
    assert isinstance(row, ExactOperand)
    return [row.values, row.scale, *without_e8m0(input_parts(column[0] if column else None))]


def _fake_forward(
    x: Tensor,
    inputs: list[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    counter: Tensor,
    amax: Tensor | None,
    layer: int,
    table: str,
    measured: str,
    needs: list[bool],
    quantized_weight: list[Tensor],
    coefficients: Tensor | None = None,
) -> list[Tensor]:
    parsed, observed, received = table_from_text(table), amax is not None, bool(quantized_weight)
    keeps = kept_parts(x, parsed, needs, observed, received)
    y = x.new_empty((x.shape[0], weight.shape[0]))
    of_weight = fake_weight(weight, parsed, received) if keeps[0] else ()
    of_input = fake_input(x, parsed, observed) if keeps[2] and not inputs else ()
    hot = fake_hot(x, parsed) if any(needs) else ()
    return [y, *of_weight, *of_input, *hot, *(() if amax is None else nothing_recorded(amax, len(FORWARD)))]


@operator(
    "linear_forward(Tensor x, Tensor[] inputs, Tensor weight, Tensor? bias, Tensor counter, Tensor? amax, "
    "SymInt layer, str table, str measured, bool[] needs, Tensor[] quantized_weight, "
    "Tensor? coefficients=None) -> Tensor[]",
    _fake_forward,
)
def linear_forward(
    x: Tensor,
    inputs: list[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    counter: Tensor,
    amax: Tensor | None,
    layer: int,
    table: str,
    measured: str,
    needs: list[bool],
    quantized_weight: list[Tensor],
    coefficients: Tensor | None = None,
) -> list[Tensor]:
    """Y [M, N] in x's dtype, the parts of saved operands that are kept (`flattened`) and not among `inputs`,
    and with amax the recorded stats.

    x: [M, K], contiguous; inputs: values and scale that `linear_inputs` returned for x, or none; weight:
    [N, K], contiguous; amax: fp32 [6], the amax of operands with a policy (negative: their own), None if
    nothing depends on past steps; measured: as returned by `adaptive_layout.measured_at`; needs: whether dX
    and dW will be needed; quantized_weight: `weight_parts` of a weight that arrives quantized, or none;
    coefficients: of error feedback. Stats are the arguments of `amax_policy.observe`: own amaxes, fp32 [6],
    and counts, int64 [6, 4].
    """
    calls_seen.add((layer, *weight.shape))
    of_bias = None if bias is None else bias.dtype
    plan = _plan(signature_of(x), weight, x.dtype, table, needs, of_bias, amax)
    observer = _observer(plan, measured, amax, counter, layer)
    received = weight_of(quantized_weight, plan.table, weight)
    call = LinearCall(x, weight, counter, layer, observer, received, coefficients=coefficients)
    if inputs:
        operand = ExactOperand(inputs[0], inputs[1], 1, plan.table.fprop.lhs)
        y, saved = forward(plan, call, bias, lambda _x, _compute: (operand, operand))
        saved = saved._replace(input=None)
    else:
        y, saved = forward(plan, call, bias)
    recorded = () if observer is None else observer.recorded(FORWARD)
    return [y, *without_e8m0(flattened(saved)), *recorded]


def _fake_backward(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor,
    saved: list[Tensor],
    kept: list[bool],
    counter: Tensor,
    amax: Tensor | None,
    columns: int,
    layer: int,
    table: str,
    measured: str,
    needs: list[bool],
) -> list[Tensor]:
    grads = fake_gradients(dy, weight, (dy.shape[0], weight.shape[1]), needs)
    if amax is None:
        return grads
    first = len(FORWARD) - len(BACKWARD)  # what is recorded is the end of a tensor of all roles
    return [*grads, *(stats[first:] for stats in nothing_recorded(amax, len(FORWARD)))]


@operator(
    "linear_backward(Tensor dy, Tensor? x, Tensor weight, Tensor[] saved, bool[] kept, Tensor counter, "
    "Tensor? amax, SymInt columns, SymInt layer, str table, str measured, bool[] needs) -> Tensor[]",
    _fake_backward,
)
def linear_backward(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor,
    saved: list[Tensor],
    kept: list[bool],
    counter: Tensor,
    amax: Tensor | None,
    columns: int,
    layer: int,
    table: str,
    measured: str,
    needs: list[bool],
) -> list[Tensor]:
    """The needed gradients among those of x, weight and bias, and with amax the recorded stats.

    dy: [M, N], contiguous; x: None if the forward saved an operand of it; saved: the parts that it kept;
    kept: which of all parts they are; columns: K; needs: which gradients are needed.
    """
    shape = (dy.shape[0], columns)
    signature = Signature(dy.device, dy.dtype, shape, (columns, 1)) if x is None else signature_of(x)
    plan = _plan(signature, weight, dy.dtype, table, needs, None, amax)
    observer = _observer(plan, measured, amax, counter, layer)
    parts = iter(saved)
    operands = unflattened(plan.table, [next(parts) if keep else None for keep in kept], shape)
    call = LinearCall(x, weight, counter, layer, observer)
    measure_first_gradient_in_graph((layer, *weight.shape), table, dy)
    grads = backward(plan, call, operands, dy, (needs[0], needs[1], needs[2]))
    recorded = () if observer is None else observer.recorded(BACKWARD)
    return [*(grad for grad in grads if grad is not None), *recorded]


def _plan(
    x: Signature,
    weight: Tensor,
    dtype: torch.dtype,
    table: str,
    needs: Sequence[bool],
    bias: torch.dtype | None,
    amax: Tensor | None,
) -> LinearPlan:
    return linear_plan(table, x, signature_of(weight), dtype, (needs[0], needs[1]), bias, amax is not None)


def _observer(
    plan: LinearPlan, measured: str, amax: Tensor | None, counter: Tensor, layer: int
) -> Observer | None:
    return None if amax is None else Observer(plan.table, measured, amax, counter, layer)
