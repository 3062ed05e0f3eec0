"""A weight that arrives quantized, as from an all-gather of codes and scales."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourbits.linear.convert import convert
from fourbits.linear.native_gemms import with_native_gemms
from fourbits.linear.step import set_step
from fourbits.linear.weight_source import set_weight_source
from fourbits.model.experts import GroupedLinear
from fourbits.quant.quantize import quantize
from fourbits.quant.tensor import QuantizedTensor
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import GemmSpec, Recipe, table_from_text
from fourbits.settings import override
from support.assertions import assert_same_bytes
from support.straight_through import grad_of, linears

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
SQUARE = ("nvfp4", "mxfp4", "fp8", "nvfp4-46")  # Dgrad takes the transpose of Fprop's operand
M, K, N = 64, 48, 80


def everywhere(recipe: str, **changes: Any) -> Recipe:
    whole = {"keep_bf16.first_blocks": 0, "keep_bf16.last_blocks": 0}
    return override(get_recipe(recipe), {**whole, **changes})


def layer_of(recipe: Recipe) -> nn.Linear:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(K, N))
    convert(model, recipe, seed=3)
    set_step(model, 2, 64)
    return linears(model)[0]


class Gathered:
    """A source that quantized the weight beforehand, and leaves nothing else of it."""

    def __init__(self, layer: Any, recipe: Recipe) -> None:
        self.calls, self.weight = 0, quantize(layer.weight.detach(), recipe.fprop.rhs, 1)
        layer.weight.data.fill_(torch.nan)

    def __call__(self, weight: Tensor) -> QuantizedTensor:
        self.calls += 1
        return self.weight


def run(layer: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(Y, dX, dW)."""
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(M, width, generator=generator) for width in (K, N))
    layer.zero_grad()
    leaf = x.requires_grad_()
    y = layer(leaf)
    y.backward(dy)
    return y.detach(), grad_of(leaf), next(p.grad.clone() for p in layer.parameters() if p.dim() == 2)


def assert_equal_runs(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for got, wanted in zip(actual, expected, strict=True):
        assert_same_bytes(got, wanted)


@pytest.mark.parametrize("recipe", SQUARE)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_quantized_weight_gives_the_bytes_of_quantizing_it_in_the_layer(recipe, compiled):
    """The layer's own weight, which holds NaN, is never read; its gradient arrives."""
    chosen = everywhere(recipe)
    layer, expected = layer_of(chosen), run(layer_of(chosen))
    source = Gathered(layer, chosen)
    set_weight_source(layer, source)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    assert_equal_runs(run(call), expected)
    if not compiled:
        assert source.calls == 1, "the backward pass takes what the forward saved"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["nvfp4-naive", "nvfp4-fwd", "mxfp8"])
def test_where_dgrad_needs_other_blocks_it_re_quantizes_the_values_that_arrived(recipe, compiled):
    """As a recipe with source `forward` does, docs/nvfp4.md, section 6."""
    chosen = everywhere(recipe)
    layer, expected = layer_of(chosen), run(layer_of(everywhere(recipe, **{"dgrad.rhs.source": "forward"})))
    set_weight_source(layer, Gathered(layer, chosen))
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    assert_equal_runs(run(call), expected)


def test_inference_uses_the_source_too_and_none_restores_the_layers_own_weight():
    chosen = everywhere("nvfp4")
    layer, x = layer_of(chosen), torch.ones(M, K)
    weight = layer.weight.detach().clone()
    with torch.no_grad():
        expected = layer(x)
        set_weight_source(layer, Gathered(layer, chosen))
        assert_same_bytes(layer(x), expected)
        set_weight_source(layer, None)
        assert layer(x).isnan().all()
        layer.weight.copy_(weight)
        assert_same_bytes(layer(x), expected)


def test_a_kept_weight_of_an_earlier_micro_batch_is_not_used_in_its_place():
    chosen = everywhere("nvfp4")
    layer = layer_of(chosen)
    set_step(layer, 2, 64, same_weights=True)
    run(layer)
    other = quantize(torch.ones(N, K), chosen.fprop.rhs, 1)
    set_weight_source(layer, lambda weight: other)
    set_step(layer, 2, 128, same_weights=True)
    y, *_ = run(layer)
    layer.weight.data.fill_(1.0)
    set_weight_source(layer, None)
    set_step(layer, 2, 128)
    assert_same_bytes(y, run(layer)[0])


def test_experts_get_their_weights_one_by_one():
    torch.manual_seed(2)
    model = nn.ModuleDict({"experts": GroupedLinear(3, K, N)})
    chosen = everywhere("nvfp4")
    convert(model, chosen)
    set_step(model, 1)
    experts: Any = model["experts"]
    x, counts = torch.randn(M, K), [16, 0, 48]
    expected = experts(x, counts)
    seen: list[Tensor] = []

    def source(weight: Tensor) -> QuantizedTensor:
        seen.append(weight.detach())
        return quantize(weight.detach(), chosen.fprop.rhs, 1)

    set_weight_source(experts, source)
    assert_same_bytes(experts(x, counts), expected)
    assert [torch.equal(w, experts.weight[i]) for w, i in zip(seen, (0, 2), strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda w, spec: w, "must return a QuantizedTensor, got Parameter"),
        (lambda w, spec: quantize(w.detach().t(), spec, 1), r"must return \[80, 48\] along axis 1"),
        (lambda w, spec: quantize(w.detach(), spec, 0), r"got \[80, 48\] along axis 0"),
        (
            lambda w, spec: quantize(w.detach(), replace(spec, block=(1, 16)), 1),
            "the spec must be the recipe's fprop.rhs",
        ),
    ],
)
def test_a_weight_that_does_not_fit_the_layer_is_an_error(wrong, message):
    chosen = everywhere("nvfp4")
    layer = layer_of(chosen)
    set_weight_source(layer, lambda weight: wrong(weight, chosen.fprop.rhs))
    with pytest.raises(ValueError, match=message):
        layer(torch.ones(M, K))


def test_recipes_that_need_the_unquantized_weight_refuse_a_source():
    chosen = everywhere("nvfp4")
    rotated = replace(chosen.fprop.lhs, rht=16)
    hidden = replace(chosen, fprop=GemmSpec(lhs=rotated, rhs=replace(chosen.fprop.rhs, rht=16)))
    with pytest.raises(ValueError, match="which a transform hides"):
        set_weight_source(layer_of(hidden), lambda weight: quantize(weight, chosen.fprop.rhs, 1))
    native: Any = layer_of(chosen)
    native.quantization.table = with_native_gemms(table_from_text(native.quantization.table)).to_text()
    with pytest.raises(ValueError, match="GEMMs on FP4 tensor cores"):
        set_weight_source(native, lambda weight: quantize(weight, chosen.fprop.rhs, 1))
    with pytest.raises(ValueError, match="layer must be a converted linear layer, got Linear"):
        set_weight_source(nn.Linear(16, 16), None)
