"""Settings are checked before any text is prepared, which can take hours: whatever does not depend on it."""

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
    """Raises ValueError for settings with which no text can be trained on, by these ranks.

    config: as the run will use it, except for its vocabulary, which is that of the text.
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
