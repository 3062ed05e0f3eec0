"""Comparisons whose recipes continue the baseline's runs."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from fourbits.cli.commands import load
from fourbits.cli.compare import words
from fourbits.cli.parser import parse
from fourbits.cli.program import command_line
from fourbits.compare.compare import Commands, compare
from fourbits.compare.number_format import short_count
from fourbits.compare.run.forked import fork_rounds, forked
from fourbits.compare.run.jobs import Jobs
from fourbits.compare.run.progress import MatrixProgress
from fourbits.compare.run.run_matrix import RunMatrix, build_matrix
from fourbits.train.config import RunConfig
from fourbits.train.run_folder import read_json

COMMANDS = Commands("fourbits compare small", ("fourbits compare small --jobs 1",))


def matrix_of(config: RunConfig, out: Path, *recipes: str, share: float = 0.5) -> RunMatrix:
    return forked(build_matrix(config, "small", recipes, (0, 1), out), share)


def executed(matrix: RunMatrix, stop_early: bool = False) -> StringIO:
    """What a comparison prints about its runs."""
    out = StringIO()
    compare(
        matrix,
        MatrixProgress(matrix, Console(file=out, width=400)),
        COMMANDS,
        Jobs(1, 1),
        stop_early=stop_early,
    )
    return out


@pytest.fixture(scope="module")
def finished(small_run: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> RunMatrix:
    matrix = matrix_of(small_run, tmp_path_factory.mktemp("forked"), "nvfp4-naive", "bf16")
    executed(matrix)
    return matrix


def losses(matrix: RunMatrix, recipe: str, seed: int) -> list[float]:
    """The training loss of every step."""
    path = matrix.out / recipe / f"seed{seed}" / "metrics.jsonl"
    records = map(json.loads, path.read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "train"]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_recipe_has_the_baselines_steps_up_to_the_fork_and_its_own_after_it(finished: RunMatrix, seed: int):
    base, own = losses(finished, "bf16", seed), losses(finished, "nvfp4-naive", seed)
    assert len(base) == len(own) == 8
    assert own[:4] == base[:4]
    assert own[5:] != base[5:]  # the loss of step 5 is that of weights from before


def test_the_baseline_runs_first_and_keeps_the_checkpoint_that_recipes_continue(finished: RunMatrix):
    first, others = fork_rounds(finished) or ((), ())
    assert [finished.runs[number].key for number in first] == ["bf16/seed0", "bf16/seed1"]
    assert [finished.runs[number].key for number in others] == ["nvfp4-naive/seed0", "nvfp4-naive/seed1"]
    for number in others:
        run = finished.runs[number]
        assert run.start_from == finished.out / "bf16" / f"seed{run.seed}" / "checkpoints" / "step_4"
        assert run.start_from is not None
        assert (run.start_from / "state.json").is_file()
        assert read_json(run.folder / "manifest.json")["ancestry"][-1]["step"] == 4


def test_the_page_says_what_the_gaps_are_of(finished: RunMatrix):
    page = " ".join((finished.out / "report.html").read_text().split())
    assert "after 4 of 8 steps, so its gap is what the last 4 steps cost in its precision" in page
    assert (
        "Every other recipe continues bf16&#39;s run of its seed after 4 of 8 steps, on the same batches."
        in page
    )
    assert "start from the same weights" not in page
    tokens = int(read_json(finished.out / "table.json")["tokens_per_run"])
    title = page.split("<h1>")[1].split("</h1>")[0]
    assert f"of which it trained the last {short_count(tokens // 2)}" in title


def test_the_gaps_are_a_picture_with_every_recipe_but_the_baseline(finished: RunMatrix):
    picture = (finished.out / "gaps.svg").read_text()
    assert picture.startswith("<svg ")
    assert "nvfp4-naive" in picture
    row = json.loads((finished.out / "table.json").read_text())["rows"][1]
    assert f"{row['gap_nats']:+.4f}".replace("-", "\N{MINUS SIGN}") in picture


def test_a_rerun_reuses_finished_runs(finished: RunMatrix):
    before = {path: path.stat().st_mtime_ns for path in finished.out.rglob("metrics.jsonl")}
    assert len(before) == 4
    executed(finished)
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize(
    ("recipes", "share", "message"),
    [
        (("bf16", "nvfp4"), 0.0, "must leave steps before and after the fork, got 0 of 8 steps"),
        (("bf16", "nvfp4"), 1.0, "Pass a share between 0 and 1"),
        (("bf16", "nvfp4"), float("nan"), "got nan of 8 steps"),
        (("bf16", "nvfp4"), 0.99, "must leave steps before and after"),
        (("bf16",), 0.5, "got bf16 alone"),
    ],
)
def test_forks_that_compare_nothing_are_refused(
    small_run: RunConfig, tmp_path: Path, recipes: tuple[str, ...], share: float, message: str
):
    with pytest.raises(ValueError, match=message):
        matrix_of(small_run, tmp_path, *recipes, share=share)


def test_rounds_of_seeds_are_refused(small_run: RunConfig, tmp_path: Path):
    with pytest.raises(ValueError, match="Remove one of them"):
        executed(matrix_of(small_run, tmp_path, "bf16", "nvfp4"), stop_early=True)


def test_checkpoints_are_saved_at_the_fork_whatever_their_interval(small_run: RunConfig, tmp_path: Path):
    saves = small_run.train.checkpoint_interval
    assert saves == 3
    for share, interval in ((0.5, 4), (0.75, 3)):
        train = matrix_of(small_run, tmp_path, "bf16", "nvfp4", share=share).runs[0].config.train
        assert (train.checkpoint_interval, train.keep_every) == (interval, round(share * 8))


def test_the_command_that_resumes_it_has_the_share(tmp_path: Path):
    args = parse("compare", load("compare"), ["tiny", "--fork-after", "0.8"])
    assert command_line(words(args, tmp_path)) == (
        f"fourbits compare tiny --recipes bf16 nvfp4 --seeds 0 --fork-after 0.8 --out {tmp_path}"
    )
