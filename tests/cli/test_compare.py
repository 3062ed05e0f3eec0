"""`fourbits compare` and `fourbits demo` on the command line."""

import json
import random
from pathlib import Path

import pytest

from fourbits.cli.commands import COMMANDS, load
from fourbits.cli.compare import command_line
from fourbits.cli.main import main
from fourbits.cli.parser import parse

TEXT = "every block has a scale and every tensor has one more"
SMALL = """
model: {{vocab_size: 384, d_model: 32, pattern: "-", d_ffn: 64}}
data: {{paths: ["{text}"], vocab_size: 384}}
train: {{steps: 4, micro_batch_size: 1, seq_len: 32, validation_interval: 2, validation_samples: 1,
  threads: 1, device: cpu, compile: none}}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    rng = random.Random(0)
    (folder / "text.txt").write_text(
        " ".join(rng.choice(TEXT.split()) for _ in range(3000)), encoding="utf-8"
    )
    (folder / "small.yaml").write_text(SMALL.format(text=folder / "text.txt"), encoding="utf-8")
    return folder / "small.yaml"


def test_a_comparison_prints_its_table_and_the_location_of_the_report(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    argv = ["compare", str(config), "--recipes", "bf16", "nvfp4", "--out", str(tmp_path / "out")]
    assert main([*argv, "--jobs", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["bf16", "nvfp4"]
    assert "1 seed (0)" in lines[3]
    assert lines[4] == f"report: {(tmp_path / 'out' / 'report.html').as_uri()}"


def test_with_json_stdout_is_table_json_and_nothing_else(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    argv = ["compare", str(config), "--recipes", "bf16", "--out", str(tmp_path / "out"), "--json"]
    assert main([*argv, "--train.steps", "2"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["steps"] == 2
    assert record == json.loads((tmp_path / "out" / "table.json").read_text())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recipes", "nvfp5"], "nvfp4"),
        (["--recipes", "bf16", "bf16"], "fourbits compare: --recipes: the recipe bf16 is repeated."),
        (["--recipe", "bf16"], "--recipes"),
        (["--recipe.wgrad.lhs.rht", "0"], "--recipes"),
        (["--train.seed", "3"], "--seeds"),
        (["--train.stepz", "3"], "steps"),
        (["--seeds", "x"], "--seeds"),
        (["--jobs", "0"], "--jobs must be at least 1"),
    ],
)
def test_an_error_names_what_to_use_instead(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
):
    try:
        code = main(["compare", str(config), "--out", str(tmp_path / "out"), *options])
    except SystemExit as stop:  # argparse exits by itself
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert len(error.splitlines()) <= 2
    assert not (tmp_path / "out").exists()


def test_the_stored_command_reproduces_the_comparison(tmp_path: Path):
    argv = ["tiny", "--recipes", "bf16", "my recipe.yaml", "--seeds", "0", "2", "--train.tokens", "1e6"]
    args = parse("compare", load("compare"), argv)
    line = command_line(args, tmp_path / "out")
    assert line == (
        "fourbits compare tiny --recipes bf16 'my recipe.yaml' --seeds 0 2 "
        f"--out {tmp_path / 'out'} --train.tokens 1e6"
    )
    args = parse("compare", load("compare"), ["tiny", "--jobs", "2"])
    assert command_line(args, tmp_path) == (
        f"fourbits compare tiny --recipes bf16 nvfp4 --seeds 0 --out {tmp_path} --jobs 2"
    )


@pytest.mark.parametrize("name", ["compare", "demo"])
def test_the_example_of_the_help_parses(name: str):
    command = load(name)
    words = command.EXAMPLE.split()
    assert words[:2] == ["fourbits", name]
    parse(name, command, words[2:])
    assert name in COMMANDS
