"""Inputs saved as codes and scales: the same gradients, and an eighth over a quarter of BF16's bytes."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fourbits import convert, get_recipe, set_step
from fourbits.quant.quantize import exact_operand
from fourbits.recipe.recipe import KeepBF16, Recipe

PACKABLE = ("nvfp4", "mxfp4", "nvfp4-naive", "mxfp8")


def packed(name: str, saved="packed") -> Recipe:
    return replace(get_recipe(name), saved_inputs=saved, keep_bf16=KeepBF16(names=()))


def trained(recipe, x, compiled=False):
    """Gradients of a linear, and the bytes that its call saved besides its weight."""
    torch.manual_seed(1)
    layer = nn.Sequential(nn.Linear(x.shape[1], 96))
    convert(layer, recipe)
    set_step(layer, 2, first_token=32)
    x = x.clone().requires_grad_()
    saved = []
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = run(x)
    y.float().square().sum().backward()
    grads = [leaf.grad for leaf in (x, *layer.parameters())]
    return [grad for grad in grads if grad is not None], saved


@pytest.mark.parametrize("name", PACKABLE)
@pytest.mark.parametrize("shape", [(64, 48), (37, 50)], ids=str)
def test_packed_inputs_give_the_same_gradients(name, shape):
    x = torch.randn(shape)
    (found, _), (wanted, _) = trained(packed(name), x), trained(packed(name, "exact"), x)
    assert len(found) == 3
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_packed_inputs_take_four_and_a_half_bits_an_element():
    x = torch.randn(512, 256).to(torch.bfloat16)
    _, saved = trained(packed("nvfp4"), x)
    rows = {tuple(t.shape): t.dtype for t in saved}
    assert (512, 256) not in rows
    assert rows[256, 256] == torch.uint8
    assert rows[256, 32] == torch.float8_e4m3fn
    assert (256 * 256 + 256 * 32) / (512 * 256 * 2) <= 0.29


def test_packed_inputs_pass_through_a_compiled_graph():
    x = torch.randn(64, 48)
    (found, _), (wanted, _) = trained(packed("nvfp4"), x, compiled=True), trained(packed("nvfp4"), x)
    assert len(found) == 3
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("name", "reason"), [("bf16", "bf16 does not store codes"), ("fp8", "fp8 does not store codes")]
)
def test_a_recipe_without_codes_to_save_is_refused(name, reason):
    with pytest.raises(ValueError, match=f"saved_inputs: packed needs a wgrad.rhs with codes; {reason}"):
        _ = packed(name).table


def test_saving_packed_decides_no_bits():
    assert packed("nvfp4").digest == packed("nvfp4", "exact").digest


@pytest.mark.parametrize("compiled", [False, True])
def test_where_wgrad_requantizes_x_fprops_operand_is_saved_in_its_place(compiled):
    x = torch.randn(64, 48).to(torch.bfloat16)
    recipe = replace(get_recipe("quartet2-46"), keep_bf16=KeepBF16(names=()))
    _, saved = trained(recipe, x, compiled)
    of_x = [t for t in saved if t.shape == x.shape]
    operand = exact_operand(x, recipe.table.fprop.lhs)
    assert len(of_x) == 1
    assert torch.equal(of_x[0], operand.values)
