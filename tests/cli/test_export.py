"""`fourbits export`: a run becomes a folder that transformers loads, and errors are one line with code 2."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fourbits.cli.main import main
from fourbits.exchange.folder import load_hf
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.provenance import recorded_recipe
from fourbits.train.load_run import load_trained
from support.small_runs import trained


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("trained"))


def export(*argv: Any) -> int:
    return main(["export", *map(str, argv)])


def test_a_run_is_exported_whole(run, tmp_path, capsys):
    out = tmp_path / "new" / "model"
    assert export(run, "--out", out, "--dtype", "fp32") == 0
    recipe = get_recipe("nvfp4")
    printed = capsys.readouterr().out
    assert printed.startswith(f"{out}: LlamaForCausalLM of step 2, fp32, ")
    assert f"trained with nvfp4 ({recipe.digest}); " in printed
    assert printed.endswith(" weights read back, all equal\n")
    assert recorded_recipe(json.loads((out / "config.json").read_text())) == recipe

    ours = load_trained(run)
    words: Any = AutoTokenizer.from_pretrained(out)
    loaded: Any = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.config.fourbits["recipe_hash"] == recipe.digest
    assert loaded.dtype == torch.float32
    size = ours.tokenizer.size
    assert torch.equal(loaded.lm_head.weight, ours.model.head.weight[:size])
    assert torch.equal(load_hf(out).embed.weight, ours.model.embed.weight[:size])
    assert words("sixteen codes")["input_ids"] == ours.tokenizer.encode("sixteen codes")
    batch = words(["one scale", "sixteen codes and one scale"], padding=True, return_tensors="pt")
    assert loaded.generate(**batch, max_new_tokens=4).shape[0] == 2
    # A copy saved by transformers keeps the entry.
    loaded.save_pretrained(tmp_path / "copy")
    assert recorded_recipe(json.loads((tmp_path / "copy" / "config.json").read_text())) == recipe


def test_the_default_is_bf16(run, tmp_path):
    assert export(run, "--out", tmp_path) == 0
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nothing", "--out", "x"], "fourbits export: nothing: not a run folder"),
        (["{run}"], "fourbits export: the following arguments are required: --out"),
        (["{run}", "--out", "{file}"], "{file}: "),
        (["{run}", "--out", "x", "--dtype", "fp8"], "invalid choice: 'fp8'"),
        (["{run}", "--out", "x", "--overwrite"], "unknown option --overwrite"),
    ],
)
def test_an_error_is_one_line_with_code_2(argv, message, run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    names = {"run": run, "file": tmp_path / "file"}
    try:
        code = export(*(word.format(**names) for word in argv))
    except SystemExit as stop:  # argparse exits by itself
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2
    assert message.format(**names) in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "x").exists()
    assert (tmp_path / "file").read_text() == "mine"


def test_a_model_that_transformers_lacks_is_refused_in_one_line(tmp_path, capsys):
    run = trained(tmp_path, pattern="T-")
    capsys.readouterr()
    assert export(run, "--out", tmp_path / "x") == 2
    error = capsys.readouterr().err
    assert error.startswith("fourbits export: exchange: no supported transformers class has the pattern 'T-'")
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "x").exists()
