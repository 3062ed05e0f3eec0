"""The three GEMMs of a quantized linear layer: Y = X W^T, dX = dY W, dW = dY^T X.

Everything that does not depend on the tensors is in a LinearPlan. docs/nvfp4.md, section 2.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.gemm.matmul import gemm
from fourbits.linear import hot_channels
from fourbits.linear.corrected import Corrected, Operands, row_gemm, wgrad_gemm
from fourbits.linear.hot_channels import HotChannels
from fourbits.linear.limited_rows import limited
from fourbits.linear.observer import Observer
from fourbits.linear.plan import (
    DGRAD_WEIGHT,
    WGRAD_INPUT,
    GradientPlan,
    LinearPlan,
    Side,
    multiplies_codes,
    side,
    weight_from_forward,
)
from fourbits.linear.shard_operands import shard_operands
from fourbits.quant.correction import split_residual
from fourbits.quant.quantize import Operand, exact
from fourbits.quant.request import OperandInputs, signature_of
from fourbits.quant.tensor import ExactOperand, QuantizedTensor, spread
from fourbits.recipe.recipe import GemmTable

#: returns the operands of a tensor, cached or computed: (tensor, compute) -> operands
Reuse = Callable[[Tensor, Callable[[], Operands]], Operands]


class LinearCall(NamedTuple):
    """The tensors of one call, and the observer of its amax stats."""

    #: [M, K]; None in a backward pass that does not need it
    x: Tensor | None
    #: [N, K]
    weight: Tensor
    #: int64 [9], `sr_counter.COUNTER_FIELDS`
    counter: Tensor
    #: number of the layer, which selects its random streams
    layer: int
    observer: Observer | None = None
    #: Fprop's operand W, if it arrives quantized; `weight` then only has its shape
    quantized_weight: QuantizedTensor | None = None
    #: whether it arrives again before the backward pass
    weight_returns: bool = False
    #: of the error feedback of X in Fprop: int8 [K, span]
    coefficients: Tensor | None = None


class SavedOperands(NamedTuple):
    """Operands that the forward saves for the backward."""

    #: Fprop's operand W, if Dgrad starts from it
    weight: ExactOperand | None
    #: Wgrad's operand X, dequantized or packed, with what a correction removed; or Fprop's operand X
    #: (contraction along axis 1), if Wgrad re-quantizes it
    input: Operand | Corrected | None
    #: the hot features of X, where there are any
    hot: HotChannels | None = None


class Gradients(NamedTuple):
    """dX [M, K] in dY's dtype; dW [N, K] and dbias [N] in FP32; None where not needed."""

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def forward(
    plan: LinearPlan,
    call: LinearCall,
    bias: Tensor | None,
    reuse_input: Reuse | None = None,
    reuse_weight: Reuse | None = None,
) -> tuple[Tensor, SavedOperands]:
    """Y [M, N] in the plan's dtype, and the operands saved for the backward."""
    x, weight = call.x, call.weight
    assert x is not None
    if reuse_input is None or plan.input_is_private:
        inputs = _operands(plan.input, call, x)
    else:
        inputs = reuse_input(x, lambda: _operands(plan.input, call, x))
    if call.quantized_weight is not None:
        w = exact(call.quantized_weight)
    elif reuse_weight is None or plan.weight_is_private:
        (w,) = _operands(plan.weight, call, weight)
    else:
        (w,) = reuse_weight(weight, lambda: _operands(plan.weight, call, weight))
    lhs = inputs[0]
    assert not isinstance(w, Corrected)
    hot = hot_channels.hottest(x, plan.hot) if plan.hot else None
    if isinstance(lhs, Corrected):
        y = row_gemm(lhs, w, weight, plan.out_dtype, bias)
    elif hot is not None:
        y = hot_channels.fprop(lhs, w, hot, weight, plan.out_dtype, bias)
    else:
        if plan.fprop is None:
            plan.fprop = gemm(lhs, w, plan.out_dtype, plan.bias, *plan.sums)
        y = plan.fprop(lhs, w, bias)
    arrives = call.quantized_weight is not None
    keeps = (plan.keeps_weight or (plan.needs_dx and arrives)) and not call.weight_returns
    kept = w if keeps and isinstance(w, ExactOperand) else None
    return y, SavedOperands(kept, inputs[-1] if plan.keeps_input else None, hot if plan.keeps_hot else None)


def backward(
    plan: LinearPlan, call: LinearCall, saved: SavedOperands, dy: Tensor, needs: tuple[bool, bool, bool]
) -> Gradients:
    """The needed gradients of X, W and bias. dy: [M, N], contiguous."""
    whole, back = dy, None
    if plan.table.gradient_rows == "limited":
        dy, back = limited(dy)
    step = plan.gradients(signature_of(dy), needs[0], needs[1])
    dx = dw = None
    operands: list[Operand | Corrected] = []
    for part in step.dy:
        operands += _operands(part, call, dy)
    if needs[0]:
        w = _dgrad_weight(plan, step, call, saved)
        lhs = operands.pop(0)
        if isinstance(lhs, Corrected):
            dx = row_gemm(lhs, w, call.weight.t(), dy.dtype, None)
        else:
            if step.dgrad is None:
                step.dgrad = gemm(lhs, w, dy.dtype, None, *plan.sums)
            dx = step.dgrad(lhs, w, None)
        if dx.shape[1] != call.weight.shape[1]:  # has only columns of padding
            dx = dx[:, : call.weight.shape[1]].contiguous()
        dx = dx if back is None else (dx * back).to(dx.dtype)
        if saved.hot is not None:
            dx = hot_channels.with_hot_dx(dx, whole, call.weight, saved.hot)
    if needs[1]:
        rhs = _wgrad_input(plan, step, call, saved)
        lhs = operands.pop(0)
        if isinstance(lhs, Corrected) or isinstance(rhs, Corrected):
            dw = wgrad_gemm(lhs, rhs, dy.shape[0])
        else:
            if step.wgrad is None:
                step.wgrad = gemm(lhs, rhs, torch.float32, None, *plan.sums)
            dw = step.wgrad(lhs, rhs, None)
        if saved.hot is not None:
            dw = hot_channels.with_hot_dw(dw, whole, saved.hot)
    return Gradients(dx, dw, whole.sum(0, dtype=torch.float32) if needs[2] else None)


def _operands(side: Side, call: LinearCall, x: Tensor, factor: Tensor | None = None) -> Operands:
    """The operands quantized from one tensor, with this call's random streams and amaxes.

    factor: fp32 scalar, if the side was planned for a tensor times one; without an observer only.
    """
    counter, first, observer = call.counter, call.layer * 8, call.observer
    correction, removed, target = side.correction, None, None
    if correction is not None:
        x, removed = split_residual(correction, x)
    if observer is None:
        given = None, factor, call.coefficients
        inputs = tuple([OperandInputs(counter, first + place, *given) for place in side.places])
    else:
        for role, axis in zip(side.roles, side.axes, strict=True):
            observer.measure(x, role, axis)
        inputs = tuple(
            OperandInputs(counter, first + place, observer.amax(role), None, call.coefficients)
            for role, place in zip(side.roles, side.places, strict=True)
        )
        target = observer.target(side.roles)
    if side.reduction:
        operands = shard_operands(side, x, inputs, target)
    else:
        operands = side.quantize(x, inputs, target)
    if correction is None or removed is None:
        return operands
    return tuple(Corrected(operand, removed, correction) for operand in operands)


def _dgrad_weight(plan: LinearPlan, step: GradientPlan, call: LinearCall, saved: SavedOperands) -> Operand:
    """Dgrad's operand W: Fprop's operand, that operand re-quantized, or W quantized.

    A weight that arrived quantized was saved or arrived again, and is re-quantized where a recipe quantizes W
    again.
    """
    if step.weight is not None and saved.weight is None and call.quantized_weight is None:
        (operand,) = _operands(step.weight, call, call.weight)
        assert not isinstance(operand, Corrected)
        return operand
    received = None if call.quantized_weight is None else exact(call.quantized_weight)
    kept = saved.weight or received or _exact(plan.weight, call, call.weight)
    if plan.shares_weight:
        return ExactOperand(kept.values, kept.scale, 0, kept.spec)  # square blocks: the same along both axes
    table = plan.table if plan.table.dgrad.rhs.source == "forward" else weight_from_forward(plan.table)
    operand = _requantized(kept, call.weight.shape[1], table, DGRAD_WEIGHT, plan.observed, call)
    assert not isinstance(operand, Corrected)
    return operand


def _wgrad_input(
    plan: LinearPlan, step: GradientPlan, call: LinearCall, saved: SavedOperands
) -> Operand | Corrected:
    """Wgrad's operand X: the saved operand, X quantized, or Fprop's operand re-quantized."""
    kept = saved.input
    if isinstance(kept, ExactOperand) and kept.axis == 1:
        return _requantized(kept, call.weight.shape[1], plan.table, WGRAD_INPUT, plan.observed, call)
    if kept is not None:
        if isinstance(kept, ExactOperand | Corrected) or multiplies_codes(plan.table, "wgrad.rhs"):
            return kept
        return exact(kept)
    assert call.x is not None
    if step.input is not None:
        return _operands(step.input, call, call.x)[0]
    kept = _exact(plan.input, call, call.x)
    return _requantized(kept, call.weight.shape[1], plan.table, WGRAD_INPUT, plan.observed, call)


def _exact(side: Side, call: LinearCall, x: Tensor) -> ExactOperand:
    """Fprop's operand, quantized again rather than saved, which takes less memory."""
    operand = _operands(side, call, x)[0]
    assert not isinstance(operand, Corrected)
    return exact(operand) if isinstance(operand, QuantizedTensor) else operand


def _requantized(
    operand: ExactOperand,
    columns: int,
    table: GemmTable,
    role: tuple[tuple[str, int]],
    observed: bool,
    call: LinearCall,
) -> Operand | Corrected:
    """The operand of a role (with its contraction axis), quantized from the values of another operand.

    These are its stored values times its scale. Quantizers take both factors, so that no FP32 copy is needed,
    except where scales vary, or an observer, reduction or correction needs the values first.
    """
    values, scale = operand.values, operand.scale
    spec = table.operand(role[0][0])
    plain = not (observed or table.amax_reduction or spec.correction)
    if plain and operand.axis == 1 and values.dtype == torch.bfloat16 and not scale.dim():
        values = values[:, :columns]
        scaled = side(table, signature_of(values)._replace(scaled=True), role, observed)
        return _operands(scaled, call, values, scale)[0]
    values = _dequantized(operand, columns)
    return _operands(side(table, signature_of(values), role, observed), call, values)[0]


def _dequantized(operand: ExactOperand, columns: int) -> Tensor:
    """An operand's values along axis 1, without padding, fp32 [R, columns]. docs/nvfp4.md, section 8."""
    values = operand.values if operand.axis == 1 else operand.values.t()
    scale = operand.scale
    if scale.dim():
        scale = spread(scale, operand.scale_block, values.shape)
    return (values.to(torch.float32) * scale)[:, :columns]
