"""Shards quantized one by one are the bytes of the whole weight, which the layer takes as it arrives."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourbits.linear.convert import convert
from fourbits.linear.packed_shards import PackedShards, own_amaxes, reads_as_bf16, unsupported_packed
from fourbits.linear.step import set_step
from fourbits.linear.weight_source import set_weight_source
from fourbits.model.linear import Linear
from fourbits.quant.quantize import quantize
from fourbits.quant.tensor import QuantizedTensor
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import Recipe
from fourbits.settings import override
from support.assertions import assert_same_bytes
from support.straight_through import grad_of

N, K, M = 256, 80, 64
PACKED = ("nvfp4", "mxfp4", "nvfp4-46", "quartet2", "quartet2-46")


def everywhere(recipe: str, **changes: Any) -> Recipe:
    whole = {"keep_bf16.first_blocks": 0, "keep_bf16.last_blocks": 0, "keep_bf16.names": []}
    return override(get_recipe(recipe), {**whole, **changes})


def layer_of(recipe: Recipe, device: str = "cpu") -> Any:
    torch.manual_seed(5)
    layer = Linear(K, N)
    nn.init.normal_(layer.weight)
    model = nn.Sequential(layer).to(device)
    convert(model, recipe, seed=3)
    set_step(model, 2, 64)
    return model[0]


def gathered(layer: Any, shards: int) -> PackedShards:
    """The weight of a layer after a gather of shards, each quantized with the largest amax."""
    ranks = [PackedShards(layer) for _ in range(shards)]
    parts = layer.weight.detach().chunk(shards)
    amax = own_amaxes(ranks, parts).view(torch.int32).amax().view(torch.float32)
    for rank, part in zip(ranks, parts, strict=True):
        rank.pack(part, amax)
    sent = [rank.sent() for rank in ranks]
    ranks[0].receive(tuple(torch.cat(part) for part in zip(*sent, strict=True)))
    return ranks[0]


def anything(like: Tensor) -> Tensor:
    return torch.full_like(like, torch.nan)


@pytest.mark.parametrize("recipe", PACKED)
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("largest", [1.0, 1e30, 3.4e38, float("inf"), float("nan")])
def test_shards_have_the_bytes_of_the_whole(recipe, shards, largest):
    layer = layer_of(everywhere(recipe))
    with torch.no_grad():
        layer.weight[3, 5] = largest
    assert unsupported_packed(layer, shards) is None
    weight = layer.weight.detach()
    whole = quantize(weight, PackedShards(layer).spec, 1)
    assert_same_operand(gathered(layer, shards)(anything(weight)), whole)


def assert_same_operand(found: QuantizedTensor, whole: QuantizedTensor) -> None:
    for name in ("codes", "block_scale", "global_scale"):
        assert_same_bytes(getattr(found, name).cpu(), getattr(whole, name).cpu(), name)
    assert (found.shape, found.axis, found.spec) == (whole.shape, whole.axis, whole.spec)


@pytest.mark.parametrize(("recipe", "times"), [("nvfp4", 3.9), ("nvfp4-46", 3.9), ("quartet2", 3.55)])
def test_what_is_sent_is_a_quarter_of_bf16_in_blocks_of_16x16_and_more_in_blocks_of_1x16(recipe, times):
    layer = layer_of(everywhere(recipe))
    sent = gathered(layer, 1).sent()
    assert 2 * layer.weight.numel() / sum(part.nbytes for part in sent) >= times


def run(layer: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(Y, dX, dW)."""
    generator, device = torch.Generator().manual_seed(1), layer.weight.device
    x, dy = (torch.randn(M, width, generator=generator).bfloat16().to(device) for width in (K, N))
    leaf = x.requires_grad_()
    y = layer(leaf)
    y.backward(dy)
    return y.detach(), grad_of(leaf), grad_of(layer.weight)


class Counted:
    """A source that counts its calls."""

    def __init__(self, source: PackedShards) -> None:
        self.source, self.calls = source, 0

    def __call__(self, weight: Tensor) -> Any:
        self.calls += 1
        return self.source(weight)


@pytest.mark.parametrize("recipe", PACKED)
def test_a_layer_asks_again_in_the_backward_pass_and_saves_no_weight(recipe):
    expected = run(layer_of(everywhere(recipe)))
    layer = layer_of(everywhere(recipe))
    source = Counted(gathered(layer, 2))
    set_weight_source(layer, source, returns=True)
    layer.weight.data.fill_(torch.nan)
    saved: list[tuple[int, ...]] = []

    def count(x: Tensor) -> Tensor:
        saved.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        found = run(layer)
    for got, wanted in zip(found, expected, strict=True):
        assert_same_bytes(got, wanted)
    assert source.calls == 2
    assert saved.count((N, K)) == 1, "the parameter, whose memory the source has freed"
    assert layer.weight.untyped_storage().size() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", PACKED)
def test_a_gpu_packs_the_bytes_of_a_cpu_and_computes_as_with_its_own_weight(recipe):
    layer, on_cpu = layer_of(everywhere(recipe), "cuda"), layer_of(everywhere(recipe))
    source = gathered(layer, 2)
    assert_same_operand(source(anything(layer.weight)), gathered(on_cpu, 2)(anything(on_cpu.weight)))
    expected = run(layer_of(everywhere(recipe), "cuda"))
    set_weight_source(layer, source, returns=True)
    layer.weight.data.fill_(torch.nan)
    for got, wanted in zip(run(layer), expected, strict=True):
        assert_same_bytes(got, wanted)


@pytest.mark.parametrize(
    ("recipe", "changes", "shards", "reason"),
    [
        ("bf16", {}, 2, "its GEMMs are in BF16"),
        ("nvfp4-naive", {}, 2, "Dgrad quantizes W along the other axis"),
        ("nvfp4-fwd", {}, 2, "Dgrad quantizes W along the other axis"),
        ("nvfp4", {"quantize_eval": False}, 2, "evaluation is not quantized"),
        ("nvfp4", {}, 32, "256 rows do not divide into 32 shards of whole blocks of 16 rows"),
        ("nvfp4", {}, 3, "256 rows do not divide into 3 shards"),
        ("fp8", {}, 2, "packed fp8 has no kernel"),
        ("mxfp8", {}, 2, "packed mxfp8 has no kernel"),
        ("nvfp4", {"fprop.rhs.format": "nvfp4-ue5m3"}, 2, "packed nvfp4-ue5m3 has no kernel"),
    ],
)
def test_a_weight_that_cannot_be_packed_says_why(recipe, changes, shards, reason):
    assert reason in str(unsupported_packed(layer_of(everywhere(recipe, **changes)), shards))


@pytest.mark.parametrize(
    ("recipe", "answer"), [("nvfp4", True), ("bf16", True), ("nvfp4-naive", True), ("nvfp4-fwd", True)]
)
def test_what_reads_a_weight_only_through_bf16_gets_the_same_bits_from_its_rounding(recipe, answer):
    layer = layer_of(everywhere(recipe))
    assert reads_as_bf16(layer) is answer
    expected = run(layer)
    rounded = layer_of(everywhere(recipe))
    rounded.weight.data.copy_(rounded.weight.data.bfloat16())
    for got, wanted in zip(run(rounded), expected, strict=True):
        assert_same_bytes(got, wanted)


def test_a_weight_that_is_quantized_from_fp32_is_not_sent_in_bf16():
    assert not reads_as_bf16(layer_of(everywhere("nvfp4-naive", **{"fprop.rhs.source": "as_is"})))
    assert not reads_as_bf16(nn.Linear(K, N))


def test_a_gather_before_quantizing_is_an_error():
    with pytest.raises(RuntimeError, match="Call pack first"):
        PackedShards(layer_of(everywhere("nvfp4"))).sent()
