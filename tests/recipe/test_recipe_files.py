"""Recipes as data: shipped ones, and a user's YAML file with errors that can be acted on."""

from dataclasses import fields, replace

import pytest
import torch
from torch import nn

from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from fourbits.quant.operand import OperandSpec
from fourbits.quant.request import ROLES
from fourbits.recipe.overrides import with_both_sides
from fourbits.recipe.presets import RECIPES, get_recipe, list_recipes
from fourbits.recipe.recipe import GemmSpec, GemmTable, LayerRule, Recipe, table_from_text
from fourbits.settings import build, dump_yaml, override, to_dict

WHOLE = """
fprop: {lhs: {format: nvfp4}, rhs: {format: nvfp4, block: [16, 16], source: bf16}}
wgrad:
  lhs: {format: nvfp4, rounding: sr, rht: 16}
  rhs: {format: nvfp4, rht: 16}
keep_bf16: {names: [lm_head], last_blocks: 2}
layers:
  - {names: ["*.gate"], why: routers decide, table: {}}
"""


@pytest.fixture
def recipe_of(tmp_path):
    def read(text: str) -> Recipe:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return get_recipe(path)

    return read


def test_every_shipped_recipe_names_its_source_and_is_found_by_name():
    assert list_recipes() == tuple(RECIPES)
    for name in list_recipes():
        assert get_recipe(name).name == name
        assert get_recipe(name).source or name == "bf16"


@pytest.mark.parametrize("name", list_recipes())
def test_a_recipe_is_plain_data_that_builds_an_equal_one(name, recipe_of):
    recipe = get_recipe(name)
    assert build(Recipe, to_dict(recipe)) == recipe
    assert recipe_of(dump_yaml(to_dict(recipe))) == recipe
    assert table_from_text(recipe.table.to_text()) == recipe.table


def test_a_file_says_everything_or_only_what_differs_from_its_base(recipe_of):
    whole = recipe_of(WHOLE)
    assert whole.name == "mine"
    assert whole.fprop.rhs == OperandSpec(block=(16, 16), source="bf16")
    assert whole.dgrad == GemmSpec()
    assert whole.layers == (LayerRule(names=("*.gate",), why="routers decide", table=GemmTable()),)
    based = recipe_of("base: nvfp4\nname: soft\nwgrad: {lhs: {rht: 32}, rhs: {rht: 32}}\n")
    nvfp4 = get_recipe("nvfp4")
    assert based == replace(
        nvfp4,
        name="soft",
        source="nvfp4, changed",
        taken="",
        deviates="",
        wgrad=GemmSpec(lhs=replace(nvfp4.wgrad.lhs, rht=32), rhs=replace(nvfp4.wgrad.rhs, rht=32)),
    )


@pytest.mark.parametrize("side", ["lhs", "rhs"])
@pytest.mark.parametrize("field", ["rht: 64", "rht_signs: per-layer", "{rht: 32, rht_signs: none}"])
def test_a_transform_that_a_file_states_for_one_operand_is_that_of_both(side, field, recipe_of):
    """As on a command line: no other meaning is possible."""
    stated = recipe_of(f"base: nvfp4\nwgrad: {{{side}: {{{field.strip('{}')}}}}}\n")
    both = "{" + field.strip("{}") + "}"
    assert stated == recipe_of(f"base: nvfp4\nwgrad: {{lhs: {both}, rhs: {both}}}\n")
    assert stated.wgrad.lhs.transform != get_recipe("nvfp4").wgrad.lhs.transform


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("base: nvfp5", r"mine\.yaml: base must be a shipped recipe, got 'nvfp5'\. Did you mean 'nvfp4'\?"),
        (
            "wgrd: {}",
            r"mine\.yaml: unknown key 'wgrd'\. Did you mean 'wgrad'\? Known keys: name, source, taken",
        ),
        ("wgrad: {lhs: {rouding: sr}}", r"wgrad\.lhs: unknown key 'rouding'\. Did you mean 'rounding'\?"),
        ("wgrad: {lhs: {rounding: srr}}", r"wgrad\.lhs\.rounding must be one of 'rne', 'sr'.*, got 'srr'"),
        ("fprop: {lhs: {format: nvpf4}}", r"fprop\.lhs: OperandSpec\.format: .*'nvpf4'.*Known: nvfp4"),
        ("fprop: {lhs: {block: 16}}", r"fprop\.lhs\.block must be a list .*, got 16"),
        ("fprop: {lhs: {rht: 12}}", r"fprop\.lhs: OperandSpec\.rht: must be one of \(0, 4, 8.*, got 12"),
        (
            "base: nvfp4\nwgrad: {lhs: {rht: 32}, rhs: {rht: 16}}",
            r"wgrad: GemmSpec: both operands must have the same transform.*Set rht .* alike",
        ),
        ("keep_bf16: {last_blocks: 9/8}", r"keep_bf16: KeepBF16\.last_blocks: must be a count or a share"),
        ("layers: [{names: ['*'], tabel: {}}]", r"layers\.0: unknown key 'tabel'\. Did you mean 'table'\?"),
        (
            "fprop: {lhs: {format: nvfp4, amax_policy: history, amax_history: 100000000000}}",
            r"amax_history: must be at most 65,536 steps, got 100000000000",
        ),
        ("layers: [{table: {}}]", r"layers\.0: needs a value for names"),
        ("nvfp4", r"mine\.yaml: must hold a mapping of keys to values"),
        ("a: [", r"mine\.yaml, line \d: not valid YAML"),
    ],
)
def test_a_wrong_file_says_where_it_is_wrong_and_what_is_allowed(text, error, recipe_of):
    with pytest.raises(ValueError, match=error):
        recipe_of(text)


#: field of an operand -> settings that give it another value than the usual one
OPTIONS = {
    "format": {"format": "mxfp8"},
    "block": {"block": "[4, 32]"},
    "outer": {"format": "nvfp4-double", "outer": "[1, 64]"},
    "source": {"source": "bf16"},
    "rounding": {"rounding": "sr32"},
    "sr_headroom": {"rounding": "sr", "sr_headroom": "true"},
    "rht": {"rht": "64"},
    "rht_signs": {"rht": "32", "rht_signs": "per-layer"},
    "scale_rule": {"scale_rule": "search-max"},
    "scale_bound": {"scale_bound": "256"},
    "scale_rounding": {"scale_rounding": "sr"},
    "fp32_scale": {"fp32_scale": "pow2"},
    "te_compat": {"te_compat": "false"},
    "amax_policy": {"amax_policy": "interval", "amax_interval": "50"},
    "amax_interval": {"amax_interval": "50"},
    "amax_history": {"amax_policy": "history", "amax_history": "4"},
    "amax_headroom": {"amax_policy": "delayed", "amax_headroom": "1.5"},
    "adaptive": {"adaptive": "outer"},
    "adaptive_interval": {"adaptive": "outer", "adaptive_interval": "7"},
}


@pytest.mark.parametrize("role", ROLES[:6])
@pytest.mark.parametrize("field", OPTIONS)
def test_every_field_of_every_operand_is_reached_by_a_dotted_override_and_trains(field, role):
    plain = override(get_recipe("nvfp4-naive"), {"keep_bf16.names": []})
    settings = {f"{role}.{name}": value for name, value in OPTIONS[field].items()}
    recipe = override(plain, with_both_sides(settings))
    assert getattr(recipe.table.operand(role), field) != getattr(plain.table.operand("wgrad.lhs"), field)
    linear = nn.Linear(48, 32)
    convert(linear, recipe)
    for step in range(2):
        set_step(linear, step)
        linear(torch.randn(16, 48, requires_grad=True)).square().sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.isfinite().all()


def test_no_field_of_an_operand_is_left_out():
    """Those that are not for every operand: tests/linear/test_corrections.py and test_error_feedback.py."""
    special = {"correction", "error_feedback", "feedback_interval"}
    assert {*OPTIONS, *special} == {field.name for field in fields(OperandSpec)}


def test_the_whole_recipe_is_reached_by_dotted_overrides():
    changes = {
        "wgrad.lhs.rht": "32",
        "wgrad.rhs.rht": "32",
        "dgrad.lhs.rounding": "rne",
        "keep_bf16.last_blocks": "3/4",
        "quantize_eval": "false",
    }
    recipe = override(get_recipe("nvfp4"), changes)
    assert (recipe.wgrad.lhs.rht, recipe.wgrad.rhs.rht, recipe.dgrad.lhs.rounding) == (32, 32, "rne")
    assert (recipe.keep_bf16.last_blocks, recipe.quantize_eval) == ("3/4", False)


def test_the_digest_depends_on_the_bits_and_not_on_the_descriptions():
    recipe = get_recipe("nvfp4")
    assert replace(recipe, name="other", source="elsewhere").digest == recipe.digest
    rule = LayerRule(names=("a",), table=GemmTable(), why="first")
    ruled = replace(recipe, layers=(rule,))
    assert replace(recipe, layers=(replace(rule, why="second"),)).digest == ruled.digest
    changed = [
        override(recipe, {"dgrad.lhs.rounding": "rne"}),
        override(recipe, {"keep_bf16.first_blocks": 1}),
        override(recipe, {"quantize_eval": False}),
        ruled,
    ]
    assert len({r.digest for r in [recipe, *changed]}) == 5


def test_the_first_layer_rule_that_matches_decides():
    model = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("gate", "up", "down")})
    mxfp4 = get_recipe("mxfp4").table
    rules = (
        LayerRule(names=("gate",), table=GemmTable(), why="routers decide"),
        LayerRule(names=("gate", "d*"), table=mxfp4),
    )
    rows = convert(model, replace(get_recipe("nvfp4"), layers=rules)).rows
    assert [(row.precision, row.reason) for row in rows] == [
        ("bf16", "routers decide"),
        ("nvfp4", "recipe nvfp4"),
        ("mxfp4", "rule gate, d*"),
    ]


@pytest.mark.parametrize("given", [None, 4, {"base": "nvfp4"}, OperandSpec()])
def test_an_argument_that_names_no_recipe_is_refused(given):
    with pytest.raises(ValueError, match=r"recipe: must be a name, a \.yaml file or a Recipe, got"):
        get_recipe(given)
