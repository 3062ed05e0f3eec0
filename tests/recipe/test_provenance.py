"""The entry in config.json is enough to train with the same recipe again."""

import json
from dataclasses import replace

import pytest

from fourbits.recipe.presets import get_recipe, list_recipes, recipe_from_mapping
from fourbits.recipe.provenance import ENTRY, provenance, recorded_recipe


@pytest.mark.parametrize("name", list_recipes())
def test_a_shipped_recipe_survives_json_whole(name):
    recipe = get_recipe(name)
    config = json.loads(json.dumps({"hidden_size": 8, ENTRY: provenance(recipe)}))
    assert set(config["fourbits"]) == {"recipe", "recipe_hash"}
    assert config["fourbits"]["recipe_hash"] == recipe.digest
    assert recorded_recipe(config) == recipe


def test_a_changed_recipe_is_restored_without_the_credits_of_the_one_it_started_from():
    changed = replace(get_recipe("nvfp4"), quantize_eval=False)
    found = recorded_recipe({ENTRY: provenance(changed)})
    assert found is not None
    assert (found.digest, found.quantize_eval) == (changed.digest, False)
    assert found.source == "nvfp4, changed"


def test_a_users_recipe_needs_no_file():
    recipe = recipe_from_mapping({"base": "nvfp4", "wgrad": {"lhs": {"rht": 32}}}, "mine.yaml", "mine")
    assert recorded_recipe(json.loads(json.dumps({ENTRY: provenance(recipe)}))) == recipe


def test_a_configuration_of_somebody_else_has_no_recipe():
    assert recorded_recipe({"model_type": "llama"}) is None


@pytest.mark.parametrize("entry", [None, [], "nvfp4", {}, {"recipe": {}}, {"recipe_hash": "0"}], ids=repr)
def test_an_entry_of_another_form_is_refused(entry):
    with pytest.raises(ValueError, match=r"a/config\.json: 'fourbits' must be a mapping with 'recipe' and"):
        recorded_recipe({ENTRY: entry}, "a/config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe_hash": "0" * 16}, r"recipe_hash must be '[0-9a-f]{16}', .* got '0000000000000000'"),
        ({"recipe": {"name": "nvfp4"}}, "recipe_hash must be"),
        ({"recipe": None}, "fourbits.recipe must be a mapping"),
        ({"recipe": {"name": "nvfp4", "fprob": {}}}, "unknown key 'fprob'. Did you mean 'fprop'"),
        ({"recipe": {"name": "nvfp4", "fprop": {"lhs": {"format": 4}}}}, r"fprop\.lhs"),
    ],
    ids=str,
)
def test_an_edited_entry_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        recorded_recipe({ENTRY: provenance(get_recipe("nvfp4")) | changes})
