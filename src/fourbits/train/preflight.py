"""Checks of settings that need no text: they run before any is prepared, which can take hours."""

from dataclasses import replace

import torch

from fourbits.linear.convert import convert
from fourbits.linear.error_feedback import layers_with_feedback
from fourbits.linear.layer_state import converted_state
from fourbits.model.lm import LanguageModel
from fourbits.train.config import RunConfig
from fourbits.train.precision import recipe_in_steps, uses_data
from fourbits.train.ranks.ranks import Ranks
from fourbits.train.trainer import compile_model


def check_settings(config: RunConfig, ranks: Ranks) -> None:
    """Raises ValueError for settings that these ranks cannot train with, whatever the text is.

    config: as the run will use it, except for the size of its vocabulary, which depends on the text.
    """
    ranks.micro_batches(config.train.gradient_accumulation)
    if config.optim.masters != "fp32":
        ranks.require_alone(f"optim.masters {config.optim.masters}", "fp32")
    if uses_data(config.recipe):
        recipe = replace(config.recipe, schedule=(), oscillation=None)
    else:
        recipe = recipe_in_steps(config, ())
    with torch.device("meta"):
        model = LanguageModel(config.model, seed=config.train.seed)
    convert(model, recipe, seed=config.train.seed, backend="emulated")
    if layers_with_feedback([module for module in model.modules() if converted_state(module)]):
        ranks.require_alone("recipe.fprop.lhs.error_feedback", "0")
    compile_model(model, config.train.compile)  # compiles nothing before the first call
    ranks.check_model(model)
