"""The arithmetic of a quantized linear as two operators: forward, and backward of both inputs.

Operators are opaque to torch.compile, so a model around them compiles without breaks, and one compiled graph
serves every recipe: the table travels as text. docs/nvfp4.md, section 2.
"""

import torch
from torch import Tensor

from fourbits.gemm.matmul import matmul_exact
from fourbits.quant.operand import OperandSpec
from fourbits.quant.philox import ROLES
from fourbits.quant.tensor import ExactOperand, spread
from fourbits.recipe.operands import Call, nothing_observed, values_dtype
from fourbits.recipe.recipe import table_from_text

#: roles of the operands that each operator makes, in order
_FORWARD, _BACKWARD = ROLES[:2], ROLES[2:6]


@torch.library.custom_op("fourbits::linear_forward", mutates_args=())
def linear_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    clock: Tensor,
    amax: Tensor | None,
    layer: int,
    table: str,
    measured: str,
    keep_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y = x W^T + bias, [M, N] in x's dtype; W's exact values and scale; own amaxes and counts of X and W.

    x: [M, K]; amax: fp32 [6], what operands with an amax policy use (negative: their own), None where nothing
    depends on the past; measured: as by `layout.measured_at`. W's values are kept when keep_weight is set and
    Dgrad starts from them, else empty. Own amaxes, fp32 [2], and counts, int64 [2, 4], are those of
    `own_amax` and `layout_counts`: NaN and 0 for an operand without, empty without amax.
    """
    call = Call(table_from_text(table), clock, layer, amax, measured)
    with torch.autocast(x.device.type, enabled=False):
        lhs = call.operand(x, 1, "fprop.lhs")
        rhs = call.operand(weight, 1, "fprop.rhs")
        y = matmul_exact(lhs, rhs, x.dtype, bias)
    own, counts = call.observed(_FORWARD)
    if keep_weight and call.table.keeps_weight:
        return y, rhs.values, rhs.scale.clone(), own, counts
    return y, x.new_empty(0), x.new_empty(0), own, counts


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
    keep_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    specs = table_from_text(table)
    y = x.new_empty((x.shape[0], weight.shape[0]))
    own, counts = nothing_observed(clock, amax, len(_FORWARD))
    if not (keep_weight and specs.keeps_weight):
        return y, x.new_empty(0), x.new_empty(0), own, counts
    spec = specs.fprop.rhs
    width = -(-weight.shape[1] // 16) * 16
    values = weight.new_empty((weight.shape[0], width), dtype=values_dtype(spec, weight.device))
    scale = weight.new_empty(_scale_shape(spec, values.shape), dtype=torch.float32)
    return y, values, scale, own, counts


@torch.library.custom_op("fourbits::linear_backward", mutates_args=())
def linear_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    w_values: Tensor,
    w_scale: Tensor,
    clock: Tensor,
    amax: Tensor | None,
    layer: int,
    table: str,
    measured: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dX [M, K], dW [N, K], dbias [N] in the dtypes of x, weight and weight; own amaxes and counts.

    dy: [M, N]; w_values, w_scale: as returned by the forward; amax: as for the forward; needs: which of x,
    weight and bias want a gradient. The others get an empty tensor. Own amaxes and counts are of Dgrad's and
    Wgrad's operands, as in the forward.
    """
    call = Call(table_from_text(table), clock, layer, amax, measured)
    dx = dw = dbias = None
    with torch.autocast(dy.device.type, enabled=False):
        by_rows, by_columns = call.gradient(dy, needs[0], needs[1])
        if by_rows is not None:
            rhs = _dgrad_weight(call, weight, ExactOperand(w_values, w_scale, 1, call.table.fprop.rhs))
            dx = matmul_exact(by_rows, rhs, x.dtype)[:, : x.shape[1]].contiguous()
        if by_columns is not None:
            dw = matmul_exact(by_columns, _wgrad_input(call, x), weight.dtype)
        if needs[2]:
            dbias = dy.sum(0, dtype=torch.float32).to(weight.dtype)
    dx, dw, dbias = (dy.new_empty(0) if grad is None else grad for grad in (dx, dw, dbias))
    return (dx, dw, dbias, *call.observed(_BACKWARD))


@linear_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    w_values: Tensor,
    w_scale: Tensor,
    clock: Tensor,
    amax: Tensor | None,
    layer: int,
    table: str,
    measured: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else dy.new_empty(0),
        torch.empty_like(weight, memory_format=torch.contiguous_format) if needs[1] else dy.new_empty(0),
        weight.new_empty(weight.shape[0]) if needs[2] else dy.new_empty(0),
        *nothing_observed(clock, amax, len(_BACKWARD)),
    )


def _dgrad_weight(call: Call, weight: Tensor, kept: ExactOperand) -> ExactOperand:
    """W as Dgrad multiplies it. kept: Fprop's W, where the table keeps it."""
    if call.table.shares_weight:
        return kept.along(0)
    if call.table.dgrad.rhs.source == "forward":
        fprop = kept if call.table.keeps_weight else call.operand(weight, 1, "fprop.rhs")
        weight = _dequantized(fprop, weight.shape[1])
    return call.operand(weight, 0, "dgrad.rhs")


def _wgrad_input(call: Call, x: Tensor) -> ExactOperand:
    """X as Wgrad multiplies it; from Fprop's copy, it is made once more, which is cheaper than to keep it."""
    if call.table.wgrad.rhs.source == "forward":
        x = _dequantized(call.operand(x, 1, "fprop.lhs"), x.shape[1])
    return call.operand(x, 0, "wgrad.rhs")


def _dequantized(operand: ExactOperand, columns: int) -> Tensor:
    """Values of an operand along axis 1 without its padding, fp32 [R, columns]. docs/nvfp4.md, section 8."""
    scale = operand.scale
    if scale.dim():
        scale = spread(scale, operand.scale_block, operand.values.shape)
    return (operand.values.to(torch.float32) * scale)[:, :columns]


def _scale_shape(spec: OperandSpec, shape: torch.Size) -> tuple[int, ...]:
    """Shape of the scale of an exact operand kept along axis 1."""
    size = spec.outer_size or (spec.block_size if spec.block_format.scale == "fp32" else None)
    return () if size is None else (-(-shape[0] // size[0]), -(-shape[1] // size[1]))
