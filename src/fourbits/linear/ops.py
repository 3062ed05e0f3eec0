"""A quantized linear layer as torch.library operators, for graphs that torch.compile traces.

Operators are opaque to the compiler, so a model around them compiles without graph breaks, and one compiled
graph serves every recipe: the table is passed as text. They are compute.py's functions with flat tuples.
"""

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor
from torch.library import custom_op

from fourbits.linear.compute import LinearCall, SavedOperands, backward, forward
from fourbits.linear.fake_shapes import fake_forward
from fourbits.linear.observer import BACKWARD, FORWARD, Observer, nothing_recorded
from fourbits.linear.plan import LinearPlan, linear_plan
from fourbits.quant.request import Signature, signature_of
from fourbits.quant.scale_codes import SCALE_DTYPES
from fourbits.quant.tensor import ExactOperand, QuantizedTensor
from fourbits.recipe.recipe import GemmTable

#: (layer number, out_features, in_features) of calls, which the audit compares with what was converted
calls_seen: set[tuple[int, ...]] = set()


@custom_op("fourbits::linear_forward", mutates_args=())
def linear_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counter: Tensor,
    amax: Tensor | None,
    layer: int,
    table: str,
    measured: str,
    needs: list[bool],
) -> list[Tensor]:
    """Y [M, N] in x's dtype, five parts of saved operands (`flattened`; empty for none), and with amax the
    recorded stats.

    x: [M, K]; weight: [N, K]; amax: fp32 [6], the amax of operands with a policy (negative: their own), None
    if nothing depends on past steps; measured: as returned by `adaptive_layout.measured_at`; needs: whether
    dX and dW will be needed. Stats are the arguments of `amax_policy.observe`: own amaxes, fp32 [6], and
    counts, int64 [6, 4].
    """
    calls_seen.add((layer, *weight.shape))
    plan = _plan(signature_of(x), weight, x.dtype, table, needs, None if bias is None else bias.dtype, amax)
    observer = _observer(plan, measured, amax, counter, layer)
    y, saved = forward(plan, LinearCall(x, weight, counter, layer, observer), bias)
    recorded = () if observer is None else observer.recorded(FORWARD)
    return [y, *(_owned(part, x) for part in flattened(saved)), *recorded]


@linear_forward.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counter: Tensor,
    amax: Tensor | None,
    layer: int,
    table: str,
    measured: str,
    needs: list[bool],
) -> list[Tensor]:
    recorded = () if amax is None else nothing_recorded(amax, len(FORWARD))
    return [*fake_forward(x, weight, table, needs, amax is not None), *recorded]


@custom_op("fourbits::linear_backward", mutates_args=())
def linear_backward(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor,
    saved: list[Tensor],
    counter: Tensor,
    amax: Tensor | None,
    shape: list[int],
    layer: int,
    table: str,
    measured: str,
    needs: list[bool],
) -> list[Tensor]:
    """The gradients of x, weight and bias, empty where not needed, and with amax the recorded stats.

    dy: [M, N]; x: None if the forward saved an operand of it; saved: the forward's parts; shape: [M, K];
    needs: which gradients are needed.
    """
    M, K = shape
    signature = Signature(dy.device, dy.dtype, (M, K), (K, 1)) if x is None else signature_of(x)
    plan = _plan(signature, weight, dy.dtype, table, needs, None, amax)
    observer = _observer(plan, measured, amax, counter, layer)
    operands = unflattened(plan.table, saved, (M, K))
    call = LinearCall(x, weight, counter, layer, observer)
    grads = backward(plan, call, operands, dy, (needs[0], needs[1], needs[2]))
    recorded = () if observer is None else observer.recorded(BACKWARD)
    return [*(dy.new_empty(0) if grad is None else grad for grad in grads), *recorded]


@linear_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor,
    saved: list[Tensor],
    counter: Tensor,
    amax: Tensor | None,
    shape: list[int],
    layer: int,
    table: str,
    measured: str,
    needs: list[bool],
) -> list[Tensor]:
    outputs = [
        dy.new_empty((dy.shape[0], weight.shape[1]) if needs[0] else 0),
        weight.new_empty(weight.shape if needs[1] else 0, dtype=torch.float32),
        weight.new_empty(weight.shape[0] if needs[2] else 0, dtype=torch.float32),
    ]
    return [*outputs, *(() if amax is None else nothing_recorded(amax, len(BACKWARD)))]


def flattened(saved: SavedOperands) -> list[Tensor | None]:
    """Saved operands as five tensors, None for missing ones: W's values and scale; X's values and scale, or
    its codes, block scales and global scale.
    """
    parts: list[Tensor | None] = [None, None]
    if saved.weight is not None:
        parts = [saved.weight.values, saved.weight.scale]
    if isinstance(saved.input, ExactOperand):
        return [*parts, saved.input.values, saved.input.scale, None]
    if saved.input is not None:
        return [*parts, saved.input.codes, saved.input.block_scale, saved.input.global_scale]
    return [*parts, None, None, None]


def unflattened(table: GemmTable, parts: Sequence[Tensor | None], shape: tuple[int, int]) -> SavedOperands:
    """Inverse of `flattened`, for a table and X of this shape."""
    w_values, w_scale, x_values, x_scale, x_global = parts
    weight = kept = None
    if w_scale is not None and is_part(w_values):
        weight = ExactOperand(w_values, w_scale, 1, table.fprop.rhs)
    if x_scale is not None and is_part(x_values):
        spec = table.wgrad.rhs
        if x_global is None or x_global.dim():
            kept = ExactOperand(x_values, x_scale, 0, spec)
        else:
            dtype = SCALE_DTYPES.get(spec.block_format.scale or "", x_scale.dtype)
            kept = QuantizedTensor(x_values, x_scale.view(dtype), x_global, 0, shape, spec)
    return SavedOperands(weight, kept)


def is_part(values: Tensor | None) -> TypeGuard[Tensor]:
    """Whether an operand was saved: if not, it is None in eager calls and an empty vector in operators."""
    return values is not None and values.dim() == 2


def _owned(part: Tensor | None, x: Tensor) -> Tensor:
    """A saved tensor as an operator may return it: not aliasing another output, in a dtype that the compiler
    supports, empty for none.
    """
    if part is None:
        return x.new_empty(0)
    if part.dim() == 0:  # both operands of X have their scales in one tensor
        return part.clone()
    return part.view(torch.uint8) if part.dtype == torch.float8_e8m0fnu else part


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
