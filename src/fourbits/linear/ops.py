"""The arithmetic of a quantized linear: forward, and backward of both inputs, as functions and as operators.

Operators are opaque to torch.compile, so a model around them compiles without breaks, and one compiled graph
serves every recipe: the table travels as text. docs/nvfp4.md, section 2.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from fourbits.gemm.matmul import multiply
from fourbits.linear.fake_shapes import column_shapes, packed_shapes, scale_shape
from fourbits.linear.gradients import gradients, kept_input
from fourbits.linear.operands import Call, nothing_observed, values_dtype
from fourbits.quant.reference.philox import ROLES
from fourbits.quant.tensor import ExactOperand, QuantizedTensor
from fourbits.recipe.recipe import table_from_text

#: roles of the operands that each operator makes or may make, in order
FORWARD, BACKWARD = ROLES[:6], ROLES[2:6]


class Made(NamedTuple):
    """Both operands of Fprop, and Wgrad's X where it is packed or came from the same read."""

    lhs: ExactOperand | QuantizedTensor
    rhs: ExactOperand | QuantizedTensor
    wgrad_rhs: ExactOperand | QuantizedTensor | None


def input_operands(call: Call, x: Tensor, keep: bool) -> tuple[ExactOperand | QuantizedTensor, ...]:
    """X as Fprop multiplies it; after it, if wanted and packed or one read makes both, X as Wgrad does."""
    if keep and call.table.saved_inputs == "packed":
        return call.with_packed_input(x)
    if keep and call.one_read_of_input(x):
        return call.operands(x, ("fprop.lhs", 1), ("wgrad.rhs", 0))
    return (call.multiplicand(x, 1, "fprop.lhs"),)


def made_of(
    lhs: ExactOperand | QuantizedTensor,
    rhs: ExactOperand | QuantizedTensor,
    wgrad_rhs: Sequence[ExactOperand | QuantizedTensor],
) -> Made:
    """What `input_operands` gave, and W."""
    return Made(lhs, rhs, wgrad_rhs[0] if wgrad_rhs else None)


def forward_of(
    call: Call, made: Made, x: Tensor, bias: Tensor | None, keep: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The results of `linear_forward` from operands that are made already."""
    with torch.autocast(x.device.type, enabled=False):
        y = multiply(made.lhs, made.rhs, x.dtype, bias)
    w_kept = keep[0] and call.table.keeps_weight and isinstance(made.rhs, ExactOperand)
    return (
        y,
        *_parts(made.rhs if w_kept else None, x)[:2],
        *_parts(made.wgrad_rhs if keep[1] else None, x),
        *call.observed(FORWARD),
    )


def backward_of(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor,
    w_values: Tensor,
    w_scale: Tensor,
    x_values: Tensor,
    x_scale: Tensor,
    x_global: Tensor,
    clock: Tensor,
    amax: Tensor | None,
    layer: int,
    table: str,
    measured: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dX [M, K] in dy's dtype, dW [N, K] and dbias [N] in FP32; own amaxes and counts.

    dy: [M, N]; w_values to x_global: as returned by the forward; x: needed where the forward kept no operand
    of it; amax: as for the forward; needs: which of x, weight and bias want a gradient. The others get an
    empty tensor. Autograd rounds dW to the dtype that the parameter's gradients have. Own amaxes and
    counts are of Dgrad's and Wgrad's operands, as in the forward.
    """
    call = Call(table_from_text(table), clock, layer, amax, measured)
    kept = ExactOperand(w_values, w_scale, 1, call.table.fprop.rhs) if w_values.dim() == 2 else None
    source = kept_input(call, (x_values, x_scale, x_global), (dy.shape[0], weight.shape[1])) or x
    with torch.autocast(dy.device.type, enabled=False):
        grads = gradients(call, dy, source, weight, kept, needs)
    dx, dw, dbias = (dy.new_empty(0) if grad is None else grad for grad in grads)
    return (dx, dw, dbias, *call.observed(BACKWARD))


@custom_op("fourbits::linear_forward", mutates_args=())
def linear_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    clock: Tensor,
    amax: Tensor | None,
    layer: int,
    table: str,
    measured: str,
    keep: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y = x W^T + bias, [M, N] in x's dtype; W's and X's exact values and scales; own amaxes and counts.

    x: [M, K]; amax: fp32 [6], what operands with an amax policy use (negative: their own), None where nothing
    depends on the past; measured: as by `layout.measured_at`. keep: whether dX and whether dW will be wanted.
    W is kept for dX where Dgrad starts from Fprop's, X for dW as Wgrad multiplies it where one read makes it
    with Fprop's (values, scale and an empty tensor) or the table wants it packed (codes, block scales, global
    scale); else empty. Own amaxes, fp32 [6], and counts, int64 [6, 4], are those of `own_amax` and
    `layout_counts`: negative and 0 for an operand without, empty without amax.
    """
    call = Call(table_from_text(table), clock, layer, amax, measured)
    with torch.autocast(x.device.type, enabled=False):
        lhs, *wgrad_rhs = input_operands(call, x, keep[1])
        made = made_of(lhs, call.multiplicand(weight, 1, "fprop.rhs"), wgrad_rhs)
    outputs = forward_of(call, made, x, bias, keep)
    # an operator's outputs share no memory, as the scales of both operands of X do
    y, *parts = (part.clone() if part.dim() == 0 else part for part in outputs)
    return y, *parts  # pyright: ignore[reportReturnType]


@linear_forward.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    clock: Tensor,
    amax: Tensor | None,
    layer: int,
    table: str,
    measured: str,
    keep: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = Call(table_from_text(table), clock, layer, amax, measured)
    y = x.new_empty((x.shape[0], weight.shape[0]))
    if keep[0] and call.table.keeps_weight and not call.is_native("fprop.rhs"):
        spec = call.table.fprop.rhs
        width = -(-weight.shape[1] // 16) * 16
        w_values = weight.new_empty((weight.shape[0], width), dtype=values_dtype(spec, weight.device))
        w_scale = weight.new_empty(scale_shape(spec, w_values.shape), dtype=torch.float32)
    else:
        w_values, w_scale = x.new_empty(0), x.new_empty(0)
    x_values, x_scale, x_global = x.new_empty(0), x.new_empty(0), x.new_empty(0)
    if keep[1] and call.table.saved_inputs == "packed":
        turned = call.one_read_of_packed_input(x)
        x_values, x_scale, x_global = packed_shapes(x, call.table.wgrad.rhs, turned)
    elif keep[1] and call.one_read_of_input(x):
        x_values, x_scale = column_shapes(x, call.table.wgrad.rhs)
    own, counts = nothing_observed(clock, amax, len(FORWARD))
    return y, w_values, w_scale, x_values, x_scale, x_global, own, counts


linear_backward = custom_op("fourbits::linear_backward", backward_of, mutates_args=())


@linear_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor,
    w_values: Tensor,
    w_scale: Tensor,
    x_values: Tensor,
    x_scale: Tensor,
    x_global: Tensor,
    clock: Tensor,
    amax: Tensor | None,
    layer: int,
    table: str,
    measured: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        dy.new_empty((dy.shape[0], weight.shape[1])) if needs[0] else dy.new_empty(0),
        weight.new_empty(weight.shape, dtype=torch.float32) if needs[1] else dy.new_empty(0),
        weight.new_empty(weight.shape[0], dtype=torch.float32) if needs[2] else dy.new_empty(0),
        *nothing_observed(clock, amax, len(BACKWARD)),
    )


def _parts(operand: ExactOperand | QuantizedTensor | None, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors of an operand, empty where there is none."""
    if operand is None:
        return x.new_empty(0), x.new_empty(0), x.new_empty(0)
    if isinstance(operand, QuantizedTensor):
        return operand.codes, operand.block_scale, operand.global_scale
    return operand.values, operand.scale, x.new_empty(0)
