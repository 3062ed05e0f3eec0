"""Which blocks stay in BF16, and how a model's blocks are found."""

from dataclasses import replace
from fractions import Fraction
from math import floor

import pytest
from torch import nn

from fourbits.linear.convert import convert
from fourbits.linear.stacks import Stack, find_stacks
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import KeepBF16

#: blocks in BF16 of the paper's 62, and of what they become in smaller models
PAPER = {62: (2, 8), 31: (1, 4), 24: (1, 3), 16: (1, 2), 8: (0, 1), 4: (0, 1), 2: (0, 1), 1: (0, 1)}


def half_up(share: Fraction) -> int:
    return floor(share + Fraction(1, 2))


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4"])
def test_the_papers_blocks_scale_with_depth(recipe):
    keep = get_recipe(recipe).keep_bf16
    for blocks in range(1, 63):
        first, last = half_up(Fraction(2 * blocks, 62)), max(1, half_up(Fraction(8 * blocks, 62)))
        assert (keep.count_first(blocks), keep.count_last(blocks)) == (first, last)
    for blocks, counts in PAPER.items():
        assert (keep.count_first(blocks), keep.count_last(blocks)) == counts


def test_the_fp8_baseline_keeps_one_and_two_of_62():
    keep = get_recipe("fp8").keep_bf16
    for blocks in range(1, 63):
        first, last = half_up(Fraction(blocks, 62)), max(1, half_up(Fraction(2 * blocks, 62)))
        assert (keep.count_first(blocks), keep.count_last(blocks)) == (first, last)
    assert (keep.count_first(62), keep.count_last(62)) == (1, 2)


def test_a_whole_number_is_a_count_and_zero_keeps_no_block():
    keep = KeepBF16(first_blocks=3, last_blocks=0)
    assert [(keep.count_first(n), keep.count_last(n)) for n in (1, 3, 10)] == [(1, 0), (3, 0), (3, 0)]


@pytest.mark.parametrize("value", ["9/8", "half", "1/0", -1, "-1/4"])
def test_an_invalid_share_is_refused(value):
    with pytest.raises(ValueError, match=r"KeepBF16\.last_blocks: must be a count or a share such as '8/62'"):
        KeepBF16(last_blocks=value)


class Model(nn.Module):
    """Blocks of two linears, a shorter list beside them, and lists inside the blocks."""

    def __init__(self, blocks: int):
        super().__init__()
        self.adapters = nn.ModuleList([nn.Linear(16, 16) for _ in range(2 * blocks)])
        self.blocks = nn.ModuleList(
            [
                nn.ModuleDict({"mix": nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])})
                for _ in range(blocks)
            ]
        )
        self.closing = nn.Linear(64, 64)


@pytest.mark.parametrize("blocks", [2, 4, 16, 31])
def test_blocks_are_the_entries_of_the_outermost_list_and_not_bare_linears(blocks):
    model = Model(blocks)
    assert find_stacks([model]) == (Stack("blocks", tuple(f"blocks.{i}" for i in range(blocks))),)
    summary = convert(model, "nvfp4")
    first, last = PAPER[blocks]
    reasons = {row.name: row.reason for row in summary.rows if not row.quantized}
    assert reasons.pop("closing") == "follows the last block"
    inside = [*range(first), *range(blocks - last, blocks)]
    assert set(reasons) == {f"blocks.{i}.mix.{j}" for i in inside for j in range(2)}
    assert set(reasons.values()) <= {f"first {first} of {blocks} blocks", f"last {last} of {blocks} blocks"}
    (stack,) = summary.stacks
    assert (stack.name, stack.blocks, stack.first, stack.last) == ("blocks", blocks, first, last)


def test_a_list_of_blocks_that_is_itself_the_model_counts_too():
    model = nn.ModuleList([nn.Sequential(nn.Linear(16, 16)) for _ in range(8)])
    kept = [row.name for row in convert(model, "nvfp4").rows if not row.quantized]
    assert kept == ["7.0"]


def test_a_model_without_a_list_has_no_first_and_last_block():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    assert convert(model, "nvfp4").share_of_linears == 1


def test_more_blocks_than_there_are_keep_everything():
    recipe = replace(get_recipe("nvfp4"), keep_bf16=KeepBF16(first_blocks=5, last_blocks=5))
    with pytest.warns(UserWarning, match="quantized nothing"):
        assert convert(Model(3).blocks, recipe).share_of_linears == 0
