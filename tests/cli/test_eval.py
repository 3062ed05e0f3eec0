"""`fourbits eval`: runs and model folders, in BF16 and in a recipe; results in the run; one-line errors."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fourbits.cli.main import main
from fourbits.compare.report.run_report import write_run_report
from fourbits.evaluation.evaluated_model import open_model
from fourbits.exchange.folder import open_hf
from fourbits.generate.held import recipe_layers
from fourbits.harness.results import add_results, read_results
from fourbits.train.forward_weights import forward_weights
from fourbits.train.load_run import open_trained
from support.small_runs import trained
from support.torchrun import torchrun


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Four blocks, of which the last one stays in BF16."""
    return trained(tmp_path_factory.mktemp("trained"), pattern="TTTT", width=32)


@pytest.fixture(scope="module")
def folders(run, tmp_path_factory) -> dict[str, Path]:
    """Exports of the run."""
    out = tmp_path_factory.mktemp("exported")
    for name in ("hf", "modelopt", "compressed-tensors"):
        scales = [] if name == "hf" else ["--scales", "separate"]
        assert main(["export", str(run), "--format", name, *scales, "--out", str(out / name)]) == 0
    return {path.name: path for path in out.iterdir()}


def evaluated(capsys, *argv: Any) -> dict[str, Any]:
    assert main(["eval", *map(str, argv), "--device", "cpu", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["precisions"]


def refused(capsys, *argv: Any) -> str:
    assert main(["eval", *map(str, argv), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


def test_a_run_in_its_own_recipe_has_the_loss_that_training_recorded(run, capsys):
    recorded = json.loads((run / "summary.json").read_text())
    found = evaluated(capsys, run, "--recipe", "trained")
    # the same weights; amaxes of inputs are held here and the batch's own there
    assert found["trained"]["text"]["all"]["loss"] == pytest.approx(recorded["val_loss"], rel=2e-4)
    assert found["bf16"]["text"]["all"]["loss"] != found["trained"]["text"]["all"]["loss"]
    assert found["trained"]["text"]["sources"].keys() == {"text"}


def test_results_are_kept_by_precision_and_in_the_report(run, capsys):
    copy = run.parent / "copy"
    shutil.copytree(run, copy)
    evaluated(capsys, copy, "--recipe", "trained")
    evaluated(capsys, copy / "checkpoints" / "step_2", "--samples", 1)
    stored = json.loads((copy / "evaluations" / "step_2.json").read_text())
    assert stored["precisions"].keys() == {"bf16", "trained"}
    assert stored["precisions"]["bf16"]["text"]["all"]["tokens"] == 16
    assert stored["precisions"]["trained"]["text"]["all"]["tokens"] == 32
    page = (copy / "report.html").read_text()
    assert "Evaluation after step 2" in page
    assert f"{stored['precisions']['trained']['text']['all']['bits_per_byte']:.4f}" in page


def test_averaged_checkpoints_are_evaluated_and_not_kept_as_results_of_the_last(run, tmp_path, capsys):
    again = ["train", str(run / "config.yaml"), "--out", str(tmp_path / "run")]
    assert main([*again, "--train.steps", "3", "--train.checkpoint_interval", "1"]) == 0
    capsys.readouterr()
    losses = [
        evaluated(capsys, tmp_path / "run", *average)["bf16"]["text"]["all"]["loss"]
        for average in ([], ["--average", 2])
    ]
    assert losses[0] != losses[1]
    stored = json.loads((tmp_path / "run" / "evaluations" / "step_3.json").read_text())
    assert stored["precisions"]["bf16"]["text"]["all"]["loss"] == losses[0]
    assert "up to step 3, 2, got 3" in refused(capsys, tmp_path / "run", "--average", 3)


def test_an_average_of_a_model_folder_is_refused(folders, capsys):
    assert "--average: only a run has several" in refused(capsys, folders["hf"], "--average", 2)


def test_scores_are_in_the_report_and_in_the_card_of_an_export_beside_the_papers(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("evaluations"))
    score = {
        "metrics": {"acc,none": 0.25, "acc_stderr,none": 0.01},
        "shots": [5],
        "questions": 40,
        "asked": True,
    }
    parts = {"winogrande": score, "of_a_group": {**score, "asked": False}}
    add_results(copy, 2, {"bf16": {"tasks": parts}})
    add_results(copy, 2, {"bf16": {"tasks": {"piqa": {**score, "shots": [0]}}}})
    assert main(["export", str(copy), "--out", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| winogrande | acc | 5 | 0.2500 +- 0.0100 | 80.58 | 78.77 |" in card
    assert "| piqa | acc | 0 | 0.2500 +- 0.0100 |" in card
    assert "of_a_group" not in card
    write_run_report(copy)
    assert "78.77" in (copy / "report.html").read_text()


def test_damaged_results_are_named(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("evaluations"))
    file = add_results(copy, 2, {})
    file.write_text('{"step": 2}')
    with pytest.raises(ValueError, match=f"{file}: damaged: 'precisions' is missing; remove it and evaluate"):
        read_results(copy)


def test_a_bf16_export_has_the_loss_of_its_run(run, folders, capsys):
    text = ("--data", run.parent / "text.md", "--seq-len", 16, "--samples", 4)
    own, exported = (evaluated(capsys, where, *text)["bf16"]["text"] for where in (run, folders["hf"]))
    # the export lacks rows of tokens that pad the vocabulary, 92 of 384, whose probabilities are about equal
    assert own["all"]["tokens"] == exported["all"]["tokens"]
    assert 0 < own["all"]["loss"] - exported["all"]["loss"] < 0.5


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_a_checkpoint_in_nvfp4_is_measured_with_its_own_codes(layout, run, folders, capsys):
    model = open_model(folders[layout], torch.device("cpu"))
    layers, stored = model.layers("nvfp4"), open_trained(run)
    weights = forward_weights(stored.converted("meta"))
    packed = open_hf(folders[layout]).packed()
    assert list(packed) == list(weights)
    for name, held in zip(packed, layers, strict=True):
        own = torch.cat([q.dequantize(torch.float32) for q in weights[name].quantized(stored.state[name])])
        operand = held.weight
        assert torch.equal(operand.values.float() * operand.scale, own)
        assert held.amax is not None
    found = evaluated(
        capsys, folders[layout], "--recipe", "nvfp4", "--data", run.parent / "text.md", "--seq-len", 16
    )
    assert 0 < found["nvfp4"]["text"]["all"]["divergence"] < 1e-3


def test_any_recipe_can_be_measured_on_a_bf16_model(run, folders, capsys):
    text = ("--data", run.parent / "text.md", "--seq-len", 16)
    costs = {
        recipe: evaluated(capsys, folders["hf"], "--recipe", recipe, *text)[recipe]["text"]["all"][
            "divergence"
        ]
        for recipe in ("fp8", "nvfp4", "mxfp4")
    }
    assert 0 < costs["fp8"] < costs["nvfp4"] < costs["mxfp4"]


def test_held_weights_are_quantized_with_the_amax_that_training_uses(tmp_path):
    recipe = "{base: nvfp4, fprop: {rhs: {amax_policy: delayed}}, dgrad: {rhs: {amax_policy: delayed}}}"
    stored = open_trained(trained(tmp_path, recipe, pattern="TTTT"))
    weights, model = forward_weights(stored.converted("meta")), stored.converted("cpu")
    names = {module: f"{name}.weight" for name, module in model.named_modules()}
    layers = recipe_layers(model)
    assert len(layers) == len(weights) > 0
    for held in layers:
        name = names[held.layer]
        (q,) = weights[name].quantized(stored.state[name])
        assert weights[name].amax is not None
        assert torch.equal(held.weight.values.float() * held.weight.scale, q.dequantize(torch.float32))


def test_text_prepared_with_another_tokenizer_is_named(run, tmp_path, capsys):
    other = tmp_path / "other.md"
    other.write_text("Quite another text, with quite other words. " * 400)
    assert main(["data", "prepare", str(other), "--out", str(tmp_path / "data"), "--vocab-size", "384"]) == 0
    capsys.readouterr()
    error = refused(capsys, run, "--data", tmp_path / "data")
    assert "prepared with another tokenizer than the model's" in error


def test_a_truncated_file_is_named_and_nothing_changes(folders, tmp_path, capsys):
    shutil.copytree(folders["modelopt"], tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    error = refused(capsys, tmp_path / "model", "--recipe", "nvfp4")
    assert str(file) in error
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before


def test_a_checkpoint_of_another_version_is_named_and_kept(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("evaluations"))
    state = tmp_path / "run" / "checkpoints" / "step_2" / "state.json"
    content = json.loads(state.read_text()) | {"version": 3}
    state.write_text(json.dumps(content))
    error = refused(capsys, tmp_path / "run")
    assert "version must be 1 or 2, got 3" in error
    assert json.loads(state.read_text()) == content
    assert not (tmp_path / "run" / "evaluations").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--no-text",), "--no-text: leaves nothing to evaluate"),
        (("--samples", 0), "--samples: must be at least 1"),
        (("--recipe", "nvfp5"), "'nvfp5'"),
        (("--tasks", "mmlu_pro", "--datasets", "nowhere"), "--datasets nowhere: no such folder"),
        (("--data", "nowhere.md"), "nowhere.md"),
    ],
)
def test_wrong_options_are_one_line(run, capsys, options, message):
    assert message in refused(capsys, run, *options)


def test_a_folder_without_a_model_is_named(tmp_path, capsys):
    assert "neither a run" in refused(capsys, tmp_path)


def test_two_processes_find_what_one_does_and_one_of_them_writes(run, tmp_path):
    """Samples of an odd number, so that the last batch of one of them counts for nothing."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("evaluations"))
    words = ["eval", str(copy), "--samples", "5", "--batch", "1", "--device", "cpu", "--recipe", "trained"]
    assert main(words) == 0
    stored = copy / "evaluations" / "step_2.json"
    alone = json.loads(stored.read_text())
    stored.unlink()
    ended = torchrun(2, words)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("results: ") == 1
    assert json.loads(stored.read_text()) == alone


def test_an_error_that_all_ranks_find_is_reported_once(run):
    ended = torchrun(2, ["eval", str(run), "--recipe", "mxfp5", "--device", "cpu"])
    assert ended.returncode != 0
    assert ended.stderr.count("mxfp5") == 1
