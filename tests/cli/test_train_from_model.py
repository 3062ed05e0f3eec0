"""`fourbits train CONFIG --from FOLDER`: a run starts from a transformers model, in BF16, NVFP4 or FP8."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fourbits.cli.main import main
from fourbits.exchange.folder import load_hf
from fourbits.train.checkpoint import checkpoints
from fourbits.train.load_run import open_trained
from fourbits.train.metrics import MEASURED, read_metrics
from support.small_runs import trained

STORED = {
    "hf": "floating-point",
    "modelopt": "modelopt",
    "compressed-tensors": "compressed-tensors",
    "fp8": "fp8",
}
CONFIG = """
model: {{vocab_size: 384, d_model: 16, pattern: "T", d_ffn: 32, num_heads: 1, num_kv_heads: 1, head_dim: 16}}
data: {{paths: ["{text}"]}}
train: {{steps: 3, micro_batch_size: 2, seq_len: 16, validation_samples: 2, compile: none, threads: 1,
  device: cpu, checkpoint_interval: 1, keep_checkpoints: 9}}
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A model in every form that is read; and "text" and "config"."""
    root = tmp_path_factory.mktemp("models")
    run = trained(root, pattern="TT", width=32)
    for name in STORED:
        options = [] if name in ("hf", "fp8") else ["--format", name, "--scales", "separate"]
        assert main(["export", str(run), *options, "--out", str(root / name)]) == 0
    as_fp8(root / "fp8")
    (root / "config.yaml").write_text(CONFIG.format(text=root / "text.md"))
    return {path.name: path for path in root.iterdir()} | {"config": root / "config.yaml"}


def as_fp8(folder: Path) -> None:
    """Store the projections of a BF16 export in E4M3 blocks of 16 x 16, as DeepSeek does."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].float()
        blocks = weight.unflatten(0, (-1, 16)).unflatten(2, (-1, 16))
        scales = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
        tensors[name] = codes
        tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps(config))


def train(*argv: Any) -> int:
    return main(["train", *map(str, argv)])


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


def comparable(out: Path) -> list[dict[str, Any]]:
    records = read_metrics(out / "metrics.jsonl")
    return [{key: value for key, value in record.items() if key not in MEASURED} for record in records]


@pytest.mark.parametrize("form", STORED)
def test_a_run_starts_with_the_weights_and_tokenizer_of_the_model(form, folders, tmp_path):
    out = tmp_path / "run"
    assert train(folders["config"], "--from", folders[form], "--out", out, "--train.steps", 1) == 0
    first, model = weights(out / "checkpoints" / "step_0"), load_hf(folders[form])
    for name, tensor in model.named_parameters():
        assert torch.equal(first[name][: len(tensor)], tensor), name
        assert not first[name][len(tensor) :].any()
    assert first["embed.weight"].shape[0] == 384 > model.config.vocab_size
    assert open_trained(out).tokenizer.serialized() == (out / "tokenizer.json").read_bytes()
    own = json.loads((out / "manifest.json").read_text())["ancestry"]
    assert [(entry["model"], entry["stored_as"]) for entry in own] == [(str(folders[form]), STORED[form])]


def test_a_killed_run_continues_without_the_folder_with_equal_bits(folders, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(folders["modelopt"], model)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert train(folders["config"], "--from", model, "--out", whole) == 0
    shutil.copytree(whole, cut)
    (cut / "summary.json").unlink()
    for number in (1, 2, 3):  # as if it was killed in its first step
        shutil.rmtree(cut / "checkpoints" / f"step_{number}")
    before = json.loads((cut / "manifest.json").read_text())
    shutil.rmtree(model)
    assert train(cut / "config.yaml") == 0
    assert comparable(cut) == comparable(whole)
    for one, other in zip(checkpoints(cut / "checkpoints"), checkpoints(whole / "checkpoints"), strict=True):
        assert all(torch.equal(tensor, weights(other)[name]) for name, tensor in weights(one).items())
    after = json.loads((cut / "manifest.json").read_text())
    assert after["ancestry"] == before["ancestry"]
    assert after["hashes"] == before["hashes"]


def test_the_same_command_again_is_finished(folders, tmp_path, capsys):
    argv = (folders["config"], "--from", folders["hf"], "--out", tmp_path / "run", "--train.steps", 1)
    assert train(*argv) == 0
    assert train(*argv) == 0
    assert "nothing to do" in capsys.readouterr().err


def test_a_fork_of_such_a_run_records_both(folders, tmp_path):
    assert train(folders["config"], "--from", folders["hf"], "--out", tmp_path / "a", "--train.steps", 1) == 0
    assert train("--from", tmp_path / "a", "--out", tmp_path / "b", "--train.steps", 2) == 0
    own = json.loads((tmp_path / "b" / "manifest.json").read_text())["ancestry"]
    assert [entry.get("model") or entry["run"] for entry in own] == [str(folders["hf"]), str(tmp_path / "a")]


def test_text_with_another_tokenizer_is_named_and_nothing_is_left(folders, tmp_path, capsys):
    other = tmp_path / "other.md"
    other.write_text("Quite another text, with quite other words. " * 400)
    assert main(["data", "prepare", str(other), "--out", str(tmp_path / "data"), "--vocab-size", "384"]) == 0
    capsys.readouterr()
    argv = ("--from", folders["hf"], "--out", tmp_path / "run", "--data.paths", tmp_path / "data")
    assert train(folders["config"], *argv) == 2
    error = capsys.readouterr().err
    assert (
        f"--from {folders['hf']}: the text must have the model's tokenizer, got that of {tmp_path / 'data'}"
        in error
    )
    assert not (tmp_path / "run").exists()


def test_text_prepared_with_the_models_tokenizer_is_read(folders, tmp_path):
    prepared = [
        "data",
        "prepare",
        folders["text.md"],
        "--out",
        tmp_path / "data",
        "--tokenizer",
        folders["hf"],
    ]
    assert main([*map(str, prepared)]) == 0
    argv = ("--from", folders["hf"], "--out", tmp_path / "run", "--data.paths", tmp_path / "data")
    assert train(folders["config"], *argv, "--train.steps", 1) == 0


def test_a_truncated_model_is_named_and_nothing_is_left(folders, tmp_path, capsys):
    shutil.copytree(folders["modelopt"], tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    content = file.read_bytes()[:-100]
    file.write_bytes(content)
    assert train(folders["config"], "--from", tmp_path / "model", "--out", tmp_path / "run") == 2
    assert str(file) in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "a transformers model has no settings for training. Also pass a CONFIG"),
        (("config", "--model.d_model", 32), "--model.d_model: the model is that of --from"),
        (("config", "--data.tokenizer", "nowhere.json"), "nowhere.json"),
    ],
)
def test_what_does_not_fit_a_model_is_one_line(argv, message, folders, tmp_path, capsys):
    words = [folders["config"] if word == "config" else word for word in argv]
    assert train(*words, "--from", folders["hf"], "--out", tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()
