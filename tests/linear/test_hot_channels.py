"""Hot channels: the quantization error of the largest features of X is added back in all three GEMMs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourbits.generate.held import held_operands
from fourbits.linear.convert import convert
from fourbits.linear.hot_channels import hot_count, hottest
from fourbits.linear.step import set_step
from fourbits.model.experts import GroupedLinear
from fourbits.quant.quantize import quantize
from fourbits.recipe.presets import get_recipe
from fourbits.settings import override
from support.assertions import assert_same_bytes
from support.straight_through import grad_of, linears

M, K, N = 64, 48, 80
EVERYWHERE = {"keep_bf16.first_blocks": 0, "keep_bf16.last_blocks": 0}


def layer_of(share: float, recipe: str = "nvfp4", **changes: Any) -> Any:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(K, N))
    convert(model, override(get_recipe(recipe), {**EVERYWHERE, "hot_channels": share, **changes}), seed=3)
    set_step(model, 2, 64)
    return linears(model)[0]


def tensors() -> tuple[Tensor, Tensor]:
    """X, of which the features 5 and 40 are hot, and dY."""
    generator = torch.Generator().manual_seed(11)
    x, dy = (torch.randn(M, width, generator=generator) for width in (K, N))
    x[:, [5, 40]] *= 30
    return x, dy


def run(layer: Any, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(Y, dX, dW)."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(dy.to(y.dtype))
    return y.detach(), grad_of(leaf), next(p.grad.clone() for p in layer.parameters() if p.dim() == 2)


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-naive", "fp8", "quartet2", "tetrajet2"])
def test_without_hot_channels_the_bits_are_those_of_the_plain_recipe(recipe):
    x, dy = tensors()
    plain = layer_of(0.0, recipe)
    assert "hot" not in str(plain.quantization.base_table.corrects)
    for few, expected in zip(run(layer_of(0.01, recipe), x, dy), run(plain, x, dy), strict=True):
        assert_same_bytes(few, expected)  # a hundredth of 48 features is none


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-naive", "fp8", "quartet2", "tetrajet2"])
def test_if_all_channels_are_hot_the_result_is_the_unquantized_product_within_rounding(recipe):
    x, dy = tensors()
    layer = layer_of(1.0, recipe)
    w, b = layer.weight.detach().double(), layer.bias.detach().double()
    expected = x.double() @ w.t() + b, dy.double() @ w, dy.double().t() @ x.double()
    terms = (
        x.double().abs() @ w.abs().t(),
        dy.double().abs() @ w.abs(),
        dy.double().abs().t() @ x.double().abs(),
    )
    for actual, product, size in zip(run(layer, x, dy), expected, terms, strict=True):
        assert ((actual.double() - product).abs() <= 2.0**-23 * (4 * M * size + product.abs())).all()


def test_hot_channels_are_exact_in_all_three_gemms_and_the_others_as_without():
    """Other columns of dX and dW keep their bits; Y is the plain one without the hot channels' error."""
    x, dy = tensors()
    layer, plain = layer_of(2 / K), layer_of(0.0)
    (y, dx, dw), (y0, dx0, dw0) = run(layer, x, dy), run(plain, x, dy)
    hot = torch.tensor([5, 40])
    others = torch.tensor([k for k in range(K) if k not in hot.tolist()])
    w = layer.weight.detach().double()
    torch.testing.assert_close(dx[:, hot].double(), (dy.double() @ w)[:, hot], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        dw[:, hot].double(), (dy.double().t() @ x.double())[:, hot], rtol=1e-5, atol=1e-4
    )
    assert_same_bytes(dx[:, others], dx0[:, others])
    assert_same_bytes(dw[:, others], dw0[:, others])
    table = layer.quantization.base_table
    qx, qw = (
        quantize(t, spec, axis=1).dequantize(torch.float64)
        for t, spec in ((x, table.fprop.lhs), (layer.weight.detach(), table.fprop.rhs))
    )
    error = x[:, hot].double() @ w[:, hot].t() - qx[:, hot] @ qw[:, hot].t()
    torch.testing.assert_close(y.double(), y0.double() + error, rtol=1e-5, atol=1e-3)
    exact = x.double() @ w.t() + layer.bias.detach().double()
    assert (y.double() - exact).norm() < 0.6 * (y0.double() - exact).norm()


@pytest.mark.parametrize("recipe", ["chon", "nvfp4-naive", "quartet2", "tetrajet2"])
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_layers_give_the_bytes_of_eager_ones(recipe, autocast):
    torch.compiler.reset()
    layer, (x, dy) = layer_of(0.125, recipe), tensors()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for actual, expected in zip(run(compiled, x, dy), run(layer, x, dy), strict=True):
            assert_same_bytes(actual, expected)
        with torch.no_grad():
            assert_same_bytes(compiled(x), layer(x))


@pytest.mark.parametrize(
    "changes",
    [{"saved_inputs": "packed"}, {"gradient_rows": "limited"}, {"fprop.lhs.amax_policy": "history"}],
)
def test_other_options_keep_their_meaning(changes):
    x, dy = tensors()
    (y, dx, dw), (y0, dx0, dw0) = run(layer_of(2 / K, **changes), x, dy), run(layer_of(0.0, **changes), x, dy)
    others = torch.tensor([k for k in range(K) if k not in (5, 40)])
    assert_same_bytes(dx[:, others], dx0[:, others])
    assert_same_bytes(dw[:, others], dw0[:, others])
    assert not torch.equal(y, y0)


def test_only_weights_or_only_inputs_may_need_gradients():
    x, dy = tensors()
    _, dx, dw = run(layer_of(0.125), x, dy)
    layer = layer_of(0.125)
    layer(x).backward(dy)
    assert_same_bytes(grad_of(layer.weight), dw)
    layer = layer_of(0.125)
    layer.weight.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    layer(leaf).backward(dy)
    assert_same_bytes(grad_of(leaf), dx)


def test_an_empty_batch_gives_an_empty_result():
    y, dx, dw = run(layer_of(0.125), torch.zeros(0, K), torch.zeros(0, N))
    assert (y.shape, dx.shape) == ((0, N), (0, K))
    assert not dw.any()


def test_the_largest_channels_are_hot_and_a_share_is_rounded():
    assert hottest(tensors()[0], 2).index.tolist() == [5, 40]
    assert [hot_count(share, 48) for share in (0.0, 0.01, 0.0625, 1)] == [0, 0, 3, 48]


def test_a_recipe_without_hot_channels_keeps_its_digest():
    assert get_recipe("nvfp4").digest == "2cb0b0fe22f75ccb"
    assert override(get_recipe("nvfp4"), {"hot_channels": 0.1}).digest != get_recipe("nvfp4").digest


def test_experts_with_hot_channels_are_a_loop():
    recipe = override(get_recipe("chon"), EVERYWHERE)
    (row,) = convert(nn.Sequential(GroupedLinear(3, 32, 48)), recipe, stacks=[]).rows
    assert "loop of 3 linear layers, because corrections have no grouped kernels" in row.reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hot_channels": 1.5}, "must be a share of the input features, 0 to 1, got 1.5"),
        ({"hot_channels": 0.1, "fprop.lhs.rht": 16, "fprop.rhs.rht": 16}, "must have no transform"),
        ({"hot_channels": 0.1, "dgrad.lhs.correction": "token-mean"}, "cannot be combined with a correction"),
        ({"hot_channels": 0.1, "sums": "exact"}, "sums: correction adds a product"),
        ({"hot_channels": 0.1, "fprop.lhs.error_feedback": 64}, "cannot be combined with error_feedback"),
    ],
)
def test_a_wrong_use_is_an_error(changes, message):
    with pytest.raises(ValueError, match=message):
        override(get_recipe("nvfp4"), changes)


def test_held_operands_refuse_them():
    model = nn.Sequential(layer_of(0.125))
    with pytest.raises(ValueError, match="has hot channels"), held_operands(model, [torch.ones(1, K)]):
        pass
