"""Runs that reset oscillating weights: a kill within a window changes no bit, and ranks agree."""

import json
from dataclasses import replace

import pytest
import torch

from fourbits.recipe.oscillation import Oscillation
from fourbits.recipe.presets import get_recipe
from fourbits.settings import override
from fourbits.train.checkpoint import checkpoints, open_checkpoint
from fourbits.train.load_run import open_trained
from fourbits.train.opening import with_vocabulary
from fourbits.train.run import run
from fourbits.train.stop import StopRequest
from fourbits.train.trainer import Trainer
from support.stopper import Stopper
from support.torchrun import timeless, torchrun, written

#: windows of the steps 3 to 5 and 7 to 9; a ratio that many weights reach in so few steps
PLAN = Oscillation(window=3, period=4, ratio=1.5, start="1/6")


@pytest.fixture(scope="module")
def resetting(config):
    """Without clipping, whose factor is a norm over shards."""
    recipe = replace(override(get_recipe("nvfp4-naive"), {}), name="resetting", oscillation=PLAN)
    train = replace(config.train, checkpoint_interval=None, keep_checkpoints=9)
    return replace(config, recipe=recipe, train=train, optim=replace(config.optim, grad_clip=None))


@pytest.fixture(scope="module")
def finished(resetting, data_cache, tmp_path_factory):
    out = tmp_path_factory.mktemp("resetting") / "run"
    run(resetting, out, stop=StopRequest(), data_cache=data_cache)
    return out


def masters_of(out):
    return dict(open_trained(out).masters)


def test_weights_are_reset_and_only_those_that_are_quantized(resetting, data):
    """After step 5 quantized weights have values of their format; without the reset, none has moved there."""
    trainers = [
        Trainer(with_vocabulary(each, data), data, torch.device("cpu"))
        for each in (resetting, replace(resetting, recipe=replace(resetting.recipe, oscillation=None)))
    ]
    for trainer in trainers:
        for _ in range(5):
            trainer.run_step()
    followed = {f"{row.name}.weight" for row in trainers[0].conversion.rows if row.quantized}
    changed = {
        name for name, master in trainers[0].masters.items() if not master.equal(trainers[1].masters[name])
    }
    assert changed
    assert changed <= followed
    assert trainers[0].tensors().keys() == {"model", "optimizer"}, "a window has ended"


@pytest.mark.parametrize("stop", [2, 4, 5, 8])
def test_a_run_stopped_in_a_window_ends_with_equal_bits(finished, resetting, data_cache, tmp_path, stop):
    out = tmp_path / "run"
    listener = Stopper(stop)
    run(resetting, out, listener=listener, stop=listener.stop, data_cache=data_cache)
    saved = open_checkpoint(checkpoints(out / "checkpoints")[-1])
    assert ("oscillation.safetensors" in saved.files) == (stop in (2, 4, 8))
    run(resetting, out, stop=StopRequest(), data_cache=data_cache)
    ends = [checkpoints(folder / "checkpoints")[-1] for folder in (out, finished)]
    for name in ("model", "optimizer"):
        one, other = ((end / f"{name}.safetensors").read_bytes() for end in ends)
        assert one == other, name
    assert timeless(out) == timeless(finished)


def test_two_ranks_that_go_on_within_a_window_end_with_the_masters_of_one_process(
    finished, resetting, data_cache, tmp_path
):
    """Each has the rows of its shards; values are those of whole weights, whose blocks the shards cut."""
    listener = Stopper(4)
    run(resetting, tmp_path / "two", listener=listener, stop=listener.stop, data_cache=data_cache)
    ended = torchrun(2, ["train", written(resetting, tmp_path), "--out", str(tmp_path / "two")])
    assert ended.returncode == 0, ended.stderr
    one, two = masters_of(finished), masters_of(tmp_path / "two")
    assert [name for name in one if not one[name].equal(two[name])] == []


def test_a_run_goes_on_under_another_plan_from_the_next_window(finished, resetting, data_cache, tmp_path):
    other = replace(resetting, recipe=replace(resetting.recipe, oscillation=replace(PLAN, ratio=1.2)))
    listener = Stopper(4)
    run(resetting, tmp_path / "run", listener=listener, stop=listener.stop, data_cache=data_cache)
    ended = torchrun(
        1,
        ["train", written(other, tmp_path), "--out", str(tmp_path / "next"), "--from", str(tmp_path / "run")],
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "next/summary.json").read_text())["ended"] == "finished"
    assert any(
        not one.equal(masters_of(finished)[name]) for name, one in masters_of(tmp_path / "next").items()
    )
