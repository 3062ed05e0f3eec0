"""A kept plan serves only the calls that it was made for."""

from typing import Any

import torch
from torch import nn

from fourbits import convert, set_step
from fourbits.gemm.kernels import gemms
from fourbits.quant.operand import OperandSpec
from fourbits.quant.tensor import ExactOperand


def planned(layer: Any, x: torch.Tensor) -> set[int]:
    """The plans that the layer has after a call."""
    layer(x)
    return {id(plan) for plan, _ in layer.quantization.plans.values()}


def test_a_bias_of_another_dtype_or_no_bias_gets_another_plan():
    """A launch is compiled for the bias's dtype, and receives only its address."""
    model: Any = nn.Sequential(nn.Linear(32, 48))
    convert(model, "nvfp4-naive")
    set_step(model, 0)
    x, found = torch.randn(16, 32), []
    for bias in (torch.float32, torch.bfloat16, None):
        model[0].bias = None if bias is None else nn.Parameter(torch.ones(48, dtype=bias))
        found.append(planned(model[0], x))
    assert [len(plans) for plans in found] == [1, 2, 3]


def test_a_weight_of_another_shape_gets_another_plan():
    model: Any = nn.Sequential(nn.Linear(32, 48, bias=False))
    convert(model, "nvfp4-naive")
    set_step(model, 0)
    assert model(torch.randn(16, 32)).shape == (16, 48)
    model[0].weight, model[0].out_features = nn.Parameter(model[0].weight.detach()[:32]), 32
    assert model(torch.randn(16, 32)).shape == (16, 32)


def test_an_operand_summed_along_its_other_axis_gets_another_plan(monkeypatch):
    values, one = torch.zeros(64, 64, dtype=torch.bfloat16), torch.ones(())
    a, b = (ExactOperand(values, one, axis, OperandSpec()) for axis in (1, 0))
    plan, made = gemms.kernel_gemm(a, a, torch.bfloat16, None), []
    monkeypatch.setattr(
        gemms, "kernel_gemm", lambda a, b, *rest: made.append((a.axis, b.axis)) or (lambda *args: values)
    )
    plan(a, b, None)
    assert made == [(1, 0)]
