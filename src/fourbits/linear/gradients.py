"""The two GEMMs of a linear's backward pass, from the operands that its forward kept or anew."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fourbits.gemm.matmul import multiply
from fourbits.linear.operands import Call, unpacked_operand
from fourbits.quant.tensor import ExactOperand, QuantizedTensor, spread


def gradients(
    call: Call,
    dy: Tensor,
    x: Tensor | ExactOperand | QuantizedTensor | None,
    weight: Tensor,
    kept: ExactOperand | None,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dX, dW and dbias, each if needed. x: X, or as Wgrad multiplies it; kept: W as Fprop multiplied it."""
    dx = dw = dbias = None
    sides = ([("dgrad.lhs", 1)] if needs[0] else []) + ([("wgrad.lhs", 0)] if needs[1] else [])
    made: list[ExactOperand | QuantizedTensor] = []
    if any(call.is_native(role) for role, _ in sides):
        made += [call.multiplicand(dy, axis, role) for role, axis in sides]
    elif sides:
        made += call.operands(dy, *sides)
    if needs[0]:
        dx = multiply(made.pop(0), _dgrad_weight(call, weight, kept), dy.dtype)[:, : weight.shape[1]]
    if needs[1]:
        assert x is not None
        rhs = _wgrad_input(call, x) if isinstance(x, Tensor) else x
        dw = multiply(made.pop(0), rhs, torch.float32)
    if needs[2]:
        dbias = dy.sum(0, dtype=torch.float32)
    return (None if dx is None else dx.contiguous()), dw, dbias


def kept_input(
    call: Call, parts: tuple[Tensor, Tensor, Tensor], shape: tuple[int, int]
) -> ExactOperand | QuantizedTensor | None:
    """X as Wgrad multiplies it, from what `_parts` gave; None if nothing was kept. shape: of X."""
    spec = call.table.wgrad.rhs
    if parts[0].dim() == 1:
        return None
    if call.table.saved_inputs == "packed":
        packed = QuantizedTensor(*parts, 0, shape, spec)
        return packed if call.is_native("wgrad.rhs") else unpacked_operand(packed)
    return ExactOperand(parts[0], parts[1], 0, spec)


def _dgrad_weight(call: Call, weight: Tensor, kept: ExactOperand | None) -> ExactOperand | QuantizedTensor:
    """W as Dgrad multiplies it. kept: Fprop's W, if it was kept; tensor cores want its codes turned."""
    if call.table.shares_weight and not call.is_native("dgrad.rhs"):
        return (kept or call.operand(weight, 1, "fprop.rhs")).along(0)
    if call.table.dgrad.rhs.source == "forward":
        weight = _dequantized(kept or call.operand(weight, 1, "fprop.rhs"), weight.shape[1])
    return call.multiplicand(weight, 0, "dgrad.rhs")


def _wgrad_input(call: Call, x: Tensor) -> ExactOperand | QuantizedTensor:
    """X as Wgrad multiplies it; from Fprop's copy, it is made once more, which is cheaper than to keep it."""
    if call.table.wgrad.rhs.source == "forward":
        x = _dequantized(call.operand(x, 1, "fprop.lhs"), x.shape[1])
    return call.multiplicand(x, 0, "wgrad.rhs")


def _dequantized(operand: ExactOperand, columns: int) -> Tensor:
    """Values of an operand along axis 1 without its padding, fp32 [R, columns]. docs/nvfp4.md, section 8."""
    scale = operand.scale
    if scale.dim():
        scale = spread(scale, operand.scale_block, operand.values.shape)
    return (operand.values.to(torch.float32) * scale)[:, :columns]
