"""Shapes, dtypes and strides of the forward operator's outputs, for the compiler.

Sizes may be symbolic here, so they cannot serve as keys of caches.
"""

import torch
from torch import Tensor

from fourbits.linear.plan import is_native, keeps_column
from fourbits.quant.correction import correction_of, split_residual
from fourbits.quant.kernels.kernel_config import FP8_FORMATS
from fourbits.quant.kernels.support import unsupported_device, unsupported_spec
from fourbits.quant.operand import OperandSpec
from fourbits.quant.request import signature_of
from fourbits.quant.scale_hierarchy import hierarchy_of
from fourbits.recipe.recipe import table_from_text


def fake_forward(
    x: Tensor, weight: Tensor, table: str, needs: list[bool], observed: bool, quantized_weight: bool
) -> list[Tensor]:
    """Y and the parts of saved operands, as `linear_forward` returns them."""
    parsed, none = table_from_text(table), x.new_empty(0)
    y, of_weight, of_input = x.new_empty((x.shape[0], weight.shape[0])), [none, none], [none, none, none]
    keeps = parsed.keeps_weight and not is_native(parsed, "fprop.rhs")
    if needs[0] and (keeps or quantized_weight):
        spec = parsed.fprop.rhs
        width = -(-weight.shape[1] // 16) * 16
        values = weight.new_empty((weight.shape[0], width), dtype=_values_dtype(spec, weight.device))
        of_weight = [values, weight.new_empty(_scale_shape(spec, values.shape), dtype=torch.float32)]
    column = needs[1] and keeps_column(parsed, signature_of(x), observed)
    if needs[1] and parsed.saved_inputs == "packed":
        of_input = _packed(x, parsed.wgrad.rhs, in_layout=column and not observed)
    elif column:
        of_input = [*_column(x, parsed.wgrad.rhs), none]
    if (name := parsed.wgrad.rhs.correction) and of_input[0] is not none:
        of_input.append(split_residual(correction_of(name), x)[1])
    return [y, *(part.clone() if part is none else part for part in (*of_weight, *of_input))]


def _packed(x: Tensor, spec: OperandSpec, in_layout: bool) -> list[Tensor]:
    """A packed X along axis 0. in_layout: whether it has X's memory layout."""
    (M, K), size, element = x.shape, spec.block_size, spec.block_format.element
    assert size is not None
    assert element is not None
    padded = -(-M // max(16, spec.rht)) * max(16, spec.rht)
    hierarchy = hierarchy_of(spec.block_format)

    def matrix(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        if in_layout:
            return x.new_empty((columns, rows), dtype=dtype).t()
        return x.new_empty((rows, columns), dtype=dtype)

    codes = matrix(K, padded * element.bits // 8, torch.uint8)
    scale_dtype = torch.uint8 if hierarchy.dtype == torch.float8_e8m0fnu else hierarchy.dtype
    scales = matrix(*hierarchy.stored_shape(-(-K // size[0]), -(-padded // size[1])), scale_dtype)
    return [codes, scales, x.new_empty((), dtype=torch.float32)]


def _column(x: Tensor, spec: OperandSpec) -> list[Tensor]:
    """X along axis 0, as the fused kernels write it."""
    M, K = x.shape
    if spec.format in FP8_FORMATS:
        values = x.new_empty((K, -(-M // 16) * 16), dtype=_values_dtype(spec, x.device)).t()
        return [values, x.new_empty((-(-values.shape[0] // 128), K), dtype=torch.float32)]
    group = max(16, spec.rht)
    values = x.new_empty((-(-M // group) * group, -(-K // 16) * 16), dtype=torch.bfloat16)[:, :K]
    return [values, x.new_empty((), dtype=torch.float32)]


def _scale_shape(spec: OperandSpec, shape: torch.Size) -> tuple[int, ...]:
    """Shape of the scale of a dequantized operand along axis 1."""
    size = spec.outer_size or (spec.block_size if spec.block_format.scale_in_epilogue else None)
    return () if size is None else (-(-shape[0] // size[0]), -(-shape[1] // size[1]))


def _values_dtype(spec: OperandSpec, device: torch.device) -> torch.dtype:
    """dtype of a dequantized operand's values on a device: FP8 stays FP8 where GEMM kernels support it."""
    fmt = spec.block_format
    element = None if fmt.element is None else fmt.element.dtype
    if device.type == "cuda" and spec.format in FP8_FORMATS and element is not None:
        reason = unsupported_device(device) or unsupported_spec(spec)
        return torch.bfloat16 if reason else element
    return fmt.dtype or torch.bfloat16
