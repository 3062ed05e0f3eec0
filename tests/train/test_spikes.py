"""A loss far above those before it is reported, or its update skipped; a stopped run has the same bits."""

import json
import math
import signal
import statistics
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from fourbits.settings import dump_yaml, to_dict
from fourbits.train import spikes
from fourbits.train.checkpoint import checkpoints
from fourbits.train.metrics import MEASURED, read_metrics
from fourbits.train.non_finite import NonFiniteError
from fourbits.train.opening import with_vocabulary
from fourbits.train.run import run
from fourbits.train.spikes import FEWEST, PATIENCE, WINDOW, SpikeDetector
from fourbits.train.stop import StopRequest
from fourbits.train.trainer import Trainer
from support.stopper import Stopper

CPU = torch.device("cpu")
SPIKE = 9  # the step whose loss is a hundred times as large, by fabrication


def looks(losses, detector=None):
    """Whether each loss is a spike, and the threshold that it was compared with."""
    detector = detector or SpikeDetector(CPU)
    found = [detector.compare(torch.tensor(loss, dtype=torch.float32)) for loss in losses]
    return [bool(spiked) for spiked, _ in found], [float(threshold) for _, threshold in found]


def noise(count, mean=4.0, deviation=0.05):
    generator = torch.Generator().manual_seed(0)
    return (mean + deviation * torch.randn(count, generator=generator)).tolist()


def test_the_threshold_is_the_median_and_eight_robust_deviations():
    losses = noise(2 * WINDOW + 1)
    _, thresholds = looks(losses)
    last = losses[-WINDOW - 1 : -1]
    middle = statistics.median_low(last)
    deviation = statistics.median_low([abs(loss - middle) for loss in last])
    assert thresholds[-1] == pytest.approx(middle + 8 * 1.4826 * deviation, rel=1e-5)


def test_the_threshold_is_at_least_five_percent_above_the_median():
    _, thresholds = looks([2.0] * (FEWEST + 1))
    assert thresholds[-1] == pytest.approx(2.1, rel=1e-6)


def test_nothing_is_a_spike_before_enough_losses():
    found, thresholds = looks([4.0] * (FEWEST - 1) + [100.0])
    assert not any(found)
    assert thresholds == [math.inf] * FEWEST


def test_noise_and_a_falling_loss_have_no_spikes():
    falling = [10 * math.exp(-i / 100) + 2 + x - 4.0 for i, x in enumerate(noise(500))]
    assert not any(looks(noise(500))[0])
    assert not any(looks(falling)[0])


def test_spikes_do_not_raise_the_threshold():
    found, thresholds = looks([*noise(64), 9.0, 9.0, 4.0, 9.0])
    assert found[-4:] == [True, True, False, True]
    assert thresholds[-4] == thresholds[-3] == thresholds[-2]


def test_after_enough_spikes_in_a_row_the_loss_has_a_new_level():
    found, thresholds = looks([*noise(64), *[9.0] * 60])
    assert found[64:] == [True] * PATIENCE + [False] * (60 - PATIENCE)
    assert thresholds[64 + PATIENCE] == math.inf
    assert thresholds[-1] == pytest.approx(9.45)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_no_spike_and_leaves_the_threshold(value):
    found, thresholds = looks([*noise(64), value, 4.0])
    assert not any(found)
    assert thresholds[-2] == thresholds[-1]


@pytest.mark.parametrize("cut", [5, 40, 68, 72, 200])
def test_a_saved_state_continues_with_equal_thresholds(cut):
    losses = [*noise(64), *[9.0] * 12, *noise(150)]
    before, after = SpikeDetector(CPU), SpikeDetector(CPU)
    expected = looks(losses)
    first = looks(losses[:cut], before)
    after.load(spikes.SpikeState(**json.loads(json.dumps(before.state()._asdict()))))
    second = looks(losses[cut:], after)
    assert [a + b for a, b in zip(first, second, strict=True)] == list(expected)


@pytest.fixture
def spike(monkeypatch):
    monkeypatch.setattr(spikes, "FEWEST", 4)
    accumulate = Trainer._accumulate_gradients

    def raised(trainer):
        loss = accumulate(trainer)
        return 100 * loss if trainer.step == SPIKE - 1 else loss

    monkeypatch.setattr(Trainer, "_accumulate_gradients", raised)


def trained(config, out, data_cache, policy, *stops):
    """Train to the end, stopping after each of some steps; returns the last summary."""
    changed = replace(config, train=replace(config.train, spike=policy, checkpoint_interval=1, keep_every=1))
    for after in stops:
        stopper = Stopper(after)
        run(changed, out, listener=stopper, stop=stopper.stop, data_cache=data_cache)
    return run(changed, out, stop=StopRequest(), data_cache=data_cache)


def content(out):
    newest = checkpoints(out / "checkpoints")[-1]
    records = [{k: v for k, v in r.items() if k not in MEASURED} for r in read_metrics(out / "metrics.jsonl")]
    return {file.name: file.read_bytes() for file in newest.glob("*.safetensors")}, records


def step_of(out, step):
    return next(r for r in read_metrics(out / "metrics.jsonl") if (r["kind"], r["step"]) == ("train", step))


@pytest.mark.parametrize(("policy", "skipped"), [("report", False), ("skip", True)])
def test_a_spike_is_recorded_and_its_update_skipped_on_request(
    spike, config, data_cache, tmp_path, policy, skipped
):
    summary = trained(config, tmp_path, data_cache, policy)
    record = step_of(tmp_path, SPIKE)
    assert record["loss"] > record["spike_threshold"] > step_of(tmp_path, SPIKE - 1)["loss"]
    assert (record["skipped"], summary["skipped_steps"], summary["spikes"]) == (skipped, int(skipped), 1)
    assert (summary["ended"], summary["skipped_in_a_row"]) == ("finished", 0)
    before, after = (
        (tmp_path / "checkpoints" / f"step_{step}" / "model.safetensors").read_bytes()
        for step in (SPIKE - 1, SPIKE)
    )
    assert (before == after) is skipped
    assert f"step {SPIKE}: " in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize("stops", [(SPIKE - 1,), (SPIKE,), (3, SPIKE - 1, SPIKE + 1)])
def test_a_run_interrupted_around_a_spike_has_the_bits_of_a_whole_one(
    spike, config, data_cache, tmp_path, stops
):
    trained(config, tmp_path / "whole", data_cache, "skip")
    trained(config, tmp_path / "cut", data_cache, "skip", *stops)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


KILLED = """
import os, signal, sys
from pathlib import Path
from fourbits.settings import load_yaml
from fourbits.settings import dump_yaml, to_dict
from fourbits.train import spikes
from fourbits.train.config import config_from_mapping
from fourbits.train.listener import RunListener
from fourbits.train.run import run
from fourbits.train.trainer import Trainer

file, out, cache, spike, last = Path(sys.argv[1]), *sys.argv[2:4], *map(int, sys.argv[4:6])
spikes.FEWEST, accumulate = 4, Trainer._accumulate_gradients
Trainer._accumulate_gradients = lambda self: accumulate(self) * (100 if self.step == spike - 1 else 1)


class Kill(RunListener):
    def step(self, record):
        if record["step"] == last:
            os.kill(os.getpid(), signal.SIGKILL)


run(config_from_mapping(load_yaml(file)), out, listener=Kill(), data_cache=cache)
"""


def test_a_run_killed_right_after_a_skipped_spike_and_again_later_has_the_bits_of_a_whole_one(
    spike, config, data_cache, tmp_path
):
    """The second process resumes before the spike and skips it again, the third one after it."""
    changed = replace(config, train=replace(config.train, spike="skip"))
    file, out = tmp_path / "run.yaml", tmp_path / "killed"
    file.write_text(dump_yaml(to_dict(changed)))
    for last, saved in ((SPIKE, "step_5"), (11, "step_10")):
        command = [sys.executable, "-c", KILLED, *map(str, (file, out, data_cache, SPIKE, last))]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
        assert checkpoints(out / "checkpoints")[-1].name == saved
    run(changed, out, stop=StopRequest(), data_cache=data_cache)
    run(changed, tmp_path / "whole", stop=StopRequest(), data_cache=data_cache)
    assert step_of(out, SPIKE)["skipped"]
    assert content(out) == content(tmp_path / "whole")


def test_without_spikes_the_policy_changes_no_bit(config, data_cache, tmp_path):
    for policy in ("off", "report", "skip"):
        trained(config, tmp_path / policy, data_cache, policy)
    assert content(tmp_path / "off") == content(tmp_path / "report") == content(tmp_path / "skip")


@pytest.fixture
def infinite(spike, monkeypatch):
    """The gradients of the spike are infinite, its loss is not."""
    accumulate = Trainer._accumulate_gradients

    def raised(trainer):
        loss = accumulate(trainer)
        if trainer.step == SPIKE - 1:
            trainer.masters["norm.weight"].grad.fill_(math.inf)
        return loss

    monkeypatch.setattr(Trainer, "_accumulate_gradients", raised)


@pytest.mark.parametrize("policy", ["report", "skip"])
def test_a_spike_whose_gradients_are_infinite_is_not_finite_before_it_is_a_spike(
    infinite, config, data_cache, tmp_path, policy
):
    with pytest.raises(NonFiniteError, match=rf"step {SPIKE}: the gradient of norm\.weight is not finite"):
        trained(config, tmp_path / "stops", data_cache, policy)
    skips = replace(config, train=replace(config.train, non_finite="skip"))
    summary = trained(skips, tmp_path / "skips", data_cache, policy)
    assert (summary["ended"], summary["skipped_steps"], summary["spikes"]) == ("finished", 1, 0)
    assert "spike_threshold" not in step_of(tmp_path / "skips", SPIKE)


def test_a_spike_after_a_step_that_was_not_finite_does_not_allow_updates(config, data, monkeypatch):
    """As on a GPU: both steps are under way before the host sees the numbers of the first."""
    monkeypatch.setattr(SpikeDetector, "compare", lambda self, loss: (loss > 0, loss / 2))
    changed = replace(config, train=replace(config.train, spike="skip"))
    trainer = Trainer(with_vocabulary(changed, data), data, CPU)
    trainer._blocked.fill_(1.0)
    trainer.run_step()
    assert bool(trainer._blocked)
