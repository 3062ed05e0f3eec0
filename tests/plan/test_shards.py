"""Plan, lint and trainer agree about which ranks can share a model's layers under a recipe."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fourbits.linear.convert import convert
from fourbits.lint.lint import lint
from fourbits.model.config import ModelConfig
from fourbits.model.lm import LanguageModel
from fourbits.plan.linears import linear_groups
from fourbits.plan.shards import fitting_ranks, uneven_layers
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import Recipe
from fourbits.train.config import load_config
from fourbits.train.parallel import require_even
from fourbits.train.presets import RUN_PRESETS
from fourbits.train.ranks.tensor_parallel import TensorRanks, split_layers

#: of every kind of block, of which 2 ranks have whole blocks of 128 each
SIZES: dict[str, Any] = {
    "d_ffn": 256,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 64,
    "mamba_num_heads": 256,
    "mamba_head_dim": 1,
    "state_size": 128,
    "num_groups": 2,
}


def model(**changes: Any) -> ModelConfig:
    return ModelConfig(vocab_size=384, d_model=128, pattern="TM", **{**SIZES, **changes})


def everywhere(name: str) -> Recipe:
    """A shipped recipe that keeps no block in BF16."""
    recipe = get_recipe(name)
    return replace(recipe, keep_bf16=replace(recipe.keep_bf16, first_blocks=0, last_blocks=0))


def refused(config: ModelConfig, recipe: str, ranks: int) -> bool:
    """Whether the trainer refuses the ranks, when a run is configured or when its layers are split."""
    with torch.device("meta"):
        built = LanguageModel(config)
    convert(built, everywhere(recipe))
    try:
        require_even(config, 128, ranks)
        split_layers(built, TensorRanks(None, 0, ranks))
    except ValueError as error:
        return f"parallel.tensor {ranks}: " in str(error)
    return False


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", "fp8"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"d_ffn": 224},
        {"num_kv_heads": 2, "head_dim": 32},
        {"num_heads": 2, "num_kv_heads": 2},
        {"mamba_num_heads": 128, "mamba_head_dim": 2},
        {"mamba_num_heads": 32, "mamba_head_dim": 8},
        {"state_size": 64},
    ],
    ids=str,
)
def test_the_ranks_that_the_trainer_refuses_are_those_with_uneven_layers(recipe, changes):
    config = model(**changes)
    groups = linear_groups(config, everywhere(recipe))
    assert any(group.quantized for group in groups)
    assert bool(uneven_layers(config, groups, 128, 2)) is refused(config, recipe, 2)


def test_blocks_of_128_need_more_of_each_size_than_those_of_16():
    config = model(mamba_num_heads=64, mamba_head_dim=4)
    of = {name: linear_groups(config, everywhere(name)) for name in ("nvfp4", "fp8")}
    assert uneven_layers(config, of["nvfp4"], 128, 2) == []
    (found,) = uneven_layers(config, of["fp8"], 128, 2)
    assert (found.name, found.size, found.multiple) == ("model.mamba_num_heads", 64, 256)
    assert fitting_ranks(config, of["nvfp4"], 128, 8) == 2
    assert fitting_ranks(config, of["fp8"], 128, 8) == 1


def test_lint_names_blocks_of_the_recipe_that_ranks_would_split():
    config = load_config("hybrid-8b", RUN_PRESETS, {"recipe": "fp8"})
    (found,) = lint(config, tensor=4)
    assert found.rule == "shards"
    assert "whole blocks of 128 rows dt, one per head, of in_proj" in found.what
    assert "Set parallel.tensor to 1" in found.remedy
    assert "model.mamba_num_heads a multiple of 512" in found.remedy
    assert lint(load_config("hybrid-8b", RUN_PRESETS, {"recipe": "nvfp4"}), tensor=4) == []
