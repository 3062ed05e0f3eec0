"""`fourbits train CONFIG --from FOLDER`: a run starts from a DCP checkpoint, with CONFIG's model."""

import json
import pickle
import warnings
from dataclasses import fields
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save

from fourbits.cli.main import main
from fourbits.exchange.dcp.llama import load_dcp
from fourbits.train.load_run import open_trained
from support.llamas import CONFIG, megatron, titan
from support.small_runs import trained

ROWS = 400  # more than the 384 of the tokenizer
RUN = """
model: {model}
data: {{paths: ["{text}"], tokenizer: {tokenizer}}}
train: {{steps: 2, micro_batch_size: 2, seq_len: 16, validation_samples: 2, compile: none, threads: 1,
  device: cpu, checkpoint_interval: 1, keep_checkpoints: 9}}
"""


def model(**changes):
    found = {field.name: getattr(CONFIG, field.name) for field in fields(CONFIG)} | changes
    return json.dumps({name: value for name, value in found.items() if value is not None})


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dcp")
    trained(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(titan(rows=ROWS), checkpoint_id=folder / "titan", no_dist=True)
        save(megatron(rows=ROWS), checkpoint_id=folder / "megatron", no_dist=True)
    return folder


def config(root, out, tokenizer=True, **changes):
    file = out / "config.yaml"
    name = str(root / "run" / "tokenizer.json") if tokenizer else "null"
    file.write_text(RUN.format(model=model(**changes), text=root / "text.md", tokenizer=name))
    return file


def train(*words):
    return main(["train", *map(str, words)])


@pytest.mark.parametrize("writer", ["titan", "megatron"])
def test_a_run_begins_with_the_weights_of_the_checkpoint(root, tmp_path, writer):
    out = tmp_path / "run"
    assert train(config(root, tmp_path), "--from", root / writer, "--out", out) == 0
    first, imported = load_file(out / "checkpoints/step_0/model.safetensors"), load_dcp(root / writer, CONFIG)
    expected = dict(imported.named_parameters())
    assert first.keys() == expected.keys()
    for name, tensor in expected.items():
        assert first[name].equal(tensor.detach()), name
    assert len(first["embed.weight"]) == ROWS
    assert open_trained(out).step == 2
    ancestor = json.loads((out / "manifest.json").read_text())["ancestry"][0]
    writers = {"titan": "torchtitan's DCP", "megatron": "Megatron-LM's DCP"}
    assert (ancestor["model"], ancestor["stored_as"]) == (str(root / writer), writers[writer])
    assert f"starting from {root / writer} ({writers[writer]} weights)" in (out / "log.txt").read_text()


def test_a_run_that_was_cut_continues_when_the_folder_is_gone(root, tmp_path):
    whole, cut, folder = tmp_path / "whole", tmp_path / "cut", tmp_path / "titan"
    folder.mkdir()
    for file in (root / "titan").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    file = config(root, tmp_path)
    assert train(file, "--from", folder, "--out", whole) == 0
    assert train(file, "--from", folder, "--out", cut, "--train.time_limit", "0.000001") == 124
    for each in folder.iterdir():
        each.unlink()
    assert train(file, "--from", folder, "--out", cut, "--train.time_limit", "null") == 0
    ends = [load_file(out / "checkpoints/step_2/model.safetensors") for out in (whole, cut)]
    assert all(tensor.equal(ends[1][name]) for name, tensor in ends[0].items())


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tokenizer": False}, "has no tokenizer. Pass the one that the model was trained with"),
        ({"num_heads": 8}, "attention.wq.weight' must have the shape [64, 32]"),
        ({"pattern": "TTT"}, "'layers.2.attention_norm.weight' is missing"),
    ],
)
def test_what_does_not_fit_is_one_line_and_leaves_no_run(root, tmp_path, capsys, changes, match):
    file = config(root, tmp_path, **changes)
    assert train(file, "--from", root / "titan", "--out", tmp_path / "run") == 2
    errors = capsys.readouterr().err
    assert match in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "run").exists()


def test_a_config_must_be_given(root, capsys):
    assert train("--from", root / "titan") == 2
    assert "a DCP checkpoint has no settings. Also pass a CONFIG with its model." in capsys.readouterr().err


class Runs:
    """Its pickle runs a command."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return Path.touch, (self.proof,)


def test_code_in_a_checkpoint_is_refused_by_name_and_does_not_run(root, tmp_path, capsys):
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    words = (config(root, tmp_path), "--from", tmp_path / "evil", "--out", tmp_path / "run")
    assert train(*words) == 2
    assert "its pickle names pathlib.Path.touch, which" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
