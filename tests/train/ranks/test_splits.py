"""How parameters and layers are split over ranks that share them, in one process."""

from typing import Any

import pytest
import torch

from fourbits.linear.convert import convert
from fourbits.model.lm import LanguageModel
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.schedules import get_schedule
from fourbits.settings import override, to_dict
from fourbits.train.ranks.splits import Split, rows_of
from fourbits.train.ranks.tensor_parallel import TensorRanks, split_layers
from fourbits.train.trainer import compile_model
from train.ranks.test_parallel import model as config


@pytest.mark.parametrize("split", [Split(torch.Size((24, 4)), 0, (8, 12, 4)), Split(torch.Size((24, 4)), 1)])
def test_joined_parts_are_the_whole(split):
    whole = torch.arange(96).view(24, 4)
    parts = [split.part(whole, rank, 4) for rank in range(4)]
    assert all(part.numel() == 24 for part in parts)
    assert split.whole(parts).equal(whole)


def test_runs_say_where_rows_of_segments_are_in_the_whole():
    split, whole = Split(torch.Size((24, 1)), 0, (8, 12, 4)), torch.arange(24).view(24, 1)
    for rank in range(4):
        part = split.part(whole, rank, 4)
        assert all(part[own] == first for own, first in rows_of(split.segments, rank, 4))


def split_model(recipe: str = "nvfp4", compiled: Any = "none", **changes: Any):
    with torch.device("meta"):
        model = LanguageModel(config())
    convert(model, override(get_recipe(recipe), changes).for_run(steps=10, warmup=1, decay=2))
    compile_model(model, compiled)
    return model, split_layers(model, TensorRanks(None, 1, 2))


def test_a_rank_has_half_of_what_blocks_multiply_and_all_of_the_rest():
    model, splits = split_model()
    held = dict(model.named_parameters())
    assert held.keys() == splits.keys()
    halves = {name for name, split in splits.items() if 2 * held[name].numel() == split.shape.numel()}
    rest = {name for name, split in splits.items() if held[name].shape == split.shape}
    assert halves | rest == splits.keys()
    norms = {name for name in splits if name.endswith("norm.weight")}  # of blocks, and the last one
    assert rest == {"embed.weight", "head.weight", *norms}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compiled": "model"}, "Set train.compile to regions"),
        ({"fprop.lhs.amax_policy": "history"}, "Set every amax_policy to current"),
        ({"schedule": to_dict(get_schedule("late-forward"))}, "Remove recipe.schedule"),
        ({"sums": "sm_100"}, "Set sums to fp32"),
        ({"recipe": "fp8"}, "parallel.tensor 2: .* must be a multiple of 128"),
    ],
)
def test_what_ranks_cannot_share_is_refused_with_what_to_set(changes, message):
    with pytest.raises(ValueError, match=message):
        split_model(**changes)


@pytest.mark.filterwarnings("ignore:.*no output head was found")
def test_a_quantized_head_is_refused(monkeypatch):
    monkeypatch.setattr("fourbits.linear.roles.Roles.head", lambda *_: "")
    with pytest.raises(ValueError, match=r"Put head into recipe.keep_bf16.names"):
        split_model("nvfp4", "none", **{"keep_bf16.names": ("blocks.0.*",)})
