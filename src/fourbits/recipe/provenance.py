"""The recipe a model was trained with, recorded in its config.json: `"fourbits": {"recipe", "recipe_hash"}`.

All of its settings are recorded: a name alone would not identify a changed recipe, and a user's YAML file may
be missing where the model is loaded. transformers keeps entries that it does not know.
"""

from collections.abc import Mapping
from typing import Any

from fourbits.recipe.presets import credited
from fourbits.recipe.recipe import Recipe
from fourbits.settings import build, to_dict

ENTRY = "fourbits"


def provenance(recipe: Recipe) -> dict[str, Any]:
    """The value of `ENTRY` in config.json, in JSON's types; `recorded_recipe` is the inverse.

    recipe: all settings; recipe_hash: `Recipe.digest`, the hash of those that affect results bitwise.
    """
    return {"recipe": to_dict(credited(recipe)), "recipe_hash": recipe.digest}


def forget(config: Any) -> None:
    """Remove the record from a config object, such as transformers', that has one."""
    if getattr(config, ENTRY, None) is not None:
        delattr(config, ENTRY)


def recorded_recipe(config: Mapping[str, Any], where: str = "config.json") -> Recipe | None:
    """The recipe recorded in the content of a config.json; None if it has no `ENTRY`.

    where: the prefix of every error. Raises ValueError for an entry of another form, for settings that this
    version does not know, and if the hash is not that of the recipe.
    """
    if ENTRY not in config:
        return None
    entry = config[ENTRY]
    if not isinstance(entry, Mapping) or not {"recipe", "recipe_hash"} <= set(entry):
        raise ValueError(
            f"{where}: {ENTRY!r} must be a mapping with 'recipe' and 'recipe_hash', got {entry!r}. Remove it "
            "to load the model without its recipe."
        )
    recipe = build(Recipe, entry["recipe"], f"{where}: {ENTRY}.recipe")
    if entry["recipe_hash"] != recipe.digest:
        raise ValueError(
            f"{where}: {ENTRY}.recipe_hash must be {recipe.digest!r}, the hash of the recipe beside it, got "
            f"{entry['recipe_hash']!r}: one of the two was edited. Restore the file, or pass a recipe."
        )
    return recipe
