"""`fourbits train`: its output, its run folder, and its exit codes."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from torch._dynamo import config as dynamo_config

from fourbits import compile_notice
from fourbits.cli import train as command
from fourbits.cli.main import main
from fourbits.quant.cpu import compiled
from fourbits.train import trainer
from fourbits.train.listener import ProgressPrinter
from fourbits.train.metrics import read_metrics

SETTINGS = {
    "model": "{vocab_size: 384, d_model: 16, pattern: '*-', d_ffn: 32, "
    "num_heads: 1, num_kv_heads: 1, head_dim: 16}",
    "data": "{vocab_size: 384, paths: [%s]}",
    "train": "{steps: 4, micro_batch_size: 2, seq_len: 16, validation_samples: 2, compile: none, threads: 1}",
}


@pytest.fixture
def config(tmp_path):
    text = tmp_path / "text.md"
    text.write_text("Every block has sixteen codes and one scale. " * 400)
    path = tmp_path / "run.yaml"
    path.write_text("\n".join(f"{key}: {value}" for key, value in SETTINGS.items()) % text)
    return path


def train(*argv):
    return main(["train", *map(str, argv)])


def test_a_run_prints_its_precision_table_and_its_result(config, tmp_path, capsys):
    assert train(config, "--out", tmp_path / "run", "--recipe.keep_bf16.last_blocks", "1") == 0
    out, err = capsys.readouterr()
    assert "blocks.0.attention" not in out
    assert [line for line in out.splitlines() if "blocks.0.mixer.q_proj" in line and "nvfp4" in line]
    assert [line for line in out.splitlines() if "blocks.1.mixer.up_proj" in line and "last 1 of 2" in line]
    assert "finished after 4 steps, 128 tokens: validation loss" in out
    assert "training: step 4/4  loss" in err
    assert f"report: {tmp_path / 'run' / 'report.html'}" in out
    assert "validation loss" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("how", ["none", "regions"])
def test_a_run_whose_first_step_compiles_says_so_before_it(config, tmp_path, capsys, monkeypatch, how):
    monkeypatch.setattr(trainer, "compile_model", lambda model, how: None)
    assert train(config, "--out", tmp_path / "run", "--train.compile", how) == 0
    assert ("the first step compiles the model" in capsys.readouterr().out) == (how == "regions")


def test_with_torch_compile_disabled_a_run_is_that_of_uncompiled_code_and_a_warning_says_so(
    config, tmp_path, caplog, monkeypatch
):
    assert train(config, "--out", tmp_path / "uncompiled") == 0
    monkeypatch.setattr(compiled, "COMPILE_FROM", 1)
    compile_notice._warn_of_disabled.cache_clear()
    with dynamo_config.patch(disable=True), caplog.at_level("WARNING", logger="fourbits"):
        assert train(config, "--out", tmp_path / "disabled", "--train.compile", "regions") == 0
    assert "torch.compile is disabled" in caplog.text
    losses = [
        read_metrics(tmp_path / name / "metrics.jsonl")[0]["loss"] for name in ("uncompiled", "disabled")
    ]
    assert losses[0] == losses[1]


def test_json_is_the_summary_and_nothing_else(config, tmp_path, capsys):
    assert train(config, "--out", tmp_path / "run", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())


def test_a_finished_run_is_reported_as_finished_again(config, tmp_path, capsys):
    for _ in range(2):
        assert train(config, "--out", tmp_path / "run") == 0
    assert "is finished (4 steps); nothing to do" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_stopped_run_exits_by_its_signal_and_its_config_resumes_it(
    config, tmp_path, capsys, monkeypatch, number, code
):
    step = ProgressPrinter.step

    def step_and_signal(self, record):
        step(self, record)
        if record["step"] == 2:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(command.TrainPrinter, "step", step_and_signal)
    assert train(config, "--out", tmp_path / "run") == code
    out, err = capsys.readouterr()
    assert f"resume with: fourbits train {tmp_path / 'run' / 'config.yaml'}" in out
    assert "stopping after this step" in err
    monkeypatch.undo()
    assert train(tmp_path / "run" / "config.yaml") == 0
    assert "continuing from" in capsys.readouterr().err
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 5


def test_the_config_of_a_run_without_its_manifest_belongs_to_it_too(config, tmp_path, capsys):
    run = tmp_path / "run"
    assert train(config, "--out", run, "--train.checkpoint_interval", "2") == 0
    for name in ("manifest.json", "summary.json"):  # as of a copy of an unfinished run
        (run / name).unlink()
    shutil.rmtree(run / "checkpoints/step_4")
    assert train(run / "config.yaml") == 0
    assert f"continuing from {run / 'checkpoints/step_2'}" in capsys.readouterr().err
    assert (run / "manifest.json").is_file()


def test_without_out_a_run_gets_a_new_folder_in_runs(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train(config) == 0
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("run-")
    assert (folder / "summary.json").is_file()


def test_the_config_of_a_run_reproduces_it_in_another_folder(config, tmp_path):
    assert train(config, "--out", tmp_path / "one") == 0
    assert train(tmp_path / "one" / "config.yaml", "--out", tmp_path / "two") == 0
    weights = [
        (tmp_path / name / "checkpoints/step_4/model.safetensors").read_bytes() for name in ("one", "two")
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["tinny"], "Did you mean 'tiny'?"),
        (["absent.yaml"], "absent.yaml: No such file or directory"),
        (["tiny", "--optim.lrr", "1"], "Did you mean 'lr'?"),
        (["tiny", "--data.paths", "/absent/text"], "/absent/text"),
        (["tiny", "--train.device", "gpu"], "device must be one of"),
        (["tiny", "--train.backend", "native"], "backend native: FP4 tensor cores need"),
        ([], "CONFIG must be given"),
        (["tiny", "--from", "/absent"], "--from /absent: not a run folder"),
    ],
)
def test_incorrect_usage_is_one_line_and_exit_code_2(argv, text, tmp_path, capsys):
    assert train(*argv, "--out", tmp_path / "run") == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1


def test_text_smaller_than_one_batch_is_refused(config, tmp_path, capsys):
    assert train(config, "--out", tmp_path / "run", "--train.micro_batch_size", "100000") == 2
    assert "smaller than one batch" in capsys.readouterr().err


def test_a_diverged_run_exits_with_1_and_names_the_step(config, tmp_path, capsys):
    wild = ("--optim.lr", "1e30", "--optim.grad_clip", "null", "--optim.warmup_share", "0")
    assert train(config, "--out", tmp_path / "run", *wild) == 1
    assert "step 2: " in capsys.readouterr().err
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.parametrize("wild", [(), ("--optim.lr", "1e30", "--optim.grad_clip", "null")])
def test_an_error_in_the_report_does_not_hide_how_the_run_ended(config, tmp_path, capsys, monkeypatch, wild):
    def broken(folder, commands):
        raise KeyError("val_loss")

    monkeypatch.setattr(command, "write_run_report", broken)
    assert train(config, "--out", tmp_path / "run", *wild) == 1
    out, err = capsys.readouterr()
    assert "the report was not written: KeyError: 'val_loss'" in err
    assert "report:" not in out
    assert ("finished after 4 steps" in out) != bool(wild)
    assert ("is not finite" in err.splitlines()[-1]) == bool(wild)


def test_from_without_a_config_takes_that_of_the_run_and_a_new_folder(config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train(config, "--out", "one", "--train.checkpoint_interval", "2", "--recipe", "bf16") == 0
    assert train("--from", "one/checkpoints/step_2", "--optim.lr", "1e-4", "--train.steps", "5") == 0
    (new,) = Path("runs").iterdir()
    assert new.name.startswith("one-")
    assert "finished after 5 steps" in capsys.readouterr().out
    assert len((new / "metrics.jsonl").read_text().splitlines()) == 2 + 3 + 1
    assert train("--from", "one", "--out", "one", "--train.steps", "9") == 2
    assert "one: holds another run. Choose another --out." in capsys.readouterr().err


def test_the_remedy_after_a_divergence_works(config, tmp_path, capsys):
    """The command that the error names, with its placeholders filled in."""
    wild = ("--optim.lr", "1e30", "--optim.grad_clip", "null", "--optim.warmup_share", "0.75")
    quiet = ("--train.steps", "6", "--train.checkpoint_interval", "1", "--recipe", "bf16")
    assert (
        train(
            config, "--out", tmp_path / "a", *quiet, "--optim.warmup_share", "0", "--train.time_limit", "60"
        )
        == 0
    )
    assert (
        train(
            "--from",
            tmp_path / "a" / "checkpoints" / "step_5",
            "--out",
            tmp_path / "b",
            *wild,
            "--train.steps",
            "9",
        )
        == 1
    )
    line = capsys.readouterr().err.splitlines()[-1]
    advised = line.partition("fourbits train ")[2].partition(". (rerun")[0]
    words = advised.replace("NEW", str(tmp_path / "c")).replace("LOWER", "1e-4").split()
    assert train(*words, "--optim.grad_clip", "1.0") == 0
