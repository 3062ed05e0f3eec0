"""Runs under a precision schedule: what they record, and that a kill near a switch changes no bit."""

import json
from dataclasses import replace

import pytest
import torch

from fourbits import PrecisionPhase, get_recipe, load_trained
from fourbits.data.stream.blend import Phase
from fourbits.linear.step import stage_of
from fourbits.recipe.schedule import Stage
from fourbits.settings import override, to_dict
from fourbits.train import trainer as trainer_module
from fourbits.train.checkpoint import checkpoints
from fourbits.train.config import config_from_mapping
from fourbits.train.metrics import MEASURED, read_metrics
from fourbits.train.opening import with_vocabulary
from fourbits.train.run import run
from fourbits.train.stop import StopRequest
from fourbits.train.trainer import Trainer
from support.stopper import Stopper

CPU = torch.device("cpu")
#: BF16 in steps 1 to 3, FP4 in steps 4 to 8, BF16 forward from step 9 on
SCHEDULE = (
    PrecisionPhase(name="start", end="25%"),
    PrecisionPhase(name="late", start="decay-start", gemms="forward"),
)
POLICIES = {"fprop.rhs.amax_policy": "history", "dgrad.rhs.amax_policy": "history"}


@pytest.fixture(scope="module")
def scheduled(config):
    recipe = replace(override(get_recipe("nvfp4-naive"), POLICIES), name="scheduled", schedule=SCHEDULE)
    train = replace(config.train, gradient_accumulation=1, checkpoint_interval=None)
    return replace(config, recipe=recipe, optim=replace(config.optim, decay_share=1 / 3), train=train)


@pytest.fixture(scope="module")
def finished(scheduled, data_cache, tmp_path_factory):
    out, listener = tmp_path_factory.mktemp("scheduled") / "run", Stopper()
    run(scheduled, out, listener=listener, stop=listener.stop, data_cache=data_cache)
    return out, listener.notes


def timeless(out):
    return [
        {k: v for k, v in each.items() if k not in MEASURED} for each in read_metrics(out / "metrics.jsonl")
    ]


def test_a_run_records_its_phases(finished):
    out, notes = finished
    steps = [record for record in read_metrics(out / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["phase"] for record in steps] == ["start"] * 3 + [""] * 5 + ["late"] * 4
    manifest, summary = (json.loads((out / f"{name}.json").read_text()) for name in ("manifest", "summary"))
    assert [(p["name"], p["first_step"], p["last_step"]) for p in manifest["schedule"]] == [
        ("start", 1, 3),
        ("late", 9, None),
    ]
    assert summary["phases"] == {"start": 1, "late": 9}
    assert [note for note in notes if "precision" in note] == [
        "step 4: precision: recipe scheduled alone",
        "step 9: precision: late",
    ]
    assert "step 9: precision: late" in (out / "log.txt").read_text()
    assert "phase late, from step 8 on: forward in bf16" in (out / "log.txt").read_text()


@pytest.mark.parametrize("stop", [3, 4, 8, 9])
def test_a_run_stopped_near_a_switch_ends_with_equal_bits(finished, scheduled, data_cache, tmp_path, stop):
    out = tmp_path / "run"
    for after in (stop, None):
        listener = Stopper(after)
        run(scheduled, out, listener=listener, stop=listener.stop, data_cache=data_cache)
    ends = [checkpoints(folder / "checkpoints")[-1] for folder in (out, finished[0])]
    for name in ("model", "optimizer", "recipe"):
        one, other = ((end / f"{name}.safetensors").read_bytes() for end in ends)
        assert one == other, name
    assert timeless(out) == timeless(finished[0])


def test_the_steps_of_a_phase_in_bf16_are_those_of_a_run_in_bf16(finished, scheduled, data):
    plain = replace(scheduled, recipe=get_recipe("bf16"))
    trainer = Trainer(with_vocabulary(plain, data), data, CPU)
    losses = [trainer.check(trainer.run_step()).loss for _ in range(3)]
    steps = [record for record in read_metrics(finished[0] / "metrics.jsonl") if record["kind"] == "train"]
    assert losses == [record["loss"] for record in steps[:3]]
    assert all(record["saturated"] is None for record in steps[:3])


def test_a_loaded_model_is_in_the_phase_of_its_step(finished):
    model = load_trained(finished[0]).model
    assert stage_of(model) == (Stage((1,), ()),)


def test_a_schedule_follows_the_phases_of_the_data(scheduled, data):
    weights = {"notes": 0.5, "letters": 0.5}
    blend = (Phase(until=0.5, weights=weights), Phase(until=1.0, weights=weights))
    recipe = replace(get_recipe("nvfp4-naive"), schedule=(PrecisionPhase(name="second", start="data-2"),))
    changed = replace(scheduled, recipe=recipe, data=replace(scheduled.data, phases=blend))
    trainer = Trainer(with_vocabulary(changed, data), data, CPU)
    assert trainer.recipe.schedule[0].span == (6, None)
    third = replace(recipe, schedule=(PrecisionPhase(name="third", start="data-3"),))
    impossible = with_vocabulary(replace(changed, recipe=third), data)
    with pytest.raises(ValueError, match="needs data phase 3, and the data has 2"):
        Trainer(impossible, data, CPU)


def test_graphs_are_captured_again_after_a_switch(scheduled, data, monkeypatch):
    """What CapturedGradients stands for: a graph computes in the precision that it was captured in."""
    made = []

    class Captured:
        def __init__(self, gradients, model, masters):
            self.gradients, self.model, self.stages = gradients, model, set()
            made.append(self)

        def __call__(self, samples, first):
            self.stages.add(stage_of(self.model))
            return self.gradients(samples)

    monkeypatch.setattr(trainer_module, "CapturedGradients", Captured)
    monkeypatch.setattr(trainer_module.cuda_graph, "unsupported", lambda model, device: None)
    trainer = Trainer(with_vocabulary(scheduled, data), data, CPU)
    for _ in range(10):
        trainer.run_step()
    assert [each.stages for each in made if each.stages] == [
        {(Stage((0,), ()),)},
        {(Stage((), ()),)},
        {(Stage((1,), ()),)},
    ]


def test_a_switch_that_moves_with_the_length_is_refused_once_it_is_done(
    finished, scheduled, data_cache, tmp_path
):
    out, listener = tmp_path / "run", Stopper(after=4)
    flat = replace(scheduled, optim=replace(scheduled.optim, decay_share=0.0, warmup_share=0.0))
    flat = replace(flat, recipe=replace(flat.recipe, schedule=SCHEDULE[:1]))
    run(flat, out, listener=listener, stop=listener.stop, data_cache=data_cache)
    longer = replace(flat, train=replace(flat.train, steps=24))
    with pytest.raises(ValueError, match=r"the precision by recipe.schedule differs from step 4 on"):
        run(longer, out, stop=StopRequest(), data_cache=data_cache)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe.schedule": "late-forward", "optim.decay_share": "0"}, "needs a decay of the learning rate"),
        ({"recipe.schedule": '[{"name": "a", "start": 12}]'}, "must begin before the end of the run"),
        ({"recipe.schedule": '[{"name": "a", "end": 13}]'}, "must end within the run"),
        (
            {"recipe.schedule": '[{"name": "a", "precision": "mxfp9"}]'},
            "a shipped recipe, got 'mxfp9'",
        ),
    ],
)
def test_a_run_refuses_a_schedule_before_it_prepares_text(config, tmp_path, change, message):
    changed = replace(config, recipe=get_recipe("nvfp4"))
    from_settings = config_from_mapping(to_dict(changed), change)
    with pytest.raises(ValueError, match=message):
        run(from_settings, tmp_path / "run", stop=StopRequest(), data_cache=tmp_path / "data")
    assert not (tmp_path / "run").exists()


def test_an_unknown_gemm_in_settings_is_named(config):
    with pytest.raises(ValueError, match=r"'fpropp'\. Did you mean 'fprop'"):
        config_from_mapping(to_dict(config), {"recipe.schedule": '[{"name": "a", "gemms": ["fpropp"]}]'})
