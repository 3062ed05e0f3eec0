"""A trained run is measured once per checkpoint: every layer, every format, without changing the model."""

import json
from pathlib import Path

import pytest
import torch

from fourbits.compare.techniques import measure as module
from fourbits.compare.techniques.findings import Techniques
from fourbits.compare.techniques.measure import FORMATS, GRADIENTS, TECHNIQUES_JSON, measure, measure_once
from fourbits.compare.techniques.trained import TrainedModel, without_kept_blocks
from fourbits.train.config import RunConfig
from fourbits.train.run import run


@pytest.fixture(scope="module")
def folder(small_run: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bf16") / "run"
    run(small_run, path)
    return path


@pytest.fixture(scope="module")
def found(folder: Path) -> Techniques:
    return measure(folder)


def test_every_layer_is_measured_in_every_format(found: Techniques):
    assert found.step == 8
    assert len(found.layers) == 6  # q, k, v, o, up, down; not the head
    assert {(each.layer, each.recipe, each.operand) for each in found.operands} == {
        (layer, recipe, operand)
        for layer in found.layers
        for recipe in FORMATS
        for operand in ("X", "W", "dY")
    }
    assert [each.layer for each in found.transforms] == [*found.layers, *found.layers]
    assert {each.recipe for each in found.gradients} == set(GRADIENTS)


def test_gradients_of_finer_formats_have_less_error(found: Techniques):
    error = {each.recipe: each.error for each in found.gradients if each.batch == 0}
    assert error["fp8"] < error["nvfp4"] < error["mxfp4"]


def test_bias_is_at_most_the_error_and_cosine_follows_from_both(found: Techniques):
    for each in found.gradients:
        assert each.bias <= each.error * (1 + 1e-9)
        # |g - e|^2 = |g|^2 + |e|^2 - 2 g e, so a small error means a cosine near one.
        assert each.cosine > 1 - each.error**2


def test_measuring_twice_gives_the_same_numbers(folder: Path, found: Techniques):
    assert measure(folder) == found


def test_measuring_leaves_the_model_in_bf16(folder: Path):
    trained = TrainedModel.of_run(folder)
    before = trained.gradients(trained.batches[0])
    trained.gradients(trained.batches[0], without_kept_blocks("nvfp4"))
    after = trained.gradients(trained.batches[0])
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {type(layer).__name__ for layer in trained.layers.values()} == {"Linear"}


def test_recorded_tensors_are_those_that_the_layers_multiply(folder: Path):
    trained = TrainedModel.of_run(folder)
    exact = trained.gradients(trained.batches[0])
    for each in trained.tensors(trained.batches[0]):
        torch.testing.assert_close(each.dy.float().t() @ each.x.float(), exact[each.name])


def test_findings_are_reused_for_the_same_checkpoint_only(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / TECHNIQUES_JSON
    first = measure_once(folder, path)
    monkeypatch.setattr(module, "measure", lambda run: pytest.fail("measured again"))
    assert measure_once(folder, path) == first
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "checkpoint": "another"}))
    with pytest.raises(pytest.fail.Exception):
        measure_once(folder, path)


def test_a_run_without_a_layer_to_quantize_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fourbits.compare.techniques.trained.without_kept_blocks", lambda name: "bf16")
    with pytest.raises(ValueError, match="must have a linear layer that nvfp4 quantizes"):
        TrainedModel.of_run(folder)
