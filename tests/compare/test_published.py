"""The published comparison: its models, schedule, recipes and results."""

import re
from pathlib import Path

import pytest
import torch

from fourbits.compare.published import (
    CELLS,
    DIFFERENCES,
    MODELS,
    find_cell,
    published_config,
    published_recipes,
)
from fourbits.linear.convert import convert
from fourbits.model.lm import LanguageModel
from fourbits.train.schedule import learning_rate

RESULTS = Path(__file__).parents[2] / "docs" / "results.md"


@pytest.mark.parametrize(
    ("model", "parameters"),
    [("30m", 30_482_560), ("50m", 49_556_736), ("100m", 102_777_856), ("200m", 203_188_480)],
)
def test_models_have_the_published_number_of_parameters_without_embedding_and_head(model, parameters):
    with torch.device("meta"):
        built = LanguageModel(published_config(find_cell(model)).model)
    outside = built.embed.weight.numel() + built.head.weight.numel()
    assert sum(p.numel() for p in built.parameters()) - outside == parameters


def test_runs_have_the_published_steps_and_rates():
    config = published_config(find_cell("30m"))
    steps, tokens = config.train.num_steps, config.train.tokens_per_step
    assert (steps, tokens, steps * tokens) == (2861, 262_144, 749_993_984)
    rates = [learning_rate(step, steps, config.optim) for step in range(steps)]
    assert max(rates) == 1.2e-3
    assert rates.index(1.2e-3) == 2861 // 10 - 1  # they count 286 steps of warmup
    assert rates[-1] == pytest.approx(1.2e-4, rel=1e-12)
    middle = (286 + 2861) // 2
    assert rates[middle] == pytest.approx((1.2e-3 + 1.2e-4) / 2, rel=2e-3)  # half of a cosine's way


@pytest.mark.parametrize("name", [name for name in published_recipes() if name != "bf16"])
def test_recipes_quantize_every_linear_layer_of_a_block(name):
    with torch.device("meta"):
        model = LanguageModel(published_config(find_cell("30m")).model)
    rows = convert(model, published_recipes()[name]).rows
    kept = [row.name for row in rows if row.precision == "bf16"]
    assert kept == ["head"]
    assert len(rows) == 6 * 7 + 1


def test_every_cell_has_a_gap_for_every_recipe_that_is_compared():
    assert set(published_recipes()) == {"bf16", *DIFFERENCES}
    assert all(set(cell.gaps) == set(DIFFERENCES) for cell in CELLS)
    assert {cell.model for cell in CELLS} == set(MODELS)


def test_published_percents_are_those_that_the_authors_state():
    """1.60 % and 1.26 % at 30M and 0.75B tokens."""
    cell = find_cell("30m", 0.75e9)
    assert round(cell.percent("nvfp4-without-bf16-blocks"), 2) == 1.60
    assert round(cell.percent("quartet2-46"), 2) == 1.26


def test_docs_have_the_same_numbers():
    rows = re.findall(r"^\| (\d+)M, ([\d.]+)B \| ([\d.]+) \| \+([\d.]+) \| \+([\d.]+) \| \+([\d.]+) \|$",
                      RESULTS.read_text(), re.MULTILINE)  # fmt: skip
    assert len(rows) == 5
    names = ("nvfp4-without-bf16-blocks", "nvfp4-46-without-bf16-blocks", "quartet2-46")
    for size, billions, bf16, *gaps in rows:
        cell = find_cell(f"{size}m", float(billions) * 1e9)
        assert [cell.bf16, *(cell.gaps[name] for name in names)] == [float(bf16), *map(float, gaps)]


def test_other_lengths_are_refused_with_the_published_ones():
    with pytest.raises(ValueError, match=r"for 50m, got 2e\+09\. Pass one of 1\.25e9, 5e9\."):
        find_cell("50m", 2e9)
