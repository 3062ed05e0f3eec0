"""Training on FP4 tensor cores, without a GPU: a model of them reads what the linears hand over."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fourbits import OperandSpec, convert, get_recipe, set_step
from fourbits.device import Backend, probe
from fourbits.linear import convert as conversion
from fourbits.linear.native_gemms import with_native_gemms
from fourbits.recipe.recipe import GemmSpec, KeepBF16, LayerRule
from fourbits.train import backend
from support.native_model import model_of_scaled_mm

BLACKWELL = replace(probe("cpu"), kind="cuda", name="NVIDIA B200", capability=(10, 0), triton_version="3.6.0")


@pytest.fixture
def products(monkeypatch):
    """A GPU that passes its check; gives the shapes it multiplies."""
    found = []

    def scaled_mm(a, b, *args, **kwargs):
        out = model_of_scaled_mm(a, b, *args, **kwargs)
        found.append(tuple(out.shape))
        return out

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    monkeypatch.setattr(conversion, "require_native", lambda: None)
    return found


def everywhere(name, **changes):
    return replace(get_recipe(name), keep_bf16=KeepBF16(names=()), **changes)


def trained(recipe, x, native, compiled=False) -> list[Any]:
    """Output and gradients of a linear with bias, 48 -> 80 features."""
    torch.manual_seed(1)
    layer = nn.Sequential(nn.Linear(x.shape[1], 80))
    convert(layer, recipe, backend="native" if native else "emulated")
    set_step(layer, 2, first_token=32)
    x = x.clone().requires_grad_()
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    y = run(x)
    y.float().sin().sum().backward()
    return [y, x.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-naive", "nvfp4-46", "quartet2"])
@pytest.mark.parametrize("tokens", [64, 37])
def test_all_three_products_get_the_operands_of_the_emulation(name, tokens, products):
    x = torch.randn(tokens, 48)
    native = trained(everywhere(name), x, native=True)
    assert len(products) == 3
    for one, other in zip(native, trained(everywhere(name), x, native=False), strict=True):
        # FP32 sums of at most 128 products in another order; 8 is more than any sum of magnitudes here
        assert (one - other).abs().max() <= 128 * 2.0**-23 * 8
    assert len(products) == 3


def test_packed_inputs_are_multiplied_as_they_were_saved(products):
    x = torch.randn(64, 48)
    packed = trained(everywhere("nvfp4", saved_inputs="packed"), x, native=True)
    for one, other in zip(packed, trained(everywhere("nvfp4"), x, native=True), strict=True):
        assert torch.equal(one, other)
    assert len(products) == 6


def test_a_compiled_graph_multiplies_natively_too(products):
    x = torch.randn(64, 48)
    compiled = trained(everywhere("nvfp4"), x, native=True, compiled=True)
    for one, other in zip(compiled, trained(everywhere("nvfp4"), x, native=True), strict=True):
        assert torch.equal(one, other)
    assert len(products) == 6


def test_products_that_tensor_cores_cannot_run_are_emulated_and_named(products):
    fp8 = OperandSpec(format="fp8")
    recipe = everywhere("nvfp4", wgrad=GemmSpec(lhs=fp8, rhs=fp8))
    model = nn.Sequential(nn.Linear(48, 80))
    (row,) = convert(model, recipe, backend="native").rows
    assert row.reason == "recipe nvfp4; emulated: wgrad: fp8"
    x = torch.randn(64, 48)
    native, emulated = (trained(recipe, x, native=native) for native in (True, False))
    assert len(products) == 2
    assert torch.equal(native[2], emulated[2])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"amax_policy": "delayed"}, "amax_policy delayed"),
        ({"adaptive": "outer"}, "adaptive outer"),
        ({"block": (16, 32)}, "blocks of (16, 32)"),
    ],
)
def test_operands_that_depend_on_the_past_or_have_other_blocks_are_emulated(changes, reason, products):
    fprop = get_recipe("nvfp4").table.fprop
    recipe = everywhere("nvfp4", fprop=replace(fprop, lhs=replace(fprop.lhs, **changes)))
    (row,) = convert(nn.Sequential(nn.Linear(48, 80)), recipe, backend="native").rows
    assert row.reason == f"recipe nvfp4; emulated: fprop: {reason}"
    x = torch.randn(64, 48)
    assert torch.equal(*(trained(recipe, x, native=native)[0] for native in (True, False)))
    assert len(products) == 2


def test_linears_that_read_one_tensor_share_no_operand_that_one_of_them_cannot_multiply(products):
    """A weight with an amax policy sends its own layer's Fprop to the emulation, not its neighbour's."""
    table = get_recipe("nvfp4").table
    late = replace(table.fprop, rhs=replace(table.fprop.rhs, amax_policy="delayed"))
    rule = LayerRule(names=("1",), table=replace(table, fprop=late))
    recipe = everywhere("nvfp4", layers=(rule,))
    model = nn.ModuleList([nn.Linear(48, 80), nn.Linear(48, 64)])
    convert(model, recipe, backend="native")
    set_step(model, 0)
    x = torch.randn(64, 48, requires_grad=True) * 2  # of an autograd graph, so that its operands are shared
    torch.stack([layer(x).sum() for layer in model]).sum().backward()
    fprop_of_one, dgrad, wgrad = [(64, 80)], [(64, 48)] * 2, [(80, 48), (64, 48)]
    assert sorted(products) == sorted(fprop_of_one + dgrad + wgrad)


def test_a_recipe_cannot_choose_the_gemm_backend():
    table = get_recipe("nvfp4").table
    with pytest.raises(ValueError, match="a recipe cannot choose the GEMM backend"):
        LayerRule(names=("*",), table=with_native_gemms(table))


def test_native_is_refused_without_tensor_cores():
    with pytest.raises(ValueError, match="backend native: FP4 tensor cores need NVIDIA sm_100 or newer"):
        convert(nn.Sequential(nn.Linear(16, 16)), "nvfp4", backend="native")


def test_native_is_refused_where_the_self_check_fails(monkeypatch):
    monkeypatch.setattr(conversion, "probe", lambda: BLACKWELL)
    monkeypatch.setattr(conversion, "unsupported_arithmetic", lambda device: "dgrad: GEMM (all zero)")
    with pytest.raises(ValueError, match=r"the self-check failed on NVIDIA B200: dgrad: GEMM \(all zero"):
        convert(nn.Sequential(nn.Linear(16, 16)), "nvfp4", backend="native")


@pytest.mark.parametrize(
    ("requested", "wrong", "chosen", "words"),
    [
        ("auto", None, Backend.NATIVE, "the self-check passed"),
        ("native", None, Backend.NATIVE, "as requested; the self-check passed"),
        ("auto", "fprop: bytes", Backend.EMULATED, "have not passed the self-check: fprop: bytes"),
        ("emulated", None, Backend.EMULATED, "as requested"),
    ],
)
def test_a_run_trains_natively_where_the_check_passes(monkeypatch, requested, wrong, chosen, words):
    for module in (backend, conversion):
        monkeypatch.setattr(module, "unsupported_arithmetic", lambda device: wrong)
    found, reason = backend.resolve_backend(requested, BLACKWELL)
    assert found is chosen
    assert words in reason


def test_a_run_that_requests_native_stops_where_the_check_fails(monkeypatch):
    monkeypatch.setattr(conversion, "unsupported_arithmetic", lambda device: "wgrad: GEMM (all zero)")
    with pytest.raises(ValueError, match="backend native: the self-check failed on NVIDIA B200: wgrad"):
        backend.resolve_backend("native", BLACKWELL)
    with pytest.raises(ValueError, match="FP4 tensor cores need NVIDIA sm_100"):
        backend.resolve_backend("native", probe("cpu"))
