"""`fourbits compare` and `fourbits demo` on the command line."""

import html
import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest

from fourbits.cli import compare as compare_module
from fourbits.cli.commands import COMMANDS, load
from fourbits.cli.compare import words
from fourbits.cli.main import main
from fourbits.cli.parser import parse
from fourbits.cli.program import command_line
from fourbits.compare.compare import Commands
from fourbits.compare.run.run_matrix import RunMatrix

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
    assert lines[5] == "Tokens and time to the loss that bf16 had after 90 and 100 % of its tokens"
    assert lines[-1] == f"report: {(tmp_path / 'out' / 'report.html').as_uri()}"


def test_averaged_weights_are_compared_beside_the_last_ones(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    saved = ["--train.checkpoint_interval", "1", "--train.keep_checkpoints", "3"]
    argv = ["compare", str(config), "--seeds", "0", "1", "--out", str(tmp_path / "out"), "--jobs", "1"]
    assert main([*argv, "--average", "3", *saved]) == 0
    out = capsys.readouterr().out
    assert "Mean of the weights of the last checkpoints" in out
    base, nvfp4 = json.loads((tmp_path / "out" / "table.json").read_text())["averaged"]
    assert (base["recipe"], base["gap_nats"], base["seeds"]) == ("bf16", None, 2)
    kept = [
        json.loads((tmp_path / "out" / recipe / f"seed{seed}" / "averaged.json").read_text())["val_loss"]
        for recipe in ("nvfp4", "bf16")
        for seed in (0, 1)
    ]
    assert nvfp4["gap_nats"]["mean"] == pytest.approx((kept[0] - kept[2] + kept[1] - kept[3]) / 2, abs=1e-12)
    assert nvfp4["deviation"] != nvfp4["last_deviation"]
    assert main([*argv, "--average", "3", *saved, "--json"]) == 0  # reads what is kept


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--average", "3"],
            "train.keep_checkpoints must be at least 3, got 2. Add --train.keep_checkpoints 3.",
        ),
        (
            ["--average", "3", "--train.keep_checkpoints", "3", "--train.checkpoint_interval", "2"],
            "at most the number of checkpoints, 2 in 4 steps with train.checkpoint_interval 2, got 3.",
        ),
        (["--average", "0"], "--average: must be at least 1, got 0."),
    ],
)
def test_an_average_of_checkpoints_that_will_not_exist_is_refused(
    config: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
):
    assert main(["compare", str(config), *options]) == 2
    assert message in capsys.readouterr().err


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
        (["--ablate", "rhtt"], "Techniques: rht, sr, 2d, 4over6, bf16-blocks."),
        (["--ablate", "4over6"], "nvfp4 does not use 4over6. It uses rht, sr, 2d, bf16-blocks."),
        (["--ablate", "rht", "rht"], "--ablate: the technique rht is repeated."),
        (["--ablate", "rht", "--recipes", "nvfp4", "mxfp4"], "one besides bf16, got nvfp4, mxfp4."),
        (["--ablate", "rht", "--recipes", "bf16"], "one besides bf16, got none."),
        (["--stop-early"], "two seeds or more, got 2 and 1."),
        (["--stop-early", "--recipes", "nvfp4", "--seeds", "0", "1"], "two recipes and two seeds"),
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


def test_the_command_that_resumes_a_comparison_has_all_of_its_options(tmp_path: Path):
    argv = ["tiny", "--recipes", "bf16", "my recipe.yaml", "--seeds", "0", "2", "--train.tokens", "1e6"]
    args = parse("compare", load("compare"), argv)
    assert command_line(words(args, tmp_path / "out")) == (
        "fourbits compare tiny --recipes bf16 'my recipe.yaml' --seeds 0 2 "
        f"--out {tmp_path / 'out'} --train.tokens 1e6"
    )
    args = parse("compare", load("compare"), ["tiny", "--techniques"])
    assert command_line(words(args, tmp_path)) == (
        f"fourbits compare tiny --recipes bf16 nvfp4 --seeds 0 --techniques --out {tmp_path}"
    )
    args = parse("compare", load("compare"), ["tiny", "--ablate", "rht", "sr", "--stop-early"])
    assert command_line(words(args, tmp_path)) == (
        f"fourbits compare tiny --recipes bf16 nvfp4 --seeds 0 --ablate rht sr --stop-early --out {tmp_path}"
    )


def repeats(page: str) -> list[list[str]]:
    """The commands below "To repeat it", as words."""
    block = page.split("To repeat it</h3>\n<pre>")[1].split("</pre>")[0]
    return [shlex.split(html.unescape(line)) for line in block.splitlines()]


def test_the_commands_to_repeat_a_comparison_repeat_it(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", str(config), "--recipes", "bf16", "nvfp4", "--out", "out", "--jobs", "1"]) == 0
    change, whole, one = repeats((tmp_path / "out/report.html").read_text())
    assert change == ["cd", str(tmp_path)]
    assert (whole[0], one[0]) == ("fourbits", "fourbits")
    monkeypatch.chdir("/")
    monkeypatch.chdir(change[1])
    assert main(whole[1:]) == 0
    assert main(one[1:]) == 0
    capsys.readouterr()
    first, again = (losses(tmp_path / name) for name in ("out", "out-again"))
    assert len(first) == 2
    assert first == again
    run = json.loads((tmp_path / "out-again-bf16-seed0/summary.json").read_text())
    assert run["val_loss"] == first["bf16"]


def losses(out: Path) -> dict[str, float]:
    rows = json.loads((out / "table.json").read_text())["rows"]
    return {row["recipe"]: row["val_loss"] for row in rows}


def test_the_commands_to_repeat_a_run_repeat_it(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(config), "--out", "out"]) == 0
    change, again = repeats((tmp_path / "out/report.html").read_text())
    assert change == ["cd", str(tmp_path)]
    assert main(again[1:]) == 0
    capsys.readouterr()
    first, second = (
        json.loads((tmp_path / name / "summary.json").read_text()) for name in ("out", "out-again")
    )
    assert first["val_loss"] == second["val_loss"]


@pytest.mark.parametrize(
    ("options", "recipes", "seeds"),
    [
        ([], ("bf16", "nvfp4"), (0,)),
        (["--full"], ("bf16", "fp8", "mxfp4", "nvfp4", "nvfp4-naive"), (0, 1, 2)),
    ],
)
def test_the_demo_measures_techniques_and_trains_few_recipes_unless_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], recipes: tuple, seeds: tuple
):
    seen: dict[str, Any] = {}

    def compare(
        matrix: RunMatrix,
        progress: object,
        commands: Commands,
        jobs: object,
        *,
        techniques: bool,
        stop_early: bool,
        average: int,
    ):
        assert (stop_early, average) == (False, 1)
        seen.update(matrix=matrix, commands=commands, techniques=techniques)
        raise ValueError("stop here")

    monkeypatch.setattr(compare_module, "compare", compare)
    assert main(["demo", "--out", str(tmp_path / "demo"), *options]) == 2
    assert (seen["matrix"].recipes, seen["matrix"].seeds, seen["techniques"]) == (recipes, seeds, True)
    assert seen["commands"].resume == shlex.join(
        ["fourbits", "demo", *options, "--out", str(tmp_path / "demo")]
    )
    whole = shlex.split(seen["commands"].repeat[1])
    again = parse("compare", load("compare"), whole[2:])
    assert (tuple(again.recipes), tuple(again.seeds), again.techniques) == (recipes, seeds, True)
    assert again.jobs >= 1
    assert int(again.overrides["train.threads"]) >= 1


def test_techniques_need_a_bf16_run(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    argv = ["compare", str(config), "--recipes", "nvfp4", "--techniques", "--out", str(tmp_path / "out")]
    assert main(argv) == 2
    assert "Add bf16 to --recipes." in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_comparison_with_techniques_shows_and_stores_them(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    argv = ["compare", str(config), "--techniques", "--recipes", "bf16", "--out", str(out)]
    assert main(argv) == 0
    page = (out / "report.html").read_text()
    assert page.index("What each technique fixes") < page.index("<h2>Losses</h2>")
    assert "Quantizing every block changes the trained model" in page.split("</h1>")[0]
    found = json.loads((out / "techniques.json").read_text())
    assert {each["recipe"] for each in found["gradients"]} == {"fp8", "mxfp4", "nvfp4", "nvfp4-naive"}
    assert "var(--" not in (out / "techniques.svg").read_text()
    capsys.readouterr()


@pytest.mark.parametrize("name", ["compare", "demo"])
def test_the_example_of_the_help_parses(name: str):
    command = load(name)
    words = command.EXAMPLE.split()
    assert words[:2] == ["fourbits", name]
    parse(name, command, words[2:])
    assert name in COMMANDS
