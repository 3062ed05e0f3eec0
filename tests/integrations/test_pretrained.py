"""config.json keeps the recipe; the weights stay those that anybody can load."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from fourbits.integrations.pretrained import convert_as_saved, keep_recipe, update_recipe
from fourbits.linear.conversion import conversion_of, layers_digest
from fourbits.linear.convert import convert
from fourbits.linear.module import QuantizedLinear
from fourbits.linear.step import set_step
from fourbits.recipe.presets import get_recipe
from support.loops import HISTORY, llama, rows

CHOICES: list[dict[str, Any]] = [
    {},
    {"recipe": "nvfp4-46", "seed": 3},
    {"recipe": HISTORY},
    {"exclude": ["*.o_proj"], "min_size": 1500},
    {"include": ["*.mlp.*"], "keep_first": 0},
    {"filter_fn": lambda module, name: module.in_features == 32},
]


def loss(model: Any) -> torch.Tensor:
    set_step(model, 0)
    batch = {key: value[None] for key, value in rows()[0].items()}
    return model.train()(**batch).loss.detach()


@pytest.mark.parametrize("choice", CHOICES, ids=range(len(CHOICES)))
def test_a_saved_model_is_loaded_as_it_was_converted(choice, tmp_path):
    model = llama(**choice)
    keep_recipe(model)
    model.save_pretrained(tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not any(isinstance(module, QuantizedLinear) for module in loaded.modules())
    summary = convert_as_saved(loaded)
    assert layers_digest(loaded) == layers_digest(model)
    assert torch.equal(loss(loaded), loss(model))
    entry = json.loads((tmp_path / "config.json").read_text())["fourbits"]
    assert entry["recipe_hash"] == conversion_of(model, "test").recipe.digest == summary.digest
    assert entry["recipe"]["name"] == conversion_of(model, "test").recipe.name
    convert_as_saved(loaded)  # again, and from the converted model's own config
    assert layers_digest(loaded) == layers_digest(model)


def test_transformers_loads_the_weights_without_this_package(tmp_path):
    model = llama()
    keep_recipe(model)
    model.save_pretrained(tmp_path)
    code = (
        "import sys; sys.modules['fourbits'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        "import torch\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})\n"
        "print(type(model.model.layers[0].mlp.up_proj).__name__, float(sum(p.double().sum() for p in "
        "model.parameters())))\n"
        f"model.save_pretrained({str(tmp_path / 'again')!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kind, total = done.stdout.split()
    assert kind == "Linear"
    assert float(total) == float(sum(p.detach().double().sum() for p in model.parameters()))
    first, again = (json.loads(Path(tmp_path, at, "config.json").read_text()) for at in (".", "again"))
    assert again["fourbits"] == first["fourbits"]  # which plain transformers hands on
    assert "quantization_config" not in first


def test_a_model_that_was_not_converted_has_no_recipe_to_keep():
    with pytest.raises(ValueError, match=r"keep_recipe: the model must be converted by one call .* got 0"):
        keep_recipe(llama("bf16"))


def test_a_config_without_a_recipe_is_an_error_with_the_remedy():
    with pytest.raises(
        ValueError, match=r"convert_as_saved: config.json must have .* fourbits\.convert\(model"
    ):
        convert_as_saved(llama("bf16"))


def test_an_edited_entry_is_refused():
    model: Any = llama()
    keep_recipe(model)
    model.config.fourbits["recipe_hash"] = get_recipe("mxfp8").digest
    with pytest.raises(ValueError, match="one of the two was edited"):
        convert_as_saved(model)


def test_a_model_of_another_kind_has_no_config_to_keep_it_in():
    model: Any = nn.Sequential(nn.Linear(32, 32))
    convert(model, "nvfp4")
    for config in (None, {"hidden_size": 32}, "a text"):
        model.config = config
        update_recipe(model)
        assert model.config == config
        with pytest.raises(
            ValueError, match=r"keep_recipe: model must be a transformers model, .* got Sequential"
        ):
            keep_recipe(model)
