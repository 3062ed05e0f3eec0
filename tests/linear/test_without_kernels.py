"""The summary of a conversion says which operands have no kernel on a GPU."""

import pytest
from torch import nn

from fourbits.linear import convert as module
from fourbits.linear.convert import convert
from fourbits.recipe.presets import RECIPES, get_recipe
from fourbits.settings import override

SLOW = {"keep_bf16.first_blocks": 0, "keep_bf16.last_blocks": 0, "dgrad.lhs.block": [1, 48]}


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(module, "runs_on_gpu", lambda weights: True)


def notes_of(recipe):
    return [
        note for note in convert(nn.Sequential(nn.Linear(96, 96)), recipe).notes if "slow on a GPU" in note
    ]


@pytest.mark.usefixtures("on_gpu")
def test_an_operand_without_a_kernel_is_named_with_the_reason():
    (note,) = notes_of(override(get_recipe("nvfp4"), SLOW))
    assert note.startswith(
        "slow on a GPU: dgrad.lhs of 1 layer by the eager reference, with the same bits, because "
    )
    assert "blocks must be 1xN or NxN for N in" in note


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_shipped_recipe_has_kernels_or_its_format_is_named(name):
    notes = notes_of(get_recipe(name))
    if name == "tetrajet2":
        assert "format nvfp4-double has no kernel" in str(notes)
    else:
        assert not notes


def test_without_a_gpu_the_summary_names_no_kernels():
    assert not notes_of(override(get_recipe("nvfp4"), SLOW))
