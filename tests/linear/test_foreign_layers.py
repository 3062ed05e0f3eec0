"""Layers that are linear under another class, wrapper or hook are converted, and given back as they were."""

import copy
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import parametrizations, parametrize
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from fourbits.linear.convert import convert
from fourbits.linear.layer_state import converted_state
from fourbits.linear.step import set_step
from support.assertions import assert_same_bytes
from support.pickled import pickled
from support.straight_through import grad_of

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


def results(layer: nn.Module) -> list[torch.Tensor]:
    """Y, dX and the gradients of the layer's parameters in the first step."""
    layer.zero_grad()
    x = X.clone().requires_grad_()
    set_step(layer, 0)
    y = layer(x)
    y.square().sum().backward()
    return [y.detach(), grad_of(x), *(grad_of(p).clone() for p in layer.parameters())]


def linear_of(source: Any) -> nn.Linear:
    """An nn.Linear with a Conv1D's numbers."""
    linear = nn.Linear(*source.weight.shape)
    with torch.no_grad():
        linear.weight.copy_(source.weight.t())
        linear.bias.copy_(source.bias)
    return linear


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-46", "quartet2", "mxfp4", "fp8"])
def test_a_conv1d_has_the_bits_of_a_linear_with_its_weight_transposed(recipe):
    conv = Conv1D(48, 32)
    linear = linear_of(conv)
    for layer in (conv, linear):
        assert convert(layer, recipe).rows[0].shape == (48, 32)
    y, dx, dw, db = results(conv)
    expected = results(linear)
    assert_same_bytes(y, expected[0])
    assert_same_bytes(dx, expected[1])
    assert_same_bytes(dw, expected[2].t().contiguous())
    assert_same_bytes(db, expected[3])


def test_a_conv1d_keeps_its_parameters_its_keys_and_its_class_and_is_restored():
    conv, before = Conv1D(48, 32), X.clone()
    plain, parameters, keys = conv(before), list(conv.parameters()), list(conv.state_dict())
    convert(conv, "nvfp4-naive")
    assert isinstance(conv, Conv1D)
    assert not torch.equal(conv(before), plain)
    assert list(conv.state_dict()) == keys
    assert all(p is q for p, q in zip(parameters, conv.parameters(), strict=True))
    convert(conv, "bf16")
    assert type(conv) is Conv1D
    assert_same_bytes(conv(before), plain)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
def test_a_copy_of_a_converted_conv1d_computes_the_same_bits(copied):
    conv = Conv1D(48, 32)
    convert(conv, "nvfp4")
    other = copied(conv)
    for found, expected in zip(results(other), results(conv), strict=True):
        assert_same_bytes(found, expected)
    convert(other, "bf16")
    assert type(other) is Conv1D


def test_a_conv1d_in_a_compiled_model_computes_what_it_does_eagerly():
    conv = Conv1D(48, 32)
    convert(conv, "nvfp4-naive")
    set_step(conv, 0)
    compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
    assert_same_bytes(compiled(X).detach(), conv(X).detach())


def test_a_class_that_computes_as_nn_linear_does_is_converted_and_stays_an_instance_of_it():
    layer = FalconLinear(32, 48)
    plain = nn.Linear(32, 48)
    plain.load_state_dict(layer.state_dict())
    for each in (layer, plain):
        convert(each, "nvfp4")
    assert isinstance(layer, FalconLinear)
    for found, expected in zip(results(layer), results(plain), strict=True):
        assert_same_bytes(found, expected)
    convert(layer, "bf16")
    assert type(layer) is FalconLinear


def test_a_parametrized_linear_is_quantized_and_its_parametrization_trained():
    layer: Any = parametrizations.weight_norm(nn.Linear(32, 48))
    (row,) = convert(layer, "nvfp4").rows
    assert row.quantized
    _, _, *gradients = results(layer)
    assert len(gradients) == 3
    assert all(gradient.any() for gradient in gradients)
    convert(layer, "bf16")
    assert_same_bytes(layer(X), nn.functional.linear(X, layer.weight, layer.bias))


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
def test_a_linear_that_fsdp_has_wrapped_is_converted_and_still_gathered_by_it():
    plain = nn.Linear(32, 48)
    wrapped = copy.deepcopy(plain)
    fully_shard(wrapped)
    for layer in (plain, wrapped):
        assert convert(layer, "nvfp4").rows[0].quantized
    found, expected = results(wrapped), results(plain)
    assert_same_bytes(found[0], expected[0])
    assert_same_bytes(found[2].full_tensor(), expected[2])  # pyright: ignore[reportAttributeAccessIssue]
    convert(wrapped, "bf16")
    assert type(wrapped).__name__ == "FSDPLinear"
    assert torch.allclose(wrapped(X), nn.functional.linear(X, plain.weight, plain.bias))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("first", ["convert", "parallelize_module"])
@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
def test_a_linear_on_a_mesh_of_one_rank_has_the_bits_of_a_plain_one(first, style):
    """Whether or not its features divide into blocks; test_parallelized.py has several ranks."""
    plain = nn.Linear(32, 40)
    model, mesh = nn.Sequential(copy.deepcopy(plain)), init_device_mesh("cpu", (1,))
    convert(plain, "nvfp4")
    if first == "convert":
        convert(model, "nvfp4")
    parallelize_module(model, mesh, {"0": style()})
    if first == "parallelize_module":
        convert(model, "nvfp4")
    for found, expected in zip(results(model), results(plain), strict=True):
        found = found.full_tensor() if isinstance(found, DTensor) else found
        assert_same_bytes(found, expected)


class Counted(nn.Module):
    """A parametrization that counts how often it is computed."""

    calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight * 1.0


def test_a_parametrized_weight_is_computed_once_per_call():
    """One with a state, such as the spectral norm's, would otherwise move twice."""
    layer, counted = nn.Linear(32, 48), Counted()
    parametrize.register_parametrization(layer, "weight", counted)
    convert(layer, "nvfp4")
    before = counted.calls
    layer(X)
    assert counted.calls == before + 1


@pytest.mark.parametrize("hooked", ["before", "after"])
def test_accelerates_hooks_stay_through_a_conversion_and_back(hooked):
    layer, plain = nn.Linear(32, 48), None
    plain = layer(X)
    if hooked == "before":
        add_hook_to_module(layer, ModelHook())
    assert convert(layer, "nvfp4-naive").rows[0].quantized
    if hooked == "after":
        add_hook_to_module(layer, ModelHook())
    quantized = layer(X)
    assert not torch.equal(quantized, plain)
    convert(layer, "bf16")
    assert_same_bytes(layer(X), plain)
    remove_hook_from_module(layer)
    assert_same_bytes(layer(X), plain)
    assert convert(layer, "nvfp4-naive").rows[0].quantized
    assert_same_bytes(layer(X), quantized)
    assert converted_state(layer) is not None
