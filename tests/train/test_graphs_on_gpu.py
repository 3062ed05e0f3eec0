"""Runs that replay CUDA graphs continue with the same bits: after kills, rollbacks and switches of precision.

FOURBITS_KILLS sets how often the test of kills kills (default 3). Its runs go side by side, because most of
the time is that of starting processes.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from fourbits import PrecisionPhase
from fourbits.linear.step import stage_of
from fourbits.model.presets import MODEL_PRESETS
from fourbits.recipe.schedule import Stage
from fourbits.settings import override
from fourbits.train import keeper
from fourbits.train.cuda_graph import CapturedGradients
from fourbits.train.metrics import read_history
from fourbits.train.run import run
from support.kills import FOURBITS, finish, kill_at_random, same_end
from support.spiking import INFINITE, SPIKE, SPIKED, inject, of_data
from support.stopper import Stopper
from support.torchrun import timeless, written

pytestmark = pytest.mark.gpu
KILLS = int(os.environ.get("FOURBITS_KILLS", "3"))
RUNS = min(5, KILLS)
STEPS = 120
#: steps 1 to 6 in NVFP4, 7 to 12 in BF16
SWITCH = 6


@pytest.fixture(scope="module")
def tiny(config):
    """The run of this folder with the model of `fourbits demo`, on a GPU."""
    changed = replace(config, model=replace(MODEL_PRESETS["tiny"], vocab_size=config.model.vocab_size))
    return override(changed, {"train.device": "cuda", "train.compile": "regions", "train.seq_len": 64})


@pytest.fixture(scope="module")
def switching(tiny):
    late = PrecisionPhase(name="late", start=SWITCH)
    return replace(tiny, recipe=replace(tiny.recipe, name="switching", schedule=(late,)))


@pytest.fixture
def captures(monkeypatch):
    """The precision of each micro-batch that is captured from here on."""
    found, capture = [], CapturedGradients._capture

    def watched(self, samples, first):
        found.append(stage_of(self._model))
        return capture(self, samples, first)

    monkeypatch.setattr(CapturedGradients, "_capture", watched)
    return found


def trained(config, out, data_cache, after=None):
    listener = Stopper(after)
    run(config, out, listener=listener, stop=listener.stop, data_cache=data_cache)
    return out


def test_killed_runs_end_with_the_bits_of_an_undisturbed_one(tiny, tmp_path):
    often = {"train.steps": STEPS, "train.checkpoint_interval": 4, "train.validation_interval": 30}
    command = [*FOURBITS, "train", written(override(tiny, often), tmp_path)]
    finish(command, undisturbed := tmp_path / "undisturbed")
    assert json.loads((undisturbed / "manifest.json").read_text())["cuda_graph"]["used"]

    def disturbed(number):
        out, kills = tmp_path / f"killed-{number}", len(range(number, KILLS, RUNS))
        kill_at_random(command, out, STEPS, kills, seed=number)
        assert "continuing from" in finish(command, out)
        return out

    with ThreadPoolExecutor(RUNS) as pool:
        for out in pool.map(disturbed, range(RUNS)):
            same_end(out, undisturbed)
            assert timeless(out) == timeless(undisturbed)


def test_graphs_are_captured_in_the_precision_of_their_phase(switching, data_cache, tmp_path, captures):
    trained(switching, tmp_path / "run", data_cache)
    fp4, bf16 = (Stage((), ()),), (Stage((0,), ()),)
    assert captures == [fp4, fp4, bf16, bf16]  # the first micro-batch of a step, and later ones


@pytest.mark.parametrize("stop", [SWITCH - 1, SWITCH, SWITCH + 1])
def test_a_run_resumed_near_a_switch_has_the_bits_of_an_undisturbed_one(
    switching, data_cache, tmp_path, stop, captures
):
    undisturbed = trained(switching, tmp_path / "undisturbed", data_cache)
    resumed = trained(switching, tmp_path / "run", data_cache, after=stop)
    before = len(captures)
    trained(switching, resumed, data_cache)
    assert (Stage((0,), ()),) in captures[before:]
    same_end(resumed, undisturbed)
    assert timeless(resumed) == timeless(undisturbed)


@pytest.mark.parametrize("gemms", ["both", "forward", "backward"])
def test_replayed_steps_have_the_bits_of_launched_ones_on_both_sides_of_a_switch(
    switching, data_cache, tmp_path, gemms
):
    (late,) = switching.recipe.schedule
    recipe = replace(switching.recipe, schedule=(replace(late, gemms=gemms),))
    switching = replace(switching, recipe=recipe)
    replayed = trained(switching, tmp_path / "replayed", data_cache)
    launched = trained(override(switching, {"train.cuda_graph": False}), tmp_path / "launched", data_cache)
    same_end(replayed, launched)
    assert timeless(replayed) == timeless(launched)


def test_equal_runs_with_several_blocks_of_keys_have_equal_bits(tiny, data_cache, tmp_path):
    """Attention's usual backward pass adds the gradients of queries in the order in which blocks finish."""
    longer = override(tiny, {"train.seq_len": 384, "train.steps": 8, "train.deterministic": True})
    folders = [trained(longer, tmp_path / name, data_cache) for name in ("one", "other")]
    same_end(*folders)


class Killed(BaseException):
    """Ends a run like SIGKILL: nothing is written after it."""


@pytest.mark.parametrize("kind", [SPIKED, INFINITE])
def test_a_run_that_rolls_back_has_the_bits_of_one_that_starts_from_there(
    tiny, data_cache, tmp_path, monkeypatch, kind
):
    """The graphs of the first were captured before the rollback."""
    settings = {"checkpoint_interval": 3, "rollback_steps": 2, "spike": "rollback", "non_finite": "rollback"}
    rolling = override(tiny, {f"train.{name}": value for name, value in settings.items()})
    inject(monkeypatch.setattr, kind, of_data)
    whole = trained(rolling, tmp_path / "whole", data_cache)
    (rollback,) = read_history(whole / "metrics.jsonl").rollbacks
    assert (rollback["step"], rollback["to"]) == (SPIKE, 6)
    amend = keeper.amend

    def amend_and_die(*given):
        amend(*given)
        raise Killed

    with monkeypatch.context() as context:
        context.setattr(keeper, "amend", amend_and_die)
        with pytest.raises(Killed):
            trained(rolling, tmp_path / "killed", data_cache)
    killed = trained(rolling, tmp_path / "killed", data_cache)
    same_end(killed, whole)
    assert timeless(killed) == timeless(whole)
