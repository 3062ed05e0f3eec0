"""A converted linear takes and returns what nn.Linear does, with and without autocast."""

import copy

import pytest
import torch
from torch import nn

from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from fourbits.recipe.presets import list_recipes
from support.assertions import assert_same_bytes
from support.straight_through import grad_of

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def pair(dtype: torch.dtype) -> tuple[nn.Linear, nn.Linear]:
    """An nn.Linear, and its converted copy."""
    plain = nn.Linear(48, 32, dtype=dtype)
    converted = copy.deepcopy(plain)
    convert(converted, "nvfp4")
    set_step(converted, 0)
    return plain, converted


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_outputs_and_gradients_have_the_dtypes_of_nn_linear(dtype):
    found = []
    for linear in pair(dtype):
        x = torch.randn(16, 48, dtype=dtype, requires_grad=True)
        y = linear(x)
        y.sum().backward()
        found.append([t.dtype for t in (y, grad_of(x), grad_of(linear.weight), grad_of(linear.bias))])
    assert found[0] == found[1]


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_outputs_and_gradients_have_the_dtypes_of_nn_linear_under_autocast(dtype, autocast):
    found = []
    for linear in pair(dtype):
        x = torch.randn(16, 48, dtype=dtype, requires_grad=True)
        with torch.autocast("cpu", autocast):
            y = linear(x)
        y.sum().backward()
        found.append([t.dtype for t in (y, grad_of(x), grad_of(linear.weight), grad_of(linear.bias))])
    assert found[0] == found[1]
    assert found[0][0] == autocast


def test_autocast_casts_the_input_and_changes_nothing_else():
    _, linear = pair(torch.float32)
    x = torch.randn(32, 48, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
        y.square().sum().backward()
    inside = [y.detach(), grad_of(x).bfloat16(), grad_of(linear.weight).clone()]
    linear.zero_grad()
    set_step(linear, 0)
    cast = x.detach().bfloat16().requires_grad_()
    y = linear(cast)
    y.square().sum().backward()
    for got, want in zip(inside, [y.detach(), grad_of(cast), grad_of(linear.weight)], strict=True):
        assert_same_bytes(got, want)


def test_the_gradient_of_an_fp32_master_is_never_rounded_to_the_activations_dtype():
    _, linear = pair(torch.float32)
    linear(torch.randn(64, 48).bfloat16()).square().sum().backward()
    grad = grad_of(linear.weight)
    assert not torch.equal(grad, grad.bfloat16().float())


@pytest.mark.parametrize("shape", [(48,), (3, 48), (2, 3, 48), (0, 48), (2, 0, 48), (2, 1, 3, 48)], ids=str)
def test_leading_dimensions_stay(shape):
    plain, linear = pair(torch.float32)
    x = torch.randn(shape, requires_grad=True)
    y = linear(x)
    y.sum().backward()
    assert y.shape == plain(x).shape
    assert grad_of(x).shape == x.shape


def test_an_input_of_no_tokens_has_zero_weight_gradients():
    _, linear = pair(torch.float32)
    linear(torch.randn(0, 48)).sum().backward()
    assert torch.equal(grad_of(linear.weight), torch.zeros(32, 48))
    assert torch.equal(grad_of(linear.bias), torch.zeros(32))


@pytest.mark.parametrize(("k", "n"), [(0, 20), (20, 0)], ids=["no inputs", "no outputs"])
@pytest.mark.parametrize("name", [name for name in list_recipes() if name != "bf16"])
def test_a_linear_without_inputs_or_outputs_is_nn_linear(name, k, n):
    """It gives its bias, or nothing, and gradients of zeros: no rounding is left."""
    plain = nn.Linear(16, 16)  # whose initialization does not warn of empty tensors
    plain.in_features, plain.out_features = k, n
    plain.weight, plain.bias = nn.Parameter(torch.zeros(n, k)), nn.Parameter(torch.arange(float(n)))
    linear, inputs = copy.deepcopy(plain), [torch.randn(2, 8, k, requires_grad=True) for _ in range(2)]
    convert(linear, name)
    set_step(linear, 0)
    for module, x in zip((linear, plain), inputs, strict=True):
        y = module(x)
        assert torch.equal(y, linear.bias.expand(2, 8, n))
        y.sum().backward()
    assert torch.equal(grad_of(inputs[0]), grad_of(inputs[1]))
    for made, true in zip(linear.parameters(), plain.parameters(), strict=True):
        assert torch.equal(grad_of(made), grad_of(true))


def test_an_input_of_another_width_is_refused_even_where_its_size_would_fit():
    _, linear = pair(torch.float32)
    with pytest.raises(ValueError, match=r"last dimension .* in_features=48, got shape \[2, 96\]"):
        linear(torch.randn(2, 96))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_an_input_dtype_that_no_operand_can_have_is_refused(dtype):
    _, linear = pair(torch.float32)
    x = torch.ones(4, 48).to(dtype)
    for autocast in (False, True):
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            pytest.raises(ValueError, match=f"must be float32, bfloat16 or float16, got {dtype}"),
        ):
            linear(x)


def test_only_the_gradients_that_are_needed_are_computed():
    _, linear = pair(torch.float32)
    linear.weight.requires_grad_(False)
    x = torch.randn(16, 48, requires_grad=True)
    linear(x).sum().backward()
    assert linear.weight.grad is None
    assert linear.bias.grad is not None
    linear.requires_grad_(True)
    linear(x.detach()).sum().backward()
    assert linear.weight.grad is not None


def test_strided_inputs_and_gradients_give_the_bits_of_contiguous_ones():
    _, linear = pair(torch.float32)
    x = torch.randn(48, 32).t().requires_grad_()
    linear(x).t().contiguous().sum().backward()
    strided = [grad_of(x), grad_of(linear.weight).clone()]
    linear.zero_grad()
    dense = x.detach().contiguous().requires_grad_()
    linear(dense).backward(torch.ones(32, 32))
    for got, want in zip(strided, [grad_of(dense), grad_of(linear.weight)], strict=True):
        assert_same_bytes(got, want)


def test_differentiating_twice_names_the_layer_the_rule_and_the_remedy():
    _, linear = pair(torch.float32)
    x = torch.randn(16, 48, requires_grad=True)
    (grad,) = torch.autograd.grad(linear(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"QuantizedLinear: .* no derivative.*convert\(model, \"bf16\"\)"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_a_weight_of_a_dtype_that_no_operand_can_have_is_left_alone_with_the_reason(dtype):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[0].weight = nn.Parameter(torch.ones(32, 32).to(dtype), requires_grad=False)
    first, second = convert(model, "nvfp4").rows
    name = str(dtype).removeprefix("torch.")
    assert first.reason == f"its weight is {name}, not one of float32, bfloat16, float16"
    assert (first.quantized, second.quantized) == (False, True)
    assert type(model[0]) is nn.Linear


def test_a_model_whose_every_layer_has_such_a_dtype_is_refused_at_conversion():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).double()
    with pytest.raises(
        ValueError,
        match=r"^convert: weights of linear layers must be float32, .* got float64 in all 2 .*\.float\(\)",
    ):
        convert(model, "nvfp4")
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
    convert(model, "bf16")  # restores, and has nothing to refuse


def test_a_weight_that_is_cast_after_the_conversion_is_named():
    model = nn.Linear(32, 32)
    convert(model, "nvfp4")
    model.double()
    with pytest.raises(
        ValueError, match=r"^QuantizedLinear: its weight must be float32, .* got torch\.float64"
    ):
        model(torch.ones(4, 32, dtype=torch.float64))


def test_a_weight_created_in_inference_mode_evaluates_and_is_refused_in_training():
    with torch.inference_mode():
        model = nn.Linear(32, 32)
        convert(model, "nvfp4")
        expected = model(torch.ones(4, 32))
    with pytest.raises(ValueError, match=r"^QuantizedLinear: a weight that is trained .*inference_mode"):
        model(torch.ones(4, 32))
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(torch.ones(4, 32)), expected)
    copied = copy.deepcopy(model)
    set_step(copied, 0)
    copied(torch.ones(4, 32)).sum().backward()
    assert copied.weight.grad is not None


@pytest.mark.parametrize("recipe", ["nvfp4", "nemotron3-super", "quartet2"])
def test_a_model_converted_in_inference_mode_trains_outside_of_it(recipe):
    found = []
    for inference in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(32, 32)
        with torch.inference_mode(inference):
            convert(model, recipe)
            set_step(model, 0)
            model(torch.ones(16, 32))
        for step in range(2):
            model.zero_grad()
            set_step(model, step + 1)
            model(torch.linspace(-1, 1, 16 * 32).reshape(16, 32)).square().sum().backward()
        found.append(grad_of(model.weight))
    assert torch.equal(*found)
