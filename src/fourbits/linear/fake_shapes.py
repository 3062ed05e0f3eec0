"""What a linear's operators return, without computing it: shapes, dtypes and strides for the compiler."""

import torch
from torch import Tensor

from fourbits.linear.operands import values_dtype
from fourbits.quant.kernels.kernel_config import FP8_FORMATS
from fourbits.quant.operand import OperandSpec
from fourbits.quant.scale_codes import encode_scales


def packed_shapes(x: Tensor, spec: OperandSpec, turned: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What a packed X along axis 0 looks like. turned: whether its bytes lie in X's layout."""
    (M, K), size, element = x.shape, spec.block_size, spec.block_format.element
    assert size is not None
    assert element is not None
    padded = -(-M // max(16, spec.rht)) * max(16, spec.rht)
    dtype = encode_scales(torch.ones(1), spec.block_format).dtype

    def matrix(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return (
            x.new_empty((columns, rows), dtype=dtype).t()
            if turned
            else x.new_empty((rows, columns), dtype=dtype)
        )

    codes = matrix(K, padded * element.bits // 8, torch.uint8)
    scales = matrix(-(-K // size[0]), -(-padded // size[1]), dtype)
    return codes, scales, x.new_empty((), dtype=torch.float32)


def column_shapes(x: Tensor, spec: OperandSpec) -> tuple[Tensor, Tensor]:
    """What the fused kernels give for X along axis 0, strides included."""
    M, K = x.shape
    if spec.format in FP8_FORMATS:
        values = x.new_empty((K, -(-M // 16) * 16), dtype=values_dtype(spec, x.device)).t()
        return values, x.new_empty((-(-values.shape[0] // 128), K), dtype=torch.float32)
    group = max(16, spec.rht)
    values = x.new_empty((-(-M // group) * group, -(-K // 16) * 16), dtype=torch.bfloat16)[:, :K]
    return values, x.new_empty((), dtype=torch.float32)


def scale_shape(spec: OperandSpec, shape: torch.Size) -> tuple[int, ...]:
    """Shape of the scale of an exact operand kept along axis 1."""
    size = spec.outer_size or (spec.block_size if spec.block_format.scale == "fp32" else None)
    return () if size is None else (-(-shape[0] // size[0]), -(-shape[1] // size[1]))
