"""The product of two operands as an operator: the compiler must not trace how kernels are launched."""

from collections.abc import Callable

import torch
from torch import Tensor

from fourbits.gemm.sums import Epilogue, Sums
from fourbits.operators import operator
from fourbits.quant.scale_codes import cast_bytes
from fourbits.quant.tensor import QuantizedTensor
from fourbits.quant.traced import spec_from_text, spec_to_text


def flat(q: QuantizedTensor) -> tuple[list[Tensor], str, int, list[int]]:
    """An operand as arguments of `matmul_packed`: E8M0 scales as uint8, for which compilers have code."""
    scale = q.block_scale
    scale = cast_bytes(scale, torch.uint8) if q.spec.block_format.scale == "e8m0" else scale
    return [q.codes, scale, q.global_scale], spec_to_text(q.spec), q.axis, list(q.shape)


def _packed(tensors: list[Tensor], spec: str, axis: int, shape: list[int]) -> QuantizedTensor:
    """Inverse of `flat`."""
    codes, scale, global_scale = tensors
    parsed = spec_from_text(spec)
    scale = scale.view(torch.float8_e8m0fnu) if parsed.block_format.scale == "e8m0" else scale
    return QuantizedTensor(codes, scale, global_scale, axis, (shape[0], shape[1]), parsed)


def _fake_matmul(
    a: list[Tensor],
    a_spec: str,
    a_axis: int,
    a_shape: list[int],
    b: list[Tensor],
    b_spec: str,
    b_axis: int,
    b_shape: list[int],
    out_dtype: torch.dtype,
    bias: Tensor | None,
    sums: Sums,
    epilogue: Epilogue,
    alpha: Tensor | None,
) -> Tensor:
    del a_spec, b_spec, b, bias, sums, epilogue, alpha
    return a[0].new_empty((a_shape[1 - a_axis], b_shape[1 - b_axis]), dtype=out_dtype)


def graph_matmul(matmul: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`matmul` as an operator, whose operands are `flat`."""

    @operator(
        "matmul_packed(Tensor[] a, str a_spec, int a_axis, SymInt[] a_shape, "
        "Tensor[] b, str b_spec, int b_axis, SymInt[] b_shape, "
        "ScalarType out_dtype, Tensor? bias, str sums, str epilogue, Tensor? alpha) -> Tensor",
        _fake_matmul,
    )
    def matmul_packed(
        a: list[Tensor],
        a_spec: str,
        a_axis: int,
        a_shape: list[int],
        b: list[Tensor],
        b_spec: str,
        b_axis: int,
        b_shape: list[int],
        out_dtype: torch.dtype,
        bias: Tensor | None,
        sums: Sums,
        epilogue: Epilogue,
        alpha: Tensor | None,
    ) -> Tensor:
        left, right = _packed(a, a_spec, a_axis, a_shape), _packed(b, b_spec, b_axis, b_shape)
        return matmul(left, right, out_dtype, bias, sums=sums, epilogue=epilogue, alpha=alpha).contiguous()

    return matmul_packed
