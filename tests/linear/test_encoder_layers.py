"""nn.TransformerEncoderLayer: its two linear layers run quantized in training and in evaluation alike."""

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fourbits as fb
from support.assertions import assert_same_bytes

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
RECIPE = "nvfp4-naive"
LAYERS = {f"layers.{i}.linear{j}" for i in range(2) for j in (1, 2)}
#: the second row is padded from its fifth token on
PADDED = torch.arange(8)[None] >= torch.tensor([8, 5])[:, None]


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def x() -> Tensor:
    return torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1))


def evaluated(model: nn.Module, mask: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return model.eval()(x(), src_key_padding_mask=mask)


def by_hand(model: Any, mask: Tensor | None = None) -> Tensor:
    """What the encoder computes, with each of its modules called."""
    y = x()
    with torch.no_grad():
        for layer in model.eval().layers:
            attended, _ = layer.self_attn(y, y, y, key_padding_mask=canonical(mask), need_weights=False)
            y = layer.norm1(y + attended)
            y = layer.norm2(y + layer.linear2(layer.linear1(y).relu()))
    return y


def canonical(mask: Tensor | None) -> Tensor | None:
    """The mask as the encoder passes it on."""
    return None if mask is None else torch.zeros(mask.shape).masked_fill_(mask, -torch.inf)


def converted(recipe: str | fb.Recipe = RECIPE, **choice: Any) -> nn.TransformerEncoder:
    model = encoder()
    fb.convert(model, recipe, **choice)
    fb.set_step(model, 0)
    return model


def test_a_training_step_calls_what_the_summary_claims():
    model = encoder()
    summary = fb.convert(model, RECIPE)
    assert {row.name for row in summary.rows if row.quantized} == LAYERS
    kept = {row.reason for row in summary.rows if not row.quantized}
    assert kept == {"a fused kernel of MultiheadAttention reads this weight directly"}
    fb.set_step(model, 0)
    model(x()).square().mean().backward()
    report = fb.audit(model)
    assert (set(report.called), report.bypassed, report.unused) == (LAYERS, (), ())


def test_the_layers_compute_the_bits_of_linear_layers_called_by_hand():
    layer: Any = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    fb.convert(layer, RECIPE)
    fb.set_step(layer, 0)
    for mode in (True, False):
        layer.train(mode)
        y = layer.norm1(x() + layer.self_attn(x(), x(), x(), need_weights=False)[0])
        by_hand = layer.norm2(y + layer.linear2(layer.linear1(y).relu()))
        fb.set_step(layer, 0)
        assert_same_bytes(layer(x()).detach(), by_hand.detach())


@pytest.mark.parametrize("mask", [None, PADDED], ids=["whole", "padded"])
def test_evaluation_does_not_take_the_fused_kernel(mask):
    """The kernel would compute in high precision, and PyTorch packs padded batches for it."""
    model = converted()
    y = evaluated(model, mask)
    assert_same_bytes(y, by_hand(converted(), mask))
    fast = evaluated(encoder(), mask)
    rows = ~PADDED if mask is not None else torch.ones(2, 8, dtype=torch.bool)
    assert (y - fast)[rows].abs().max() > 1e-3  # NVFP4's error, far above that of another order of sums
    if mask is not None:
        assert encoder().eval().use_nested_tensor  # that is what is switched off


@pytest.mark.parametrize("mask", [None, PADDED], ids=["whole", "padded"])
def test_an_unquantized_evaluation_is_that_of_the_plain_model(mask):
    recipe = replace(fb.get_recipe(RECIPE), quantize_eval=False)
    assert_same_bytes(evaluated(converted(recipe), mask), by_hand(encoder(), mask))


def test_bf16_switches_the_fused_kernel_on_again():
    model = converted()
    fb.convert(model, RECIPE)  # twice, so that the second must not take the first for the original
    assert [layer.activation_relu_or_gelu for layer in model.layers] == [0, 0]
    fb.convert(model, "bf16")
    plain = encoder()
    assert [layer.activation_relu_or_gelu for layer in model.layers] == [1, 1]
    assert_same_bytes(evaluated(model, PADDED), evaluated(plain, PADDED))
    assert [vars(a).keys() for a in model.layers] == [vars(a).keys() for a in plain.layers]


def test_layers_that_stay_in_bf16_keep_the_fused_kernel_and_copies_the_setting():
    model = converted(keep_first=1)
    assert [layer.activation_relu_or_gelu for layer in model.layers] == [1, 0]
    expected = evaluated(model, PADDED)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bytes(evaluated(other, PADDED), expected)
