"""transformers' Trainer with the callback: positions, equal bits after a resume, and wrong resumes."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from fourbits.integrations.transformers import FourbitsCallback
from fourbits.linear.set_recipe import set_recipe
from support.loops import (
    HISTORY,
    LENGTH,
    assert_same_parameters,
    llama,
    noted_positions,
    parameters,
    rows,
)

#: an epoch has three steps
STEPS, SAVED_AT = 4, 2


def trainer(folder: Path, model: Any, *callbacks: Any, **changes: Any) -> Trainer:
    given: dict[str, Any] = {
        "max_steps": STEPS,
        "save_steps": SAVED_AT,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    arguments = TrainingArguments(str(folder), **given | changes)
    return Trainer(model, arguments, train_dataset=rows(12), callbacks=list(callbacks))  # pyright: ignore


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run, the first positions that it announced, and its weights."""
    folder, model = tmp_path_factory.mktemp("run"), llama()
    with pytest.MonkeyPatch.context() as patch:
        calls = noted_positions(patch)
        trainer(folder, model, FourbitsCallback()).train()
    return folder, calls, parameters(model)


def test_every_micro_batch_is_announced_with_its_step_and_first_token(undisturbed):
    """The batch size times the model's longest sequence apart."""
    _, calls, _ = undisturbed
    assert calls == [(step, first) for step in range(STEPS) for first in (0, 2 * LENGTH)]


def test_a_resumed_run_has_equal_bits(undisturbed, tmp_path, monkeypatch):
    folder, calls, weights = undisturbed
    again, model = noted_positions(monkeypatch), llama()
    trainer(tmp_path, model, FourbitsCallback()).train(f"{folder}/checkpoint-{SAVED_AT}")
    assert again == calls[2 * SAVED_AT :]
    assert_same_parameters(model, weights)


def test_a_resumed_run_restores_the_callback_where_transformers_does(undisturbed, tmp_path):
    folder, _, weights = undisturbed
    model, callback = llama(), FourbitsCallback(max_tokens=1)  # too few; those of the checkpoint count
    options = {"restore_callback_states_from_checkpoint": True}
    trainer(tmp_path, model, callback, **options).train(f"{folder}/checkpoint-{SAVED_AT}")
    assert_same_parameters(model, weights)


def test_a_run_that_tracks_amaxes_resumes_with_equal_bits(tmp_path):
    first, second = llama(HISTORY), llama(HISTORY)
    trainer(tmp_path, first, FourbitsCallback()).train()
    trainer(tmp_path, second, FourbitsCallback()).train(f"{tmp_path}/checkpoint-{SAVED_AT}")
    assert_same_parameters(second, parameters(first))


def test_a_resume_with_another_recipe_stops_before_the_first_step(undisturbed, tmp_path):
    folder, _, _ = undisturbed
    checkpoint, model = f"{folder}/checkpoint-{SAVED_AT}", llama("nvfp4-46")
    with pytest.raises(ValueError, match=r"with recipe nvfp4 .* the model has nvfp4-46"):
        trainer(tmp_path, model, FourbitsCallback()).train(checkpoint)
    with pytest.warns(UserWarning, match="quantize differently"):
        trainer(tmp_path, model, FourbitsCallback(strict=False)).train(checkpoint)


def test_a_checkpoint_from_before_the_callback_warns_and_the_next_one_has_the_recipe(tmp_path):
    with warnings.catch_warnings(action="ignore"):  # that set_step was never called, once per process
        trainer(tmp_path, llama(), max_steps=SAVED_AT).train()
    with pytest.warns(UserWarning, match="no recipe recorded"):
        trainer(tmp_path, llama(), FourbitsCallback()).train(f"{tmp_path}/checkpoint-{SAVED_AT}")
    state = json.loads(Path(tmp_path, f"checkpoint-{STEPS}", "trainer_state.json").read_text())
    saved = state["stateful_callbacks"]["FourbitsCallback"]["attributes"]["_saved"]
    assert saved["recipe"].startswith("nvfp4 (")


def test_a_checkpoint_has_the_recipe_in_config_json(undisturbed):
    folder, _, _ = undisturbed
    config = json.loads(Path(folder, f"checkpoint-{SAVED_AT}", "config.json").read_text())
    assert config["fourbits"]["recipe"]["name"] == "nvfp4"


def test_a_recipe_changed_in_the_middle_is_that_of_later_checkpoints(tmp_path):
    class Heal(FourbitsCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                set_recipe(kwargs["model"], "mxfp8")
            super().on_step_end(args, state, control, **kwargs)

    model = llama()
    trainer(tmp_path, model, Heal(), max_steps=2, save_steps=2).train()
    folder = Path(tmp_path, "checkpoint-2")
    state = json.loads((folder / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["Heal"]["attributes"]["_saved"]["recipe"].startswith("mxfp8 (")
    assert json.loads((folder / "config.json").read_text())["fourbits"]["recipe"]["name"] == "mxfp8"


def test_sequences_longer_than_said_are_an_error(tmp_path):
    with pytest.raises(ValueError, match=f"Pass max_tokens={2 * LENGTH}"):
        trainer(tmp_path, llama(), FourbitsCallback(max_tokens=LENGTH)).train()


def test_positions_are_counted_over_processes_and_the_longest_sequence_of_trl(monkeypatch):
    class Arguments:
        world_size, process_index, train_batch_size, max_length = 4, 1, 3, 512

    calls, callback, state, control = (
        noted_positions(monkeypatch),
        FourbitsCallback(),
        TrainerState(),
        TrainerControl(),
    )
    arguments: Any = Arguments()
    callback.on_train_begin(arguments, state, control, model=llama())
    state.global_step = 7
    callback.on_step_begin(arguments, state, control)
    callback.on_substep_end(arguments, state, control)
    assert calls == [(7, 1 * 3 * 512), (7, 5 * 3 * 512)]


def test_a_model_without_a_longest_sequence_needs_max_tokens(tmp_path):
    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = llama()

        def forward(self, input_ids, labels):
            return {"loss": self.inner(input_ids, labels=labels).loss}

    with pytest.raises(ValueError, match="max_tokens must be given"):
        trainer(tmp_path, Plain(), FourbitsCallback()).train()
    trainer(tmp_path, Plain(), FourbitsCallback(max_tokens=2 * LENGTH), max_steps=1).train()
