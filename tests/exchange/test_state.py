"""What is exported is the whole state of the model, in numbers that the file's dtype can hold."""

import copy
import json
import re
from typing import Any

import pytest
import torch
from torch import nn

from exchange.exchanged import OURS, ours
from fourbits.exchange.folder import load_hf, save_hf
from fourbits.exchange.hf import from_hf, to_hf
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.provenance import provenance, recorded_recipe
from model.shapes import small_config


def test_the_recipe_is_recorded_and_does_not_hinder_an_import(tmp_path):
    model = ours("llama")
    save_hf(model.state_dict(), model.config, tmp_path, provenance=provenance(get_recipe("nvfp4")))
    entry = json.loads((tmp_path / "config.json").read_text())
    assert recorded_recipe(entry) == get_recipe("nvfp4")
    assert load_hf(tmp_path).config == model.config


def changed(change) -> dict[str, Any]:
    state = dict(ours("llama").state_dict())
    return change(state) or state


HEAD = "head.weight"
STATES: dict[str, tuple[Any, str]] = {
    "a model": (ours("llama"), "state must be a state_dict, got LanguageModel. Pass model.state_dict()"),
    "a missing tensor": (
        changed(lambda s: {n: v for n, v in s.items() if n != HEAD}),
        "is missing in the",
    ),
    "another tensor": (
        changed(lambda s: s | {"scale": torch.ones(1)}),
        "'scale' is not a parameter of this model",
    ),
    "another shape": (changed(lambda s: s | {HEAD: torch.ones(3)}), "must have the shape [64, 48] by its"),
    "whole numbers": (changed(lambda s: s | {HEAD: s[HEAD].int()}), "'head.weight' must be torch.float64"),
    "no tensor": (changed(lambda s: s | {HEAD: None}), "must be a tensor with its values, got NoneType"),
    "no values": (changed(lambda s: s | {HEAD: s[HEAD].to("meta")}), "got one on the meta device. Gather"),
    "NaN": (changed(lambda s: s | {HEAD: s[HEAD] * torch.nan}), "'head.weight' has 3072 values that are not"),
    "a compiled model": (
        changed(lambda s: {f"_orig_mod.{name}": value for name, value in s.items()}),
        "is a name inside torch.compile",
    ),
}


@pytest.mark.parametrize("case", STATES)
def test_a_state_that_is_not_the_models_is_refused_before_the_folder_is_touched(case, tmp_path):
    state, message = STATES[case]
    model = ours("llama")
    save_hf(model.state_dict(), model.config, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=re.escape(message)):
        save_hf(state, model.config, tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_bytes": -1}, "shard_bytes must be a whole number of at least 1, got -1"),
        ({"shard_bytes": 0}, "shard_bytes must be a whole number of at least 1, got 0"),
        ({"shard_bytes": 5e9}, "shard_bytes must be a whole number of at least 1, got 5000000000.0"),
        ({"shard_bytes": True}, "shard_bytes must be a whole number"),
        ({"dtype": torch.int8}, "dtype must be one of torch.bfloat16, .*, got torch.int8"),
        ({"dtype": "bfloat16"}, "dtype must be one of torch.bfloat16, .*, got 'bfloat16'"),
        ({"end_token": 64}, "end_token must be one of the model's 64 tokens, got 64"),
        ({"end_token": 3.0}, "end_token must be one of the model's 64 tokens, got 3.0"),
        ({"end_token": True}, "end_token must be one of the model's 64 tokens, got True"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(options, message, tmp_path):
    model = ours("llama")
    with pytest.raises(ValueError, match=message):
        save_hf(model.state_dict(), model.config, tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_a_value_that_the_dtype_cannot_hold_is_refused(tmp_path):
    model = ours("llama")
    with torch.no_grad():
        model.norm.weight[5] = 1e5
    with pytest.raises(
        ValueError, match=r"has 1 value that is not finite.* torch.float16 has a smaller range"
    ):
        save_hf(model.state_dict(), model.config, tmp_path, dtype=torch.float16)
    assert not list(tmp_path.iterdir())
    save_hf(model.state_dict(), model.config, tmp_path)


def test_a_model_whose_tables_share_memory_keeps_it(tmp_path):
    """An export copies, and changes nothing in the model."""
    model = ours("hybrid", tie_embeddings=True)
    before = copy.deepcopy(model.state_dict())
    save_hf(model.state_dict(), model.config, tmp_path, dtype=torch.float32)
    assert model.head.weight is model.embed.weight
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_models_of_the_wrong_package_are_refused_in_memory():
    model = ours("llama")
    with pytest.raises(ValueError, match="from_hf: model must be a transformers model, got LanguageModel"):
        from_hf(model)
    with pytest.raises(ValueError, match="to_hf: model must be a LanguageModel of fourbits, got Linear"):
        to_hf(nn.Linear(2, 2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"is a name inside torch\.compile"):
        from_hf(torch.compile(to_hf(model)))


def test_every_model_here_is_of_another_family_or_computes_something_else():
    """Else the tests over all of them would try one thing twice."""
    configs = [small_config(**changes) for changes in OURS.values()]
    assert len(set(configs)) == len(configs)


@pytest.mark.parametrize("folder", [None, 5, ["a"]])
def test_what_is_no_path_is_refused_in_one_line(folder):
    with pytest.raises(ValueError, match=r"^load_hf: folder must be a path \(str or Path\), got .*\.$"):
        load_hf(folder)
    with pytest.raises(ValueError, match=r"^save_hf: folder must be a path \(str or Path\), got .*\.$"):
        save_hf({}, None, folder)  # pyright: ignore[reportArgumentType]


def test_a_configuration_that_is_none_is_refused_in_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"^save_hf: config must be a ModelConfig, got NoneType"):
        save_hf({}, None, tmp_path)  # pyright: ignore[reportArgumentType]
