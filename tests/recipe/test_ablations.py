"""An ablation loses one technique of a recipe, and nothing else."""

from dataclasses import replace

import pytest

from fourbits.recipe.ablations import TECHNIQUES, ablation_name, used, without
from fourbits.recipe.presets import RECIPES, get_recipe, recipe_from_mapping
from fourbits.recipe.recipe import Recipe
from fourbits.settings import build, to_dict

ROLES = [f"{gemm}.{side}" for gemm in ("fprop", "dgrad", "wgrad") for side in ("lhs", "rhs")]


def changed(before: Recipe, after: Recipe) -> dict[str, set[str]]:
    """Operand -> the fields that differ."""
    found: dict[str, set[str]] = {}
    for role in ROLES:
        old, new = to_dict(before.table.operand(role)), to_dict(after.table.operand(role))
        if fields := {name for name in old if old[name] != new[name]}:
            found[role] = fields
    return found


@pytest.mark.parametrize(
    ("technique", "expected"),
    [
        ("rht", {"wgrad.lhs": {"rht"}, "wgrad.rhs": {"rht"}}),
        ("sr", {"dgrad.lhs": {"rounding"}, "wgrad.lhs": {"rounding"}}),
        ("2d", {"fprop.rhs": {"block"}, "dgrad.rhs": {"block"}}),
        ("bf16-blocks", {}),
    ],
)
def test_nvfp4_loses_one_technique_and_nothing_else(technique: str, expected: dict[str, set[str]]):
    full = get_recipe("nvfp4")
    found = without(full, technique)
    assert found.name == f"nvfp4-without-{technique}"
    assert changed(full, found) == expected
    kept = replace(full.keep_bf16, first_blocks=0, last_blocks=0)
    assert found.keep_bf16 == (kept if technique == "bf16-blocks" else full.keep_bf16)
    assert found.layers == full.layers
    assert build(Recipe, to_dict(found), "config") == found, "a run's config.yaml must hold it"


def test_nvfp4_without_all_four_is_the_naive_recipe_of_the_paper():
    recipe = get_recipe("nvfp4")
    for technique in ("rht", "sr", "2d", "bf16-blocks"):
        recipe = without(recipe, technique)
    naive = get_recipe("nvfp4-naive")
    for role in ROLES:
        found, expected = recipe.table.operand(role), naive.table.operand(role)
        assert (found.block_size, found.rounding, found.rht, found.scale_rule) == (
            expected.block_size,
            expected.rounding,
            expected.rht,
            expected.scale_rule,
        )
    assert recipe.keep_bf16 == naive.keep_bf16


def test_blocks_of_fp8_and_mxfp4_become_those_of_their_format():
    assert without(get_recipe("fp8"), "2d").fprop.rhs.block_size == (1, 128)
    assert without(get_recipe("mxfp4"), "2d").dgrad.rhs.block_size == (1, 32)


def test_rules_for_layers_lose_the_technique_too():
    rule = {"names": ["*.up"], "table": {"wgrad": {"lhs": {"rounding": "sr"}, "rhs": {}}}}
    recipe = recipe_from_mapping({"base": "nvfp4", "layers": [rule]}, "recipe")
    found = without(recipe, "sr")
    assert found.layers[0].table.wgrad.lhs.rounding == "rne"
    assert recipe.layers[0].table.wgrad.lhs.rounding == "sr"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_can_lose_each_technique_that_it_lists_and_no_other(name: str):
    recipe = get_recipe(name)
    for technique in TECHNIQUES:
        if technique in used(recipe):
            assert without(recipe, technique).digest != recipe.digest
        else:
            with pytest.raises(ValueError, match=r"does not use|cannot be removed"):
                without(recipe, technique)


def test_an_unknown_technique_is_answered_with_the_list():
    with pytest.raises(ValueError, match=r"got 'rhtt'\. Did you mean .*rht.* Techniques: rht, sr, 2d"):
        without(get_recipe("nvfp4"), "rhtt")


def test_a_technique_that_a_recipe_does_not_use_is_refused_with_those_that_it_uses():
    with pytest.raises(ValueError, match=r"fp8 does not use sr\. It uses 2d, bf16-blocks\."):
        without(get_recipe("fp8"), "sr")
    with pytest.raises(ValueError, match=r"nvfp4-naive does not use rht\. .* Ablate another recipe\."):
        without(get_recipe("nvfp4-naive"), "rht")


def test_ms_eden_cannot_lose_its_transform():
    with pytest.raises(ValueError, match=r"rht cannot be removed from quartet2.*ms-eden needs a transform"):
        without(get_recipe("quartet2"), "rht")


def test_the_name_of_an_ablation_is_a_folder():
    assert ablation_name("nvfp4", "bf16-blocks") == "nvfp4-without-bf16-blocks"
