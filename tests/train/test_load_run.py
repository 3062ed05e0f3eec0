"""A run folder can be loaded as the model it trained."""

import pytest
import torch

from fourbits.evaluate import evaluate, total_loss
from fourbits.settings import override
from fourbits.train.load_run import load_trained, open_trained
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


def test_averaged_weights_are_the_mean_of_the_last_checkpoints(config, data_cache, tmp_path):
    changed = override(config, {"train.checkpoint_interval": 4, "train.keep_checkpoints": 3})
    run(changed, tmp_path, data_cache=data_cache)
    each = [open_trained(tmp_path / "checkpoints" / f"step_{step}").masters for step in (8, 12)]
    trained = load_trained(tmp_path, average=2)
    for name, weight in trained.model.named_parameters():
        mean = (each[0][name].double() + each[1][name].double()) / 2
        assert weight.equal(mean.float()), name
    assert trained.step == 12
    before = open_trained(tmp_path / "checkpoints" / "step_8", average=2).masters
    assert not before["norm.weight"].equal(open_trained(tmp_path, average=2).masters["norm.weight"])


@pytest.mark.parametrize(
    ("average", "match"), [(3, r"at most .* up to step 12, 2, got 3\."), (0, "at least 1")]
)
def test_more_checkpoints_than_a_run_has_are_refused(config, data_cache, tmp_path, average, match):
    run(config, tmp_path, data_cache=data_cache)
    with pytest.raises(ValueError, match=match):
        load_trained(tmp_path, average=average)
