"""Exported codes are those of the training forward: layers fed with unit vectors return them."""

import pytest
import torch

from fourbits.exchange import outgoing
from fourbits.exchange.nvfp4_checkpoints import PackedWeight
from fourbits.linear.stacked.layer import converted_layers
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantize
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import GemmSpec, GemmTable
from fourbits.train.forward_weights import (
    ForwardWeight,
    forward_weights,
    packed_weight,
    unsupported_inputs,
    unsupported_nvfp4,
)
from fourbits.train.load_run import open_trained
from support.small_runs import HYBRID, trained

HISTORY = "{base: nvfp4, fprop: {rhs: {amax_policy: history, amax_headroom: 1.5}}}"


def weight(**spec) -> ForwardWeight:
    return ForwardWeight(GemmTable(fprop=GemmSpec(rhs=OperandSpec(**spec))))


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-46", "quartet2", "quartet2-46", "nvfp4-naive", HISTORY])
def test_a_layer_fed_with_unit_vectors_returns_the_exported_weight(recipe, tmp_path):
    """X = 1 is exact in NVFP4, so Y is W's operand, rounded to BF16 after a product of the FP32 scales."""
    stored = open_trained(trained(tmp_path, recipe, pattern="M-*-", family=HYBRID, width=32))
    model = stored.converted("cpu")
    weights = forward_weights(stored.converted("meta"))
    layers = dict(converted_layers(model.named_modules()))
    assert {f"{name}.weight" for name in layers} == set(weights)
    for name, layer in layers.items():
        packed = packed_weight(weights[f"{name}.weight"], stored.masters[f"{name}.weight"])
        with torch.no_grad():
            returned = layer(torch.eye(layer.in_features, dtype=torch.bfloat16)).t().float()
        exported = packed.dequantize()
        assert (returned - exported).abs().le(2**-7 * exported.abs()).all(), name
        assert exported.count_nonzero() > exported.numel() // 2
    assert (recipe == HISTORY) == any(found.amax is not None for found in weights.values())


@pytest.mark.parametrize("block", [(1, 16), (16, 16), (4, 16)])
@pytest.mark.parametrize("rule", ["max", "4over6-mse"])
def test_a_weight_quantized_in_parts_has_the_bytes_of_the_whole(block, rule, monkeypatch):
    monkeypatch.setattr(outgoing, "SLAB", 64 * 32)
    master = torch.randn(64 + 40, 32)
    master[-1, -1] = 9.0  # its amax is in the last part
    found = weight(block=block, scale_rule=rule, source="bf16")
    assert len(list(found.quantized(master))) == 2
    packed, whole = packed_weight(found, master), quantize(master, found.spec)
    assert torch.equal(packed.codes, whole.codes)
    assert torch.equal(packed.global_scale, whole.global_scale)
    each = whole.block_scale.view(torch.uint8).repeat_interleave(block[0], 0)[: len(master)]
    assert torch.equal(packed.block_scale.view(torch.uint8), each)
    assert torch.equal(packed.dequantize(), whole.dequantize(torch.float32))


def test_values_decode_in_the_order_of_the_specification():
    """Code 7 is 6, code 9 is -0.5; the low nibble comes first. 6 * 0.1 and 0.5 * 0.1, in FP32."""
    codes = torch.full((1, 8), 0x97, dtype=torch.uint8)
    scale = torch.full((1, 1), 2.0).to(torch.float8_e4m3fn)
    found = PackedWeight(codes, scale, torch.tensor(0.05)).dequantize()
    pair = torch.tensor([12.0, -1.0]) * torch.tensor(0.05)
    assert torch.equal(found, pair.repeat(8)[None])


@pytest.mark.parametrize(
    ("spec", "columns", "reason"),
    [
        ({"format": "mxfp4"}, 32, "its weight is mxfp4"),
        ({"format": "nvfp4-double"}, 32, "its weight is nvfp4-double"),
        ({"rht": 16}, 32, "its weight is transformed (fprop.rhs.rht=16)"),
        ({"rounding": "sr"}, 32, "its weight is rounded stochastically, so every step has other codes"),
        ({"block": (1, 32)}, 32, "its blocks are 1x32, not 1x16 or 16x16"),
        ({"block": (32, 16)}, 32, "its blocks are 32x16, not 1x16 or 16x16"),
        ({}, 24, "its in_features, 24, are not a multiple of 16"),
        ({"block": (16, 16)}, 32, None),
    ],
    ids=str,
)
def test_a_weight_that_the_formats_cannot_hold_has_a_reason(spec, columns, reason):
    assert unsupported_nvfp4(OperandSpec(**spec), columns) == reason


def test_inputs_that_servers_cannot_quantize_have_a_reason():
    assert unsupported_inputs({"a.weight": ForwardWeight(get_recipe("nvfp4").table)}) is None
    assert unsupported_inputs({"a.weight": weight()}) == "the input of a is bf16 None in training"
