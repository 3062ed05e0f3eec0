"""Which runs are replayed from CUDA graphs, and what the manifest says of the others."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fourbits import convert, get_recipe
from fourbits.recipe.recipe import GemmSpec
from fourbits.train.captured import why_not_captured
from fourbits.train.run import with_vocabulary
from fourbits.train.trainer import Trainer

CARD, CPU = torch.device("cuda"), torch.device("cpu")


def converted(recipe):
    model = nn.Sequential(nn.Linear(32, 32))
    convert(model, recipe)
    return model


def test_a_card_replays_recipes_that_depend_on_nothing_past(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    recipe = get_recipe("nvfp4")
    delayed = replace(recipe.fprop.lhs, amax_policy="delayed")
    past = replace(recipe, fprop=GemmSpec(lhs=delayed, rhs=recipe.fprop.rhs))
    assert why_not_captured(converted("nvfp4"), CARD) is None
    assert why_not_captured(converted("bf16"), CARD) is None
    assert "amax policies" in (why_not_captured(converted(past), CARD) or "")
    assert "NVIDIA card" in (why_not_captured(converted("nvfp4"), CPU) or "")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "NVIDIA card" in (why_not_captured(converted("nvfp4"), CARD) or "")


@pytest.mark.parametrize(("asked", "reason"), [(True, "NVIDIA card"), (False, "train.cuda_graph is false")])
def test_a_run_says_why_it_is_not_replayed(config, data, asked, reason):
    changed = replace(config, train=replace(config.train, cuda_graph=asked))
    trainer = Trainer(with_vocabulary(changed, data), data, CPU)
    assert reason in (trainer.eager_because or "")
