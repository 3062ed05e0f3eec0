"""The linear layer of these models: FP32 master weights, GEMMs in the activation's dtype, FP32 gradients.

    Y = X W^T    dX = dY W    dW = dY^T X

The operands of all three GEMMs have the activation's dtype, and sums are FP32. Y and dX are rounded to that
dtype once; dW stays FP32 like its master (arXiv:2509.25149 section 4: FP32 master weights and weight
gradients).
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

BF16_UNITS = ("amx_bf16", "avx512_bf16", "bf16")
CPU_MULTIPLIES_BF16 = any(torch.cpu.get_capabilities().get(unit) for unit in BF16_UNITS)


def gemm_operand(x: Tensor) -> Tensor:
    """x in the dtype that the GEMM should read: FP32 on a CPU without BF16 units, else x's own.

    FP32 holds products of BF16 numbers exactly, so this is the same GEMM, and five times faster than
    PyTorch's BF16 emulation.
    """
    widen = x.device.type == "cpu" and x.element_size() < 4 and not CPU_MULTIPLIES_BF16
    return x.float() if widen else x


def matmul(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a [M, K] times b [K, N] of one dtype, accumulated in FP32, rounded once to out_dtype."""
    if out_dtype == a.dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=out_dtype)
    return (a.float() @ b.float()).to(out_dtype)


class LinearFunction(torch.autograd.Function):
    """Y = X W^T. The master is rounded to X's dtype at use, in the forward and again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rounded: Tensor | None = None) -> Tensor:
        """x: [M, K]; weight: [N, K]; rounded: weight in x's dtype, if available -> [M, N] in x's dtype."""
        ctx.save_for_backward(x, weight if rounded is None else rounded)
        operand = weight.to(x.dtype) if rounded is None else rounded
        return matmul(gemm_operand(x), gemm_operand(operand).t(), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """grad: [M, N] -> the gradients of x, in its dtype, and of the master, in FP32."""
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        grad = gemm_operand(grad)
        if ctx.needs_input_grad[0]:
            grad_x = matmul(grad, gemm_operand(weight.to(x.dtype)), x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = matmul(grad.t(), gemm_operand(x), torch.float32)
        return grad_x, grad_weight, None


class Linear(nn.Linear):
    """nn.Linear without bias, whose FP32 master is rounded to the activation's dtype at use.

    `casts_weight` declares to a precision recipe that this class computes what nn.Linear does.
    """

    casts_weight = True
    _rounded: Tensor | None = None

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Do nothing: init.py fills the weight, because it knows the layer's position in the model."""

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., K] -> [..., N] in its dtype."""
        rounded: Tensor | None = getattr(self, "_rounded", None)  # converted layers lack the class's default
        rounded = None if rounded is None or rounded.dtype != input.dtype else rounded
        rows = LinearFunction.apply(input.reshape(-1, self.in_features), self.weight, rounded)
        return rows.view(*input.shape[:-1], self.out_features)

    @contextmanager
    def rounded_once(self, dtype: torch.dtype) -> Generator[None]:
        """Calls inside share one rounding of the master to dtype, with the same bits.

        A sharded master is excluded, because every call gathers it into a new tensor.
        """
        if type(self.weight) is nn.Parameter:
            self._rounded = self.weight.detach().to(dtype)
        try:
            yield
        finally:
            self._rounded = None
