"""A linear layer and its gradients in float64, from dequantized operands: what a recipe's table must compute.

The straight-through rule differentiates a GEMM as if its operands had not been quantized, and then computes
the derivative from separately quantized operands (docs/nvfp4.md, section 2).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantize
from fourbits.recipe.recipe import GemmSpec, GemmTable, Recipe

#: docs/nvfp4.md, section 11.2
ROLES = ("fprop.lhs", "fprop.rhs", "dgrad.lhs", "dgrad.rhs", "wgrad.lhs", "wgrad.rhs")
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class RunPosition:
    """Where a micro-batch stands in the run."""

    seed: int = 0
    layer: int = 0
    step: int = 0
    first_token: int = 0
    #: amaxes that operands use instead of their own, by role
    amaxes: Mapping[str, Tensor] = field(default_factory=dict)

    def sr_key(self, role: str) -> Tensor:
        """Tokens are the rows of the operands of Fprop.lhs and Dgrad.lhs, and the contraction of Wgrad's."""
        row = self.first_token if role in ("fprop.lhs", "dgrad.lhs") else 0
        block = self.first_token // 16 if role in ("wgrad.lhs", "wgrad.rhs") else 0
        return torch.tensor([self.seed, self.layer * 8 + ROLES.index(role), self.step, row, block])


@dataclass(frozen=True)
class ExactGemm:
    """A float64 GEMM of dequantized operands, and how far an FP32 accumulation may be from it."""

    value: Tensor
    bound: Tensor

    def assert_near(self, actual: Tensor) -> None:
        bound = self.bound + HALF_ULP[actual.dtype] * (self.value.abs() + self.bound)
        excess = (actual.double() - self.value).abs() - bound
        assert actual.shape == self.value.shape
        assert bool((excess <= 0).all()), f"{int((excess > 0).sum())} beyond the bound, by {excess.max():.3g}"


def exact_gemm(lhs: Tensor, rhs: Tensor) -> ExactGemm:
    """lhs [R, C] rhs [S, C]^T. The bound is that of section 12.4, C * 2^-23 * sum |a b|.

    It holds the epilogue's roundings too: C >= 16 additions rounded to nearest use up at most half of it.
    """
    sums = lhs.abs() @ rhs.abs().t()
    return ExactGemm(lhs @ rhs.t(), max(16, lhs.shape[1]) * 2.0**-23 * sums)


def operand(x: Tensor, spec: OperandSpec, axis: int, position: RunPosition, role: str) -> Tensor:
    """The stored matrix of an operand in float64, transformed where the spec says so."""
    q = quantize(x, spec, axis, amax=position.amaxes.get(role), sr_key=position.sr_key(role))
    values = q.dequantize(torch.float32).double()
    return values.t() if axis == 0 else values


def linears(model: nn.Module) -> list[nn.Linear]:
    """The model's linear layers, in order."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def grad_of(leaf: Tensor) -> Tensor:
    """The gradient of a leaf, which must have one."""
    assert leaf.grad is not None
    return leaf.grad


def fprop(
    x: Tensor, weight: Tensor, bias: Tensor | None, table: GemmTable, position: RunPosition
) -> ExactGemm:
    """Y = X W^T + bias."""
    result = _gemm(x, weight, table.fprop, (1, 1), position, "fprop")
    if bias is None:
        return result
    return ExactGemm(result.value + bias.double(), result.bound + 2.0**-23 * bias.abs())


def dgrad(dy: Tensor, weight: Tensor, table: GemmTable, position: RunPosition) -> ExactGemm:
    """dX = dY W. With shared codes W is the transpose of Fprop's operand; it may also be computed from it."""
    fprop_weight = operand(weight, table.fprop.rhs, 1, position, "fprop.rhs")
    if table.shares_weight:
        lhs = operand(dy, table.dgrad.lhs, 1, position, "dgrad.lhs")
        return exact_gemm(lhs, fprop_weight.t())
    if table.dgrad.rhs.source == "forward":
        weight = fprop_weight.float()
    return _gemm(dy, weight, table.dgrad, (1, 0), position, "dgrad")


def wgrad(dy: Tensor, x: Tensor, table: GemmTable, position: RunPosition) -> ExactGemm:
    """dW = dY^T X. X may be computed from Fprop's operand."""
    if table.wgrad.rhs.source == "forward":
        x = operand(x, table.fprop.lhs, 1, position, "fprop.lhs").float()
    return _gemm(dy, x, table.wgrad, (0, 0), position, "wgrad")


def _gemm(
    lhs: Tensor, rhs: Tensor, spec: GemmSpec, axes: tuple[int, int], position: RunPosition, name: str
) -> ExactGemm:
    return exact_gemm(
        operand(lhs, spec.lhs, axes[0], position, f"{name}.lhs"),
        operand(rhs, spec.rhs, axes[1], position, f"{name}.rhs"),
    )


def assert_layer_follows(recipe: Recipe) -> None:
    """A converted layer's three GEMMs multiply the operands of its recipe, within the derived bound."""
    layer, position = nn.Linear(80, 48), RunPosition(seed=7, step=3)
    model = nn.Sequential(layer)
    convert(model, recipe, seed=7)
    set_step(model, 3)
    x, dy = torch.randn(35, 80, requires_grad=True), torch.randn(35, 48)
    y = model(x)
    y.backward(dy)
    table, w = recipe.table, layer.weight.detach()
    fprop(x.detach(), w, layer.bias.detach(), table, position).assert_near(y.detach())
    dgrad(dy, w, table, position).assert_near(grad_of(x))
    wgrad(dy, x.detach(), table, position).assert_near(grad_of(layer.weight))
