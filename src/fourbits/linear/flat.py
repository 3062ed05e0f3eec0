"""Tensors of a layer's call as matrices, and as the flat lists that autograd saves and operators pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fourbits.linear.compute import SavedOperands
from fourbits.linear.corrected import Corrected
from fourbits.linear.hot_channels import HotChannels
from fourbits.linear.plan import keeps_row
from fourbits.quant.correction import correction_of
from fourbits.quant.quantize import Operand
from fourbits.quant.scale_codes import SCALE_DTYPES
from fourbits.quant.tensor import ExactOperand, QuantizedTensor
from fourbits.recipe.recipe import GemmTable

#: dtypes that autocast casts
_CAST = (torch.float32, torch.bfloat16, torch.float16)


def autocast_dtype(input: Tensor) -> torch.dtype:
    """The dtype of nn.Linear's input under the current autocast state."""
    kind = input.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and input.dtype in _CAST:
        return torch.get_autocast_dtype(kind)
    return input.dtype


def autocast(input: Tensor) -> Tensor:
    """The input, cast to `autocast_dtype`."""
    return input.to(autocast_dtype(input))


def rows_of(x: Tensor) -> Tensor:
    """[..., K] -> [M, K], also for K = 0."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def flattened(saved: SavedOperands) -> list[Tensor | None]:
    """Saved operands as five tensors, None for missing ones: W's values and scale; X's values and scale
    (Wgrad's, or Fprop's to re-quantize), or its codes, block scales and global scale. Last, if X has a
    correction, what that removed; or if it has hot features, their indices and values.
    """
    weight = saved.weight
    of_weight = [None, None] if weight is None else [weight.values, weight.scale]
    return [*of_weight, *input_parts(saved.input), *(saved.hot or ())]


def input_parts(kept: Operand | Corrected | None) -> list[Tensor | None]:
    """The parts of X that `flattened` returns."""
    if kept is None:
        return [None, None, None]
    if isinstance(kept, Corrected):
        return [*input_parts(kept.operand), kept.removed]
    if isinstance(kept, ExactOperand):
        return [kept.values, kept.scale, None]
    return [kept.codes, kept.block_scale, kept.global_scale]


def unflattened(table: GemmTable, parts: Sequence[Tensor | None], shape: tuple[int, int]) -> SavedOperands:
    """Inverse of `flattened`, for a table and X of this shape."""
    w_values, w_scale, x_values, x_scale, x_global, *removed = parts
    weight = kept = hot = None
    if table.hot_channels and removed:
        index, x_hot = removed
        assert index is not None
        assert x_hot is not None
        hot, removed = HotChannels(index, x_hot), []
    if w_values is not None and w_scale is not None:
        weight = ExactOperand(w_values, w_scale, 1, table.fprop.rhs)
    if x_values is not None and x_scale is not None:
        spec = table.wgrad.rhs.of_residual if removed else table.wgrad.rhs
        if keeps_row(table):
            kept = ExactOperand(x_values, x_scale, 1, table.fprop.lhs)
        elif x_global is None:
            kept = ExactOperand(x_values, x_scale, 0, spec)
        else:
            dtype = SCALE_DTYPES.get(spec.block_format.scale or "", x_scale.dtype)
            kept = QuantizedTensor(x_values, x_scale.view(dtype), x_global, 0, shape, spec)
        if removed:
            assert removed[0] is not None
            kept = Corrected(kept, removed[0], correction_of(table.wgrad.rhs.correction))
    return SavedOperands(weight, kept, hot)


def weight_parts(weight: QuantizedTensor) -> list[Tensor]:
    """A quantized weight as the operator takes it: codes, block scales, global scale."""
    return without_e8m0((weight.codes, weight.block_scale, weight.global_scale))


def weight_of(parts: Sequence[Tensor], table: GemmTable, weight: Tensor) -> QuantizedTensor | None:
    """Inverse of `weight_parts`, for a weight of this shape; None without parts.

    Copies parts that dequantizing returns unchanged: an operator may not return its own inputs.
    """
    if not parts:
        return None
    (codes, scale, global_scale), spec = parts, table.fprop.rhs
    codes = codes.clone() if spec.block_format.element is None else codes
    scale = scale.clone(memory_format=torch.contiguous_format)
    scale = scale.view(SCALE_DTYPES.get(spec.block_format.scale or "", scale.dtype))
    return QuantizedTensor(codes, scale, global_scale.clone(), 1, (weight.shape[0], weight.shape[1]), spec)


def without_e8m0(parts: Sequence[Tensor | None]) -> list[Tensor]:
    """The parts that exist, in dtypes that the compiler supports."""
    found = [part for part in parts if part is not None]
    return [part.view(torch.uint8) if part.dtype == torch.float8_e8m0fnu else part for part in found]
