"""A run evaluates its checkpoints while it trains, and trains as it would without."""

import json
import shutil

import pytest

from fourbits.cli.main import main
from fourbits.harness.results import read_results
from fourbits.train.config import load_config
from fourbits.train.presets import RUN_PRESETS
from fourbits.train.run import run as train
from support.small_runs import trained
from support.torchrun import timeless

FAMILY = "activation: swiglu, mamba_num_heads: 4, mamba_head_dim: 8, state_size: 16, num_groups: 1"
OPTIONS = ["--train.steps", "5", "--train.checkpoint_interval", "1", "--train.evaluate_every", "2"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("trained")
    return str(trained(folder, pattern="M-TT", width=32, family=FAMILY) / "config.yaml")


def test_every_second_checkpoint_and_the_last_are_evaluated_and_training_is_the_same(
    settings, tmp_path, capsys
):
    plain, evaluating = (tmp_path / name for name in ("plain", "evaluating"))
    assert main(["train", settings, *OPTIONS, "--out", str(plain)]) == 0
    assert main(["train", settings, *OPTIONS, "--train.evaluate", "[text]", "--out", str(evaluating)]) == 0
    assert [found.step for found in read_results(evaluating)] == [2, 4, 5]
    assert timeless(evaluating) == timeless(plain)
    assert "Evaluation after step 4" in (evaluating / "report.html").read_text()
    # as the command finds it afterwards
    last = json.loads((evaluating / "evaluations" / "step_5.json").read_text())
    shutil.rmtree(evaluating / "evaluations")
    capsys.readouterr()
    assert main(["eval", str(evaluating), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["precisions"] == last["precisions"]


def test_the_setting_is_refused_where_nothing_would_evaluate(settings, tmp_path):
    config = load_config(settings, RUN_PRESETS, {"train.evaluate": "[text]"})
    with pytest.raises(ValueError, match=r"train\.evaluate: is for fourbits train"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
