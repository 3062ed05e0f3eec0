"""A run is finished only if it is good, and its last good checkpoint stays and is the one that is loaded."""

import json
from dataclasses import replace

import pytest

from fourbits.compare.report.run_report import write_run_report
from fourbits.evaluate import Loss
from fourbits.train import trainer as trainer_module
from fourbits.train.checkpoint import checkpoints
from fourbits.train.load_run import load_trained
from fourbits.train.non_finite import NonFiniteError
from fourbits.train.run import run
from fourbits.train.schedule import learning_rate
from fourbits.train.step_result import PendingStep
from fourbits.train.stop import StopRequest
from fourbits.train.trainer import Trainer

EXPLODES = 5  # the step whose update makes the weights useless; the step after it is the first not finite


@pytest.fixture
def train(config, data_cache, tmp_path):
    """Run 8 steps in tmp_path; returns the summary after the error, or of the finished run."""

    def start(error=None, **settings):
        changed = replace(config, train=replace(config.train, steps=8, **settings))
        if error is None:
            return run(changed, tmp_path, stop=StopRequest(), data_cache=data_cache)
        with pytest.raises(NonFiniteError, match=error):
            run(changed, tmp_path, stop=StopRequest(), data_cache=data_cache)
        return json.loads((tmp_path / "summary.json").read_text())

    return start


@pytest.fixture
def explosion(monkeypatch):
    """Step EXPLODES has a learning rate that no weights survive."""

    def rate(step, num_steps, config):
        return 1e30 if step == EXPLODES - 1 else learning_rate(step, num_steps, config)

    monkeypatch.setattr(trainer_module, "learning_rate", rate)


@pytest.mark.parametrize("policy", ["skip", "stop"])
@pytest.mark.parametrize(("interval", "good"), [(1, EXPLODES - 1), (2, 4), (3, 3)])
def test_the_last_good_checkpoint_stays_is_named_and_is_loaded(
    train, explosion, monkeypatch, tmp_path, policy, interval, good
):
    """Its validation loss may well be finite: norms hide the size of weights, gradients do not."""
    monkeypatch.setattr(Trainer, "validate", lambda self: {"loss": Loss(100.0, 32, 100)})
    how = "streak of 3 skipped steps" if policy == "skip" else "step 6: .* The update was skipped"
    summary = train(f"{how}.*--from .*/step_{good} ", **settings(policy, interval))
    assert (summary["ended"], summary["last_good_checkpoint"]) == ("non-finite", f"step_{good}")
    assert summary["skipped_in_a_row"] == (3 if policy == "skip" else 0)  # a step that stops has no record
    saved = [good, EXPLODES] if EXPLODES % interval == 0 else [good]
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == [f"step_{n}" for n in saved]
    assert load_trained(tmp_path).step == good


def test_numbers_that_arrive_when_the_next_step_has_begun_make_no_later_checkpoint_good(
    train, explosion, monkeypatch, tmp_path
):
    """As on a GPU: step 6 is found to be bad after step 7 began, and the checkpoint of step 5 led to it."""
    monkeypatch.setattr(PendingStep, "in_flight", True)
    summary = train("step 6: .* No checkpoint before it is good", **settings("stop", EXPLODES))
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == [f"step_{EXPLODES}"]
    assert summary["last_good_checkpoint"] is None


def settings(policy, interval):
    return {"non_finite": policy, "checkpoint_interval": interval, "keep_checkpoints": 1}


def test_without_a_good_checkpoint_nothing_is_loaded(train, monkeypatch, tmp_path):
    monkeypatch.setattr(trainer_module, "learning_rate", lambda *_: 1e30)
    train("No checkpoint before it is good", **settings("stop", 1))
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["step_1"]
    with pytest.raises(ValueError, match="ended non-finite and has no good checkpoint"):
        load_trained(tmp_path)


@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_a_validation_loss_of_nan_ends_the_run_and_its_report_is_written(
    train, monkeypatch, tmp_path, policy
):
    nan = Loss(float("nan"), 32, 100)
    monkeypatch.setattr(Trainer, "validate", lambda self: {"loss": nan, "notes": nan})
    step = 4 if policy == "stop" else 8
    summary = train(f"step {step}: the validation loss is nan", non_finite=policy, checkpoint_interval=3)
    assert (summary["ended"], summary["val_loss"], summary["steps"]) == ("non-finite", None, step)
    assert f"step_{step}" not in [path.name for path in checkpoints(tmp_path / "checkpoints")]
    assert "Diverged" in write_run_report(tmp_path).read_text()


def test_a_run_that_recovers_from_skipped_steps_is_finished(train, monkeypatch, tmp_path):
    step = Trainer.run_step

    def blocked_twice(self):
        self._blocked.fill_(self.step in (2, 3))
        return step(self)

    monkeypatch.setattr(Trainer, "run_step", blocked_twice)
    summary = train(**settings("skip", 4))
    assert (summary["ended"], summary["skipped_steps"], summary["skipped_in_a_row"]) == ("finished", 2, 0)
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["step_8"]
