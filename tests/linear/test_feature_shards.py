"""A linear layer split by features: a shard's operands are, byte for byte, slices of the whole layer's."""

from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fourbits.linear import plan
from fourbits.linear.amax_reduction import register_amax_reduction
from fourbits.linear.convert import convert
from fourbits.linear.feature_shard import shard_features
from fourbits.linear.native_gemms import with_native_gemms
from fourbits.linear.plan import linear_plan
from fourbits.linear.step import set_step
from fourbits.quant.cpu import compiled
from fourbits.quant.quantize import quantizer
from fourbits.quant.request import OperandInputs, OperandRequest, Signature
from fourbits.quant.tensor import QuantizedTensor
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import GemmTable, LayerRule, Recipe, table_from_text
from fourbits.settings import override
from support.assertions import assert_same_bytes
from support.straight_through import grad_of, linears

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
M, K, N = 32, 64, 128
#: widths for recipes with blocks or transforms of 128
WIDE = {"fp8": (256, 256), "quartet2": (256, 256)}
#: which feature each role's tensor has, by (rows, contraction) of the stored matrix; tokens are not split
FEATURES = {
    "fprop.lhs": ("", "in"),
    "fprop.rhs": ("out", "in"),
    "dgrad.lhs": ("", "out"),
    "dgrad.rhs": ("in", "out"),
    "wgrad.lhs": ("out", ""),
    "wgrad.rhs": ("in", ""),
}
RECIPES = {
    "nvfp4": {},
    "nvfp4-46": {},
    "mxfp4": {},
    "fp8": {},
    "quartet2": {},
    "sr32 and stochastic scales": {
        f"{role}.{key}": value
        for role in FEATURES
        for key, value in (("rounding", "sr32"), ("scale_rounding", "sr"), ("block", (1, 16)))
    },
    "a policy": {f"{role}.{key}": v for role in FEATURES for key, v in (("amax_policy", "delayed"),)},
}
_names = count()


def recipe_of(name: str) -> Recipe:
    whole = {"keep_bf16.first_blocks": 0, "keep_bf16.last_blocks": 0}
    shipped = get_recipe(name if not RECIPES[name] else "nvfp4")
    return override(shipped, {**whole, **RECIPES[name]})


class Ranks:
    """Reduces over two shards that run in turns: each gets what the other one reduced in its last turn."""

    def __init__(self, roles: set[str] | None = None) -> None:
        self.rank, self.step = 0, 0
        self.recorded: dict[Any, Tensor] = {}
        self.name = f"ranks {next(_names)}"
        register_amax_reduction(self.name, self.reduce, roles=roles)

    def reduce(self, bits: Tensor, roles: tuple[str, ...]) -> Tensor:
        self.recorded[self.rank, self.step, roles] = bits
        return torch.maximum(bits, self.recorded.get((1 - self.rank, self.step, roles), bits))

    def reduce_steps(self, x: Tensor, how: str) -> Tensor:
        """For set_step, which reduces the amaxes that policies have recorded."""
        self.recorded[self.rank, self.step, how] = x
        other = self.recorded.get((1 - self.rank, self.step, how), x)
        return torch.maximum(x, other) if how == "max" else x + other


@pytest.fixture
def operands(monkeypatch) -> Iterator[dict[str, QuantizedTensor]]:
    """The packed operands that layers quantize, by role."""
    found: dict[str, QuantizedTensor] = {}
    fields: dict[tuple[int, ...], str] = {plan.KEY_FIELDS[role]: role for role in FEATURES}

    def recording(signature: Signature, requests: tuple[OperandRequest, ...]):
        plain = quantizer(signature, requests)
        packed = [quantizer(signature, (request._replace(packed=True),)) for request in requests]

        def quantize(x: Tensor, inputs: tuple[OperandInputs, ...], stats):
            for request, pack, given in zip(requests, packed, inputs, strict=True):
                made = pack(x, (given,), None)[0]
                assert isinstance(made, QuantizedTensor)
                found[fields[request.key_fields]] = made
            return plain(x, inputs, stats)

        return quantize

    monkeypatch.setattr(compiled, "COMPILE_FROM", 1 << 40)  # compiling would take longer than the tests
    monkeypatch.setattr(plan, "quantizer", recording)
    linear_plan.cache_clear()
    yield found
    linear_plan.cache_clear()


class Split(NamedTuple):
    """What one rank holds: which half of which features; None for all."""

    kind: str
    half: int

    def of(self, x: Tensor, dim: int) -> Tensor:
        return x.chunk(2, dim)[self.half]


def layer_of(recipe: Recipe, split: Split | None, ranks: Ranks | None) -> nn.Linear:
    torch.manual_seed(5)
    whole = nn.Linear(*WIDE.get(recipe.name, (K, N)), bias=False)
    in_features, out_features = whole.in_features, whole.out_features
    if split is not None:
        weight = split.of(whole.weight.detach(), 0 if split.kind == "out" else 1)
        whole = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        whole.weight = nn.Parameter(weight.clone())
    model = nn.Sequential(whole)
    convert(model, recipe, seed=3)
    layer = linears(model)[0]
    if split is not None and ranks is not None:
        half = split.half * {"in": in_features, "out": out_features}[split.kind] // 2
        first_in, first_out = (half, 0) if split.kind == "in" else (0, half)
        shard_features(layer, first_in, first_out, ranks.name)
    return layer


def run(layer: Any, split: Split | None, ranks: Ranks | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(Y, dX, dW) of a step, the second one where policies use the amaxes of the first.

    The largest entries of X and dY are in the second shard.
    """
    out: tuple[Tensor, Tensor, Tensor] | None = None
    weight = next(iter(layer.parameters()))
    widths = [
        (2 if split is not None and split.kind == kind else 1) * weight.shape[dim]
        for kind, dim in (("in", 1), ("out", 0))
    ]
    for step in (2, 3) if layer.quantization.recipe_state is not None else (3,):
        set_step(layer, step, 64, reduce=None if ranks is None else ranks.reduce_steps)
        if ranks is not None:
            ranks.step = step
        generator = torch.Generator().manual_seed(step)
        x, dy = (torch.randn(M, width, generator=generator) for width in widths)
        x[3, -1], dy[7, -2] = 11.0, 13.0
        if split is not None and split.kind == "in":
            x = split.of(x, 1)
        if split is not None and split.kind == "out":
            dy = split.of(dy, 1)
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(dy)
        out = (y.detach(), grad_of(leaf), grad_of(weight).clone())
    assert out is not None
    return out


def assert_slice(part: QuantizedTensor, whole: QuantizedTensor, role: str, split: Split) -> None:
    """Codes and block scales are those of the slice; the FP32 scale is the whole tensor's."""
    for name in ("codes", "block_scale", "global_scale"):
        expected = getattr(whole, name)
        for dim, features in enumerate(FEATURES[role]):
            if expected.dim() and features == split.kind:
                expected = split.of(expected, dim)
        assert_same_bytes(getattr(part, name), expected, f"{role} {name} of {split}")


@pytest.mark.parametrize("kind", ["in", "out"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_shards_operands_are_slices_of_the_whole_layers(name, kind, operands):
    """Rounding to nearest and stochastic, in all three GEMMs."""
    assert_slices_of_the_whole(recipe_of(name), kind, Ranks(), operands)


@pytest.mark.parametrize("kind", ["in", "out"])
@pytest.mark.parametrize("name", ["nvfp4", "quartet2"])
def test_tensors_that_are_not_in_parts_need_no_reduction(name, kind, operands):
    roles = {role for role, features in FEATURES.items() if kind in features}
    ranks = Ranks(roles)
    assert_slices_of_the_whole(recipe_of(name), kind, ranks, operands)
    asked = {role for _, _, found in ranks.recorded for role in found if isinstance(found, tuple)}
    assert asked
    assert asked <= roles


def assert_slices_of_the_whole(
    recipe: Recipe, kind: str, ranks: Ranks, operands: dict[str, QuantizedTensor]
) -> None:
    run(layer_of(recipe, None, None), None)
    whole = dict(operands)
    assert set(whole) >= {"fprop.lhs", "fprop.rhs", "dgrad.lhs", "wgrad.lhs", "wgrad.rhs"}
    turns = 3 if recipe.name == "quartet2" else 2  # the third: amaxes of re-quantized operands
    for turn in range(turns):
        for half in (0, 1):
            ranks.rank, split = half, Split(kind, half)
            operands.clear()
            run(layer_of(recipe, split, ranks), split, ranks)
            if turn == turns - 1:
                assert set(operands) == set(whole)
                for role, part in operands.items():
                    assert_slice(part, whole[role], role, split)


@pytest.mark.parametrize("kind", ["in", "out"])
def test_without_reduction_and_offsets_all_operands_with_split_features_would_differ(kind, operands):
    recipe = recipe_of("sr32 and stochastic scales")
    run(layer_of(recipe, None, None), None)
    whole, split = dict(operands), Split(kind, 1)
    run(layer_of(recipe, split, None), split)
    for role in (role for role, features in FEATURES.items() if kind in features):
        with pytest.raises(AssertionError):
            assert_slice(operands[role], whole[role], role, split)


def test_a_compiled_shard_gives_the_bytes_of_an_eager_one():
    ranks, split = Ranks(), Split("out", 1)
    layer = layer_of(recipe_of("nvfp4"), split, ranks)
    expected = run(layer, split)
    traced = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for actual, wanted in zip(run(traced, split), expected, strict=True):
        assert_same_bytes(actual, wanted)


def test_a_nan_in_one_shard_poisons_the_scale_of_all():
    """The order of amaxes as integers puts NaN above all numbers."""
    split, seen = Split("in", 0), dict[tuple[str, ...], int]()

    def reduce(bits: Tensor, roles: tuple[str, ...]) -> Tensor:
        seen[roles] = int(bits[0])
        return torch.maximum(
            bits, torch.full_like(bits, 0x7F7FFFFF)
        )  # the other shard has the largest number

    register_amax_reduction("with the largest number", reduce)
    layer = layer_of(recipe_of("nvfp4"), split, None)
    shard_features(layer, amax_reduction="with the largest number")
    x = torch.ones(M, K // 2)
    x[0, 0] = -torch.tensor(torch.nan)
    assert layer(x).isnan().all()
    assert seen["fprop.lhs",] > 0x7F800000


def shard_of(name: str = "nvfp4", **changes: Any) -> None:
    layer = layer_of(override(recipe_of(name), changes), None, None)
    shard_features(layer, first_out=64, amax_reduction=Ranks().name)


def of_native_layer() -> None:
    layer: Any = layer_of(recipe_of("nvfp4"), None, None)
    layer.quantization.table = with_native_gemms(table_from_text(layer.quantization.table)).to_text()
    shard_features(layer, first_in=16, amax_reduction=Ranks().name)


def returns_another_dtype() -> None:
    name = f"floats {next(_names)}"
    register_amax_reduction(name, lambda bits, roles: bits.float())
    layer = layer_of(recipe_of("nvfp4"), None, None)
    shard_features(layer, amax_reduction=name)
    layer(torch.ones(M, K))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: shard_features(layer_of(recipe_of("nvfp4"), None, None), first_in=8), "multiple of 16"),
        (lambda: shard_features(layer_of(recipe_of("nvfp4"), None, None), first_out=-16), "16 from 0 on"),
        (
            lambda: shard_features(layer_of(recipe_of("nvfp4"), None, None), first_out=16.0),  # pyright: ignore
            "first_out must be an int, got 16.0",
        ),
        (lambda: shard_features(layer_of(recipe_of("fp8"), None, None), first_out=64), "multiple of 128"),
        (
            lambda: shard_features(layer_of(recipe_of("quartet2"), None, None), first_out=64),
            "multiple of 128",
        ),
        (
            lambda: shard_features(layer_of(recipe_of("nvfp4"), None, None), first_in=16),
            "a registered amax_red",
        ),
        (
            lambda: shard_features(layer_of(recipe_of("nvfp4"), None, None), amax_reduction="sum"),
            "no reduction is called 'sum'",
        ),
        (lambda: shard_of(**{"fprop.lhs.adaptive": "outer"}), "follow the statistics of one shard"),
        (of_native_layer, "FP4 tensor cores do not support shards"),
        (returns_another_dtype, r"must return int32 \[1\]"),
        (lambda: shard_features(nn.Linear(16, 16)), "layer must be a converted linear layer"),
        (lambda: register_amax_reduction("", lambda bits, roles: bits), "must not be empty"),
        (
            lambda: [register_amax_reduction("twice", lambda b, roles: b) for _ in range(2)],
            "registered already",
        ),
        (
            lambda: LayerRule(names=("a",), table=GemmTable(amax_reduction="x")),
            "a recipe does not shard layers",
        ),
    ],
)
def test_a_wrong_use_is_an_error(use, message):
    with pytest.raises(ValueError, match=message):
        use()
