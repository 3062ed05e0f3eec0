"""save_pretrained and from_pretrained of a converted model: config.json stores the recipe.

The weights in the file are the master weights, which load without this package: they are not
quantized, so there is no `quantization_config`.
"""

from typing import Any

from fourbits.linear.conversion import conversion_of, conversions_of
from fourbits.linear.convert import Backend, convert
from fourbits.linear.summary import ConversionSummary
from fourbits.recipe.provenance import ENTRY, provenance, recorded_recipe

_CHOICE = ("include", "exclude", "stacks", "min_size")


def keep_recipe(model: Any) -> None:
    """Record a converted model's recipe in its config, so that every later save_pretrained writes it.

    model: a transformers model, or PEFT's around one. Raises ValueError if it is neither, or not converted.
    """
    if not _has_config(model):
        raise ValueError(
            f"keep_recipe: model must be a transformers model, which has a config to save, got "
            f"{type(model).__name__}. Save fourbits.recipe.provenance.provenance(recipe) beside the weights."
        )
    recipe, selection, seed = conversion_of(model, "keep_recipe")
    choice = {key: value for key in _CHOICE if (value := getattr(selection, key)) is not None}
    if selection.excluded:
        choice["exclude"] = (*(selection.exclude or ()), *sorted(selection.excluded))
    setattr(model.config, ENTRY, {**provenance(recipe), "seed": seed, "choice": choice})


def update_recipe(model: Any) -> None:
    """Call `keep_recipe` if the model has a transformers config and was converted by one call."""
    if _has_config(model) and len(conversions_of(model)) == 1:
        keep_recipe(model)


def convert_as_saved(model: Any, *, backend: Backend = "emulated") -> ConversionSummary:
    """Convert a model from from_pretrained by the recipe, seed and choice of layers in its config.json.

    backend: as for `convert`. Raises ValueError if none is recorded, or if the entry was edited.
    """
    config = model.config.to_dict()
    recipe = recorded_recipe(config)
    if recipe is None:
        raise ValueError(
            f"convert_as_saved: config.json must have the entry {ENTRY!r}, which keep_recipe and save_hf "
            "write. Call fourbits.convert(model, recipe) with the recipe that the model was trained with."
        )
    entry: dict[str, Any] = config[ENTRY]
    summary = convert(model, recipe, seed=entry.get("seed", 0), backend=backend, **entry.get("choice", {}))
    update_recipe(model)
    return summary


def _has_config(model: Any) -> bool:
    return hasattr(getattr(model, "config", None), "save_pretrained")
