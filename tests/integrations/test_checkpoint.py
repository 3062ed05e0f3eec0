"""A checkpoint's recipe is compared with the model's: a wrong or missing one is never silent."""

import json
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from fourbits.integrations.checkpoint import restore_run_state, run_state
from fourbits.linear.checkpoint_state import recipe_state
from fourbits.linear.conversion import layers_digest
from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from fourbits.recipe.presets import get_recipe
from support.loops import HISTORY, llama


def test_the_state_is_json_and_goes_into_a_model_converted_alike():
    state = run_state(llama())
    assert json.loads(json.dumps(state)) == state
    assert re.fullmatch(r"nvfp4 \([0-9a-f]{16}\), seed 0", state["recipe"])
    restore_run_state(llama(), state)


@pytest.mark.parametrize(
    "other",
    [
        {"recipe": "nvfp4-46"},
        {"seed": 1},
        {"exclude": "*.o_proj"},
        {"include": "*.mlp.*"},
        {"recipe": "bf16"},
    ],
    ids=str,
)
def test_another_recipe_seed_or_choice_of_layers_is_an_error_or_on_request_a_warning(other):
    state, model = run_state(llama()), llama(**other)
    with pytest.raises(
        ValueError, match=r"written with recipe nvfp4 \(.*\), seed 0, the model has .* Convert"
    ):
        restore_run_state(model, state)
    with pytest.warns(UserWarning, match="quantize differently"):
        restore_run_state(model, state, strict=False)


def test_what_does_not_affect_bits_does_not_matter():
    packed = replace(get_recipe("nvfp4"), saved_inputs="packed", name="mine", source="")
    restore_run_state(llama(packed), run_state(llama()))
    wrapped = nn.Module()
    wrapped._orig_mod = llama()
    assert layers_digest(wrapped) == layers_digest(llama())


def test_a_missing_state_warns_and_is_an_error_where_the_recipe_tracks_past_steps():
    for nothing in (None, {}):
        with pytest.warns(UserWarning, match=r"no recipe recorded, .* fourbits\.integrations"):
            restore_run_state(llama(), nothing)
    with pytest.raises(ValueError, match="no recipe recorded"):
        restore_run_state(llama(HISTORY), None)


def test_tracked_values_come_back_bit_for_bit():
    model, tokens = llama(HISTORY), torch.arange(32).reshape(1, 32)
    for step in range(3):
        set_step(model, step)
        model(tokens, labels=tokens).loss.backward()
    other = llama(HISTORY)
    restore_run_state(other, json.loads(json.dumps(run_state(model))))
    before, after = recipe_state(model), recipe_state(other)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert any(bool(value.any()) for key, value in after.items() if "history" in key)


def test_parts_that_were_converted_apart_are_named_together():
    model = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
    convert(model[0], "nvfp4")
    convert(model[1], "mxfp8")
    assert re.fullmatch(r"nvfp4 \(.*\), seed 0; mxfp8 \(.*\), seed 0", run_state(model)["recipe"])
