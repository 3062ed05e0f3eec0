"""A run folder can be loaded as the model it trained."""

import pytest
import torch

from fourbits.evaluate import evaluate, total_loss
from fourbits.train.load_run import load_trained
from fourbits.train.run import run
from fourbits.train.trainer import Trainer


def test_a_loaded_model_has_the_validation_loss_that_its_run_ended_with(config, data, data_cache, tmp_path):
    summary = run(config, tmp_path, data_cache=data_cache)
    trained = load_trained(tmp_path)
    held_out = Trainer(trained.config, data, torch.device("cpu")).held_out
    losses = evaluate(trained.model, held_out, config.train.micro_batch_size)
    assert total_loss(losses.values()).per_token == summary["val_loss"]
    assert trained.step == summary["steps"]
    assert trained.tokenizer.sha256 == data.tokenizer.sha256


def test_a_folder_without_a_run_or_a_checkpoint_is_refused(config, data_cache, tmp_path):
    with pytest.raises(ValueError, match="not a run folder"):
        load_trained(tmp_path / "nothing")
    run(config, tmp_path / "run", data_cache=data_cache)
    for path in (tmp_path / "run" / "checkpoints").rglob("*"):
        path.unlink() if path.is_file() else None
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        path.rmdir()
    with pytest.raises(ValueError, match="no checkpoint"):
        load_trained(tmp_path / "run")
