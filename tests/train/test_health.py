"""Samples of health in runs: what they record, and that they change no bit of the training."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from fourbits.recipe.presets import get_recipe
from fourbits.settings import override
from fourbits.train.checkpoint import checkpoints
from fourbits.train.health_log import HealthLog, read_health
from fourbits.train.metrics import MEASURED, read_metrics
from fourbits.train.opening import with_vocabulary
from fourbits.train.run import run
from fourbits.train.sinks import register_sink
from fourbits.train.trainer import Trainer
from support.stopper import Stopper

#: amaxes of a quarter of those of the step before, so that blocks saturate from the second step on
STALE = {"fprop.lhs.amax_policy": "delayed", "fprop.lhs.amax_headroom": 0.25}
written: dict[int, dict[str, float]] = {}


class Sink:
    """Keeps what it is given."""

    def begin(self, run):
        written.clear()

    def write(self, step, metrics):
        written.setdefault(step, {}).update(metrics)

    def end(self, ended):
        pass


register_sink("kept-of-health", Sink)


@pytest.fixture(scope="module")
def sampled(config):
    recipe = replace(override(get_recipe("nvfp4-naive"), STALE), name="stale")
    train = replace(config.train, health_interval=3, sinks=("kept-of-health",), checkpoint_interval=None)
    return replace(config, recipe=recipe, train=train)


def start(config, out, data_cache, after=None):
    listener = Stopper(after)
    run(config, out, listener=listener, stop=listener.stop, data_cache=data_cache)
    return listener.notes


@pytest.fixture(scope="module")
def finished(sampled, data_cache, tmp_path_factory):
    out = tmp_path_factory.mktemp("health") / "run"
    return out, start(sampled, out, data_cache), dict(written)


def timeless(out, *, without=("health_",)):
    records = read_metrics(out / "metrics.jsonl")
    return [
        {k: v for k, v in each.items() if k not in MEASURED and not k.startswith(without)} for each in records
    ]


def test_samples_are_in_health_jsonl_metrics_sinks_and_log(finished):
    out, notes, in_sink = finished
    lines = read_health(out / "health.jsonl")
    assert [line["step"] for line in lines] == [3, 6, 9, 12]
    names = {layer["name"] for layer in lines[0]["layers"]}
    assert {"blocks.1.mixer.up_proj", "blocks.2.mixer.q_proj"} <= names
    steps = {r["step"]: r for r in read_metrics(out / "metrics.jsonl") if r["kind"] == "train"}
    of_health = {step: {k for k in r if k.startswith("health_")} for step, r in steps.items()}
    assert [step for step, keys in of_health.items() if keys] == [3, 6, 9, 12]
    assert {"health_snr_fprop", "health_gradient_to_noise", "health_clipped", "health_dead"} <= of_health[3]
    assert in_sink[3]["health_snr_fprop"] == steps[3]["health_snr_fprop"]
    (said,) = [note for note in notes if "saturation" in note]
    assert said.startswith("step 3: health: saturation: scales of an earlier step are too small")
    assert "Update the scale more often" in said
    assert "or lower the learning rate" in said
    assert said in (out / "log.txt").read_text()


def test_a_run_without_samples_has_the_same_bits(finished, sampled, data_cache, tmp_path):
    without = replace(sampled, train=replace(sampled.train, health_interval=None, sinks=()))
    start(without, tmp_path / "run", data_cache)
    assert not (tmp_path / "run/health.jsonl").exists()
    ends = [checkpoints(folder / "checkpoints")[-1] for folder in (finished[0], tmp_path / "run")]
    for name in ("model", "optimizer", "recipe"):
        one, other = ((end / f"{name}.safetensors").read_bytes() for end in ends)
        assert one == other, name
    assert timeless(finished[0]) == timeless(tmp_path / "run")


@pytest.mark.parametrize("recomputes", ["none", "full"])
def test_a_step_with_recomputation_is_sampled_alike(sampled, data, recomputes):
    train = replace(sampled.train, health_interval=1, activation_checkpointing=recomputes)
    trainer = Trainer(with_vocabulary(replace(sampled, train=train), data), data, torch.device("cpu"))
    sample = trainer.run_step().health
    assert sample is not None
    report = sample.report()
    assert not report.unseen
    train = replace(train, activation_checkpointing="none")
    other = Trainer(with_vocabulary(replace(sampled, train=train), data), data, torch.device("cpu"))
    expected = other.run_step().health
    assert expected is not None
    assert report.numbers() == expected.report().numbers()


def test_a_resumed_run_has_equal_metrics_and_no_sample_twice(finished, sampled, data_cache, tmp_path):
    out = tmp_path / "run"
    start(sampled, out, data_cache, after=7)
    lines = (out / "health.jsonl").read_text()
    (out / "health.jsonl").write_text(lines + json.dumps({"step": 9, "layers": []}) + '\n{"step": 9, "la')
    start(sampled, out, data_cache)
    assert timeless(out, without=("none",)) == timeless(finished[0], without=("none",))
    assert [line["step"] for line in read_health(out / "health.jsonl")] == [3, 6, 9, 12]


def test_a_sampled_step_runs_kernel_by_kernel_and_others_from_graphs(sampled, data, monkeypatch):
    trainer: Any = Trainer(with_vocabulary(sampled, data), data, torch.device("cpu"))
    replayed = []

    def captured(samples, first):
        replayed.append(trainer.step)
        return trainer._gradients(samples)

    trainer._captured = captured
    monkeypatch.setattr(trainer, "_samples_health", lambda: trainer.step == 1)
    for _ in range(3):
        trainer.run_step()
    assert sorted(set(replayed)) == [0, 2]


def test_an_alarm_is_reported_when_it_begins_and_ends_after_three_samples_without_it(tmp_path):
    class Report:
        def __init__(self, *alarms):
            self.alarms = alarms

        def to_dict(self):
            return {}

        def numbers(self):
            return {}

    class Alarm:
        kind, text = "noise", "a GEMM is mostly noise"

    class Sample:
        def __init__(self, report):
            self.made = report

        def report(self, previous):
            return self.made

    notes = []
    log: Any = HealthLog(tmp_path / "health.jsonl", 0, notes.append)
    for step, alarms in enumerate([(), (Alarm,), (), (), (Alarm,), (), (), (), (), (Alarm,)]):
        log.take(Sample(Report(*alarms)), step)
    assert notes == [
        "step 1: health: noise: a GEMM is mostly noise",
        "step 7: health: noise: over",
        "step 9: health: noise: a GEMM is mostly noise",
    ]


def test_a_disk_error_is_reported_once(tmp_path):
    notes = []
    log = HealthLog(tmp_path / "missing/health.jsonl", 0, notes.append)
    log._append("{}")
    log._append("{}")
    assert len(notes) == 1
    assert "The run continues without it" in notes[0]
