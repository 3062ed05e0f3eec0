import pytest
import torch
from torch.nn import functional as F

from fourbits.model import linear as linear_module
from fourbits.model.embedding import Embedding
from fourbits.model.layers import FFN, RMSNorm, relu2, swiglu
from fourbits.model.linear import Linear, gemm_operand, matmul

BF16_EPS = torch.finfo(torch.bfloat16).eps


def filled_linear(in_features, out_features):
    layer = Linear(in_features, out_features)
    torch.nn.init.normal_(layer.weight, std=0.1)
    return layer


@pytest.mark.parametrize("has_units", [False, True])
def test_a_linear_is_the_bf16_gemm_rounded_once(has_units, monkeypatch):
    monkeypatch.setattr(linear_module, "CPU_MULTIPLIES_BF16", has_units)
    layer = filled_linear(48, 32)
    x = torch.randn(2, 40, 48).bfloat16().requires_grad_()
    y = layer(x)
    dy = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, (x, layer.weight), dy)
    w, exact_x, exact_dy = (t.detach().bfloat16().double() for t in (layer.weight, x, dy))
    products = {
        "y": (y, exact_x @ w.T, exact_x.abs() @ w.abs().T),
        "dx": (dx, exact_dy @ w, exact_dy.abs() @ w.abs()),
    }
    for name, (found, wanted, size) in products.items():
        assert found.dtype == torch.bfloat16
        # One rounding to BF16, and FP32 sums whose error is a tiny part of the terms' size.
        assert ((found - wanted).abs() <= BF16_EPS / 2 * wanted.abs() + 1e-5 * size).all(), name
    assert dw.dtype == torch.float32
    wanted = exact_dy.flatten(0, 1).T @ exact_x.flatten(0, 1)
    size = exact_dy.flatten(0, 1).abs().T @ exact_x.flatten(0, 1).abs()
    assert ((dw - wanted).abs() <= 1e-5 * size).all(), "the weight's gradient is not rounded to BF16"


def test_operands_widen_only_where_the_cpu_lacks_bf16_units(monkeypatch):
    x = torch.randn(4, 4).bfloat16()
    monkeypatch.setattr(linear_module, "CPU_MULTIPLIES_BF16", False)
    assert gemm_operand(x).dtype == torch.float32
    assert torch.equal(gemm_operand(x), x)  # exactly
    monkeypatch.setattr(linear_module, "CPU_MULTIPLIES_BF16", True)
    assert gemm_operand(x) is x
    assert gemm_operand(x.float()).dtype == torch.float32


def test_fp64_products_stay_fp64():
    a, b = torch.randn(3, 4).double(), torch.randn(4, 5).double()
    assert torch.equal(matmul(gemm_operand(a), gemm_operand(b), torch.float64), a @ b)


def test_a_linear_declares_to_recipes_that_it_casts_its_weight():
    layer = filled_linear(16, 32)
    assert isinstance(layer, torch.nn.Linear)
    assert layer.casts_weight
    assert layer.bias is None
    x = torch.randn(3, 16)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight))


def test_a_shared_rounding_is_used_for_its_own_dtype_only():
    layer, x = filled_linear(16, 32), torch.randn(3, 16)
    with layer.rounded_once(torch.bfloat16):
        assert torch.equal(layer(x), F.linear(x, layer.weight))
        assert not torch.equal(layer(x.bfloat16()), layer(x).bfloat16())


def test_a_sharded_master_is_rounded_at_each_use():
    class Sharded(torch.nn.Parameter):
        pass

    layer = filled_linear(16, 32)
    layer.weight = Sharded(layer.weight.detach())
    with layer.rounded_once(torch.bfloat16):
        assert layer._rounded is None


def test_a_frequent_tokens_gradient_is_summed_in_fp32():
    """In BF16 a sum of ones ends at 256, where adding one more is rounded away."""
    table = Embedding(4, 8).bfloat16()
    table(torch.full((1000,), 2)).sum().backward()
    assert table.weight.grad is not None
    assert torch.equal(table.weight.grad[2], torch.full((8,), 1000.0).bfloat16())


def test_frozen_weights_get_no_gradient():
    layer = filled_linear(16, 32)
    layer.weight.requires_grad_(False)
    x = torch.randn(3, 16, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_pytorchs_with_one_rounding(dtype):
    norm = RMSNorm(64, 1e-5, torch.bfloat16)
    torch.nn.init.normal_(norm.weight)
    x = (100 * torch.randn(5, 64)).to(dtype)
    found = norm(x)
    wanted = F.rms_norm(x.double(), (64,), norm.weight.double(), 1e-5)
    assert found.dtype == torch.bfloat16
    assert ((found - wanted).abs() <= (BF16_EPS / 2 + 1e-6) * wanted.abs()).all()


def test_activations_are_rounded_once():
    a, b = (4 * torch.randn(100)).bfloat16(), torch.randn(100).bfloat16()
    for found, wanted in (
        (relu2(a), a.double().relu().square()),
        (swiglu(a, b), F.silu(a.double()) * b.double()),
    ):
        assert found.dtype == torch.bfloat16
        assert ((found - wanted).abs() <= (BF16_EPS / 2 + 1e-6) * wanted.abs()).all()


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_an_ffn_matches_its_formula(activation):
    ffn = FFN(16, 32, activation)
    for parameter in ffn.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(3, 16)
    up = x @ ffn.up_proj.weight.T
    gate_proj = ffn.gate_proj
    inner = up.relu() ** 2 if gate_proj is None else F.silu(x @ gate_proj.weight.T) * up
    torch.testing.assert_close(ffn(x), inner @ ffn.down_proj.weight.T)
