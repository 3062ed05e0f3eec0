"""A caller chooses layers by name, by function and by size; a name that means nothing is an error."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fourbits.linear.convert import convert
from fourbits.linear.summary import ConversionSummary
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import GemmTable, KeepBF16, LayerRule


def model() -> nn.Module:
    def block() -> nn.ModuleDict:
        return nn.ModuleDict({"attn": nn.ModuleDict({"qkv": nn.Linear(32, 96)}), "mlp": nn.Linear(32, 32)})

    body = nn.ModuleList([block() for _ in range(4)])
    return nn.ModuleDict({"embed": nn.Embedding(64, 32), "blocks": body, "head": nn.Linear(32, 64)})


def convert_with(chosen: nn.Module, options: dict[str, Any]) -> ConversionSummary:
    return convert(chosen, "nvfp4", **options)


def quantized(summary: ConversionSummary) -> set[str]:
    return {row.name for row in summary.rows if row.quantized}


def reason(summary: ConversionSummary, name: str) -> str:
    return next(row.reason for row in summary.rows if row.name == name)


QKV = {f"blocks.{i}.attn.qkv" for i in range(3)}
INNER = {f"blocks.{i}.{name}" for i in range(3) for name in ("attn.qkv", "mlp")}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, INNER),
        ({"include": "*.mlp"}, {f"blocks.{i}.mlp" for i in range(3)}),
        ({"include": ["blocks.1"]}, {"blocks.1.attn.qkv", "blocks.1.mlp"}),  # the modules inside are meant
        ({"exclude": ["*.attn", "blocks.0"]}, {"blocks.1.mlp", "blocks.2.mlp"}),
        ({"filter_fn": lambda module, name: module.out_features > 64}, QKV),
        ({"min_size": 32 * 96}, QKV),
        ({"keep_last": 0}, INNER | {"blocks.3.attn.qkv", "blocks.3.mlp"}),
        ({"keep_first": "1/2", "keep_last": 1}, {"blocks.2.attn.qkv", "blocks.2.mlp"}),
        ({"include": ["*.mlp", "head"]}, {f"blocks.{i}.mlp" for i in range(3)} | {"head"}),
    ],
    ids=lambda value: " and ".join(value) or "none" if isinstance(value, dict) else "",
)  # fmt: skip
def test_the_options_choose_these_layers(options, expected):
    assert quantized(convert(model(), "nvfp4", **options)) == expected


def test_a_choice_is_reported_as_the_callers_and_not_as_the_recipes():
    summary = convert(model(), "nvfp4", exclude="*.mlp", min_size=100)
    assert reason(summary, "blocks.0.mlp") == "excluded by '*.mlp'"
    assert reason(convert(model(), "nvfp4", include="*.mlp"), "blocks.0.attn.qkv") == "not in include"
    recipe = replace(get_recipe("nvfp4"), keep_bf16=KeepBF16(names=("*.qkv",)))
    assert reason(convert(model(), recipe), "blocks.0.attn.qkv") == "keep_bf16.names has '*.qkv'"


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_names_the_nearest_module(option):
    with pytest.raises(
        ValueError, match=rf"convert: {option} must match .* '\*\.qvk', .* nearest is .*attn\.qkv'"
    ):
        convert_with(model(), {option: ["*.qvk"]})
    converted = model()
    with pytest.raises(ValueError, match="which matches none"):
        convert_with(converted, {option: "decoder"})
    assert not any(hasattr(module, "quantization") for module in converted.modules())


def test_a_pattern_of_a_users_recipe_that_matches_nothing_is_an_error_too():
    base = get_recipe("nvfp4")
    for recipe in (
        replace(base, keep_bf16=KeepBF16(names=("*.q_proj_typo",))),
        replace(base, layers=(LayerRule(names=("*.q_proj_typo",), table=GemmTable()),)),
    ):
        with pytest.raises(
            ValueError, match=r"recipe nvfp4: .*names must match a linear layer .*q_proj_typo"
        ):
            convert(model(), recipe)


def test_a_shipped_rule_that_matches_nothing_is_a_line_and_kept_attention_that_is_missing_a_warning():
    with pytest.warns(
        UserWarning, match=r"keeps layers in BF16 \(attention projection\) that this model does not"
    ):
        summary = convert(model(), "nemotron3-super")
    assert any("Mamba output projection" in note for note in summary.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": lambda name: True}, "Pass a function as filter_fn"),
        ({"min_size": -1}, "min_size must be a number of weights"),
        ({"keep_first": "many"}, "must be a count or a share"),
    ],
)
def test_an_option_of_another_kind_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        convert(model(), "nvfp4", **options)


def test_a_pattern_may_name_the_weight_of_a_layer():
    rows = {row.name: row for row in convert(model(), "nvfp4", exclude="*.qkv.weight").rows}
    assert {name for name, row in rows.items() if row.reason.startswith("excluded")} == {
        name for name in rows if name.endswith(".qkv")
    }
    only = convert(model(), "nvfp4", include="blocks.0.mlp.weight")
    assert [row.name for row in only.rows if row.quantized] == ["blocks.0.mlp"]


def test_blocks_are_not_kept_where_no_stack_is_known():
    with pytest.raises(ValueError, match=r"keep_last=1 needs a stack of blocks.*stacks="):
        convert(nn.Linear(32, 32), "nvfp4", keep_first=0, keep_last=1)
    with pytest.raises(ValueError, match="keep_first='1/4' needs a stack"):
        convert(model(), "nvfp4", stacks=[], keep_first="1/4")


@pytest.mark.parametrize("given", [None, [], [nn.Linear(16, 16), "model"]])
def test_what_is_no_model_is_refused(given):
    with pytest.raises(ValueError, match=r"model must be an nn\.Module or a list of them"):
        convert(given, "nvfp4")  # pyright: ignore[reportArgumentType]


def test_parts_that_contain_each_other_are_refused():
    part = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    for parts in ([part, part], [part, part[0]]):
        with pytest.raises(ValueError, match="must not contain each other or share modules"):
            convert(parts, "nvfp4")


@pytest.mark.parametrize("count", [0.25, 1.5, True])
def test_a_number_of_blocks_is_whole_or_a_share_in_text(count):
    with pytest.raises(ValueError, match="must be a count or a share such as '8/62'"):
        convert(nn.Sequential(nn.Linear(32, 32)), "nvfp4", keep_last=count)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv = nn.Embedding(64, 32), nn.Conv1d(32, 32, 3)
        self.mlp = nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)})
        self.experts = Experts()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(2, 32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, self.up_proj)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("mlp.up.weight", {"mlp.up"}),  # as named_parameters and PEFT write it
        ("mlp.*.weight", {"mlp.up", "mlp.down"}),
        ("*.weight", {"mlp.up", "mlp.down", "experts.up_proj"}),
        ("experts.up_proj", {"experts.up_proj"}),
    ],
)
@pytest.mark.filterwarnings("ignore:fourbits. no output head was found")
@pytest.mark.filterwarnings("ignore:fourbits. convert quantized nothing")
def test_a_pattern_may_name_a_layers_weight(pattern, expected):
    every = {"mlp.up", "mlp.down", "experts.up_proj"}
    assert quantized(convert(Mixed(), "nvfp4", include=pattern)) == expected
    assert quantized(convert(Mixed(), "nvfp4", exclude=pattern)) == every - expected


@pytest.mark.filterwarnings("ignore:fourbits. no output head was found")
@pytest.mark.parametrize(
    ("pattern", "what"),
    [("conv.weight", "convolution"), ("conv", "convolution"), ("embed.weight", "embedding table")],
)
def test_what_stays_in_bf16_may_be_excluded_and_not_included(pattern, what):
    assert quantized(convert(Mixed(), "nvfp4", exclude=pattern)) == {"mlp.up", "mlp.down", "experts.up_proj"}
    name = f"{pattern.partition('.')[0]}.weight"
    with pytest.raises(ValueError, match=rf"include must .* got '{pattern}', which matches '{name}': {what}"):
        convert(Mixed(), "nvfp4", include=pattern)


@pytest.mark.parametrize("pattern", ["mlp.weight", "mlp.up.bias"])
def test_a_weight_that_no_layer_has_is_an_error(pattern):
    """A container has none, so the pattern means no layer inside it."""
    with pytest.raises(ValueError, match=rf"got '{pattern}', which matches none\. The nearest is 'mlp"):
        convert(Mixed(), "nvfp4", exclude=pattern)
