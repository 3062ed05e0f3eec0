"""Shapes, dtypes and strides of the tensors that the forward operators return, for the compiler.

Sizes may be symbolic here, so they cannot serve as keys of caches. Strides are those that kernels and the
reference write for a contiguous tensor.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.linear.hot_channels import hot_count
from fourbits.linear.plan import keeps_column, keeps_row, multiplies_codes
from fourbits.quant.correction import correction_of, split_residual
from fourbits.quant.kernels.kernel_config import FP8_FORMATS
from fourbits.quant.kernels.support import transposes
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import one_pass
from fourbits.quant.request import OperandRequest, signature_of
from fourbits.quant.scale_hierarchy import hierarchy_of
from fourbits.recipe.recipe import GemmTable


class _Fake(NamedTuple):
    """A tensor that is not allocated."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


_SCALAR = _Fake((), (), torch.float32)


def fake_gradients(dy: Tensor, weight: Tensor, of_x: tuple[int, int], needs: Sequence[bool]) -> list[Tensor]:
    """The needed gradients among dX [M, K], in dY's dtype, dW and the bias' gradient, fp32.

    dy: [M, N]; weight: [N, K], or with a leading axis of experts; of_x: the shape of X.
    """
    of_bias = (*weight.shape[:-2], dy.shape[1])
    shapes: tuple[tuple[int, ...], ...] = of_x, tuple(weight.shape), of_bias
    dtypes = dy.dtype, torch.float32, torch.float32
    return [
        dy.new_empty(shape, dtype=dtype)
        for shape, dtype, need in zip(shapes, dtypes, needs, strict=True)
        if need
    ]


def kept_parts(
    x: Tensor, table: GemmTable, needs: Sequence[bool], observed: bool, received: bool
) -> list[bool]:
    """The parts returned by `flat.flattened` that a forward pass keeps. received: whether W arrives
    quantized.
    """
    weight = needs[0] and (received or (table.keeps_weight and not multiplies_codes(table, "fprop.rhs")))
    packed = needs[1] and table.saved_inputs == "packed"
    kept = needs[1] and (packed or keeps_row(table) or keeps_column(table, signature_of(x), observed))
    corrected = [True] if kept and table.wgrad.rhs.correction else []
    hot = [True, True] if any(needs[:2]) and fake_hot(x, table) else []
    return [weight, weight, kept, kept, packed, *corrected, *hot]


def fake_hot(x: Tensor, table: GemmTable) -> list[Tensor]:
    """The hot features of X that a forward pass keeps: indices and values; none without any."""
    count = hot_count(table.hot_channels, int(x.shape[1])) if table.hot_channels else 0
    shapes = (((count,), torch.int64), ((x.shape[0], count), x.dtype)) if count else ()
    return [x.new_empty(shape, dtype=dtype) for shape, dtype in shapes]


def fake_weight(weight: Tensor, table: GemmTable, received: bool) -> list[Tensor]:
    """Values and scale of Fprop's operand W."""
    spec = table.fprop.rhs
    return _allocated(weight, _reference_row(weight, spec) if received else _row(weight, spec))


def fake_row(x: Tensor, table: GemmTable) -> list[Tensor]:
    """Values and scale of Fprop's operand X."""
    return _allocated(x, _row(x, table.fprop.lhs))


def fake_input(x: Tensor, table: GemmTable, observed: bool) -> list[Tensor]:
    """The parts of an operand X that a forward pass keeps for Wgrad."""
    if keeps_row(table):
        return fake_row(x, table)
    spec, in_one_pass = table.wgrad.rhs, keeps_column(table, signature_of(x), observed)
    packed = table.saved_inputs == "packed"
    parts = _allocated(x, _packed(x, spec, in_one_pass) if packed else _column(x, spec))
    if spec.correction:
        parts.append(split_residual(correction_of(spec.correction), x)[1])
    return parts


def _allocated(like: Tensor, fakes: Sequence[_Fake]) -> list[Tensor]:
    return [like.new_empty_strided(fake.shape, fake.strides, dtype=fake.dtype) for fake in fakes]


def _row(x: Tensor, spec: OperandSpec) -> list[_Fake]:
    """x along axis 1."""
    (M, K), request = x.shape, OperandRequest(spec.of_residual, 1)
    by_kernel, width = one_pass(signature_of(x), (request,)), _rounded_up(K, max(16, spec.rht))
    if by_kernel and spec.format in FP8_FORMATS:
        return [_rows(M, width, _fp8(spec)), _fp8_scale(M, width, spec)]
    if by_kernel and transposes(request):  # a column of the transposed tensor
        return [_Fake((M, width), (1, _rounded_up(M, 16)), torch.bfloat16), _SCALAR]
    return [_rows(M, width, torch.bfloat16), _SCALAR] if by_kernel else _reference_row(x, spec)


def _reference_row(x: Tensor, spec: OperandSpec) -> list[_Fake]:
    """x along axis 1 by the reference, which completes the last block and slices the result."""
    M, width = x.shape[0], _rounded_up(x.shape[1], max(16, spec.rht))
    size, dtype = spec.block_size, spec.block_format.dtype or torch.bfloat16
    stride = width if size is None else _rounded_up(width, size[1])
    return [_Fake((M, width), (stride, 1), dtype), _scale(M, width, spec)]


def _column(x: Tensor, spec: OperandSpec) -> list[_Fake]:
    """x along axis 0, as the kernels write it together with the row."""
    M, K = x.shape
    height = _rounded_up(M, max(16, spec.rht))
    if spec.format in FP8_FORMATS:
        return [_transposed(_rows(K, height, _fp8(spec))), _transposed(_fp8_scale(K, height, spec))]
    return [_Fake((height, K), (_rounded_up(K, 16), 1), torch.bfloat16), _SCALAR]


def _packed(x: Tensor, spec: OperandSpec, in_layout: bool) -> list[_Fake]:
    """x packed along axis 0. in_layout: whether it has the layout of x, as a single pass writes it."""
    (M, K), size, element = x.shape, spec.block_size, spec.block_format.element
    assert size is not None
    assert element is not None
    length, hierarchy = _rounded_up(M, max(16, spec.rht)), hierarchy_of(spec.block_format)
    # the compiler has no E8M0
    scale_dtype = torch.uint8 if hierarchy.dtype == torch.float8_e8m0fnu else hierarchy.dtype
    codes = K, length * element.bits // 8, torch.uint8
    scales = *hierarchy.stored_shape(_blocks(K, size[0]), _blocks(length, size[1])), scale_dtype
    if in_layout:
        return [
            *(_transposed(_rows(across, down, dtype)) for down, across, dtype in (codes, scales)),
            _SCALAR,
        ]
    return [_rows(*codes), _rows(*scales), _SCALAR]


def _scale(rows: int, columns: int, spec: OperandSpec) -> _Fake:
    """The scale of an operand along axis 1 that a GEMM applies: a single one, or one per block."""
    size = spec.outer_size or (spec.block_size if spec.block_format.scale_in_epilogue else None)
    if size is None:
        return _SCALAR
    return _rows(_blocks(rows, size[0]), _blocks(columns, size[1]), torch.float32)


def _fp8_scale(rows: int, columns: int, spec: OperandSpec) -> _Fake:
    """The block scales that the FP8 kernel writes: transposed, because GEMMs read many rows at once."""
    found = _scale(rows, columns, spec)
    square = spec.block_size is not None and spec.block_size[0] != 1
    return found if square else found._replace(strides=(1, rows))


def _fp8(spec: OperandSpec) -> torch.dtype:
    element = spec.block_format.element
    assert element is not None
    assert element.dtype is not None
    return element.dtype


def _rows(rows: int, columns: int, dtype: torch.dtype) -> _Fake:
    return _Fake((rows, columns), (columns, 1), dtype)


def _transposed(fake: _Fake) -> _Fake:
    return _Fake(fake.shape[::-1], fake.strides[::-1], fake.dtype)


def _rounded_up(size: int, multiple: int) -> int:
    return _blocks(size, multiple) * multiple


def _blocks(size: int, length: int) -> int:
    return -(-size // length)
