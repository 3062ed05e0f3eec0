"""Real comparisons of very small runs: order, shared data, reuse, interruption, a run that diverges."""

import json
import os
import signal
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fourbits.compare.compare import Commands, compare
from fourbits.compare.report.comparison import read_comparison, shared_hashes
from fourbits.compare.run.execute import Interrupted, execute_runs
from fourbits.compare.run.jobs import Jobs
from fourbits.compare.run.progress import MatrixProgress, RunProgress
from fourbits.compare.run.run_matrix import RunMatrix, build_matrix
from fourbits.train.config import RunConfig
from fourbits.train.listener import Record, RunStart

ALONE = Jobs(1, 1)
COMMANDS = Commands("fourbits compare small", ("fourbits compare small --jobs 1",))


class CountingProgress(MatrixProgress):
    """Records which runs begin, counts steps, and can interrupt this process after a number of them."""

    def __init__(self, matrix: RunMatrix, interrupt_after: int | None = None) -> None:
        self.out = StringIO()
        super().__init__(matrix, Console(file=self.out))
        self.began: list[str] = []
        self.steps, self.interrupt_after = 0, interrupt_after

    def start_run(self, number: int) -> RunProgress:
        run = super().start_run(number)
        begin, step = run.begin, run.step

        def record_begin(start: RunStart) -> None:
            self.began.append(self.matrix.runs[number].key)
            begin(start)

        def count_step(record: Record) -> None:
            step(record)
            self.steps += 1
            if self.steps == self.interrupt_after:
                os.kill(os.getpid(), signal.SIGINT)

        run.begin, run.step = record_begin, count_step
        return run


def matrix_for(config: RunConfig, out: Path, recipes: tuple[str, ...] = ("bf16", "nvfp4")) -> RunMatrix:
    return build_matrix(config, "small", recipes, (0, 1), out)


def file_times(out: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")}


@pytest.fixture(scope="module")
def finished(small_run: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> RunMatrix:
    matrix = matrix_for(small_run, tmp_path_factory.mktemp("finished"))
    compare(matrix, CountingProgress(matrix), COMMANDS, ALONE)
    return matrix


def test_a_comparison_writes_run_folders_a_table_and_a_report(finished: RunMatrix):
    for recipe in ("bf16", "nvfp4"):
        for seed in (0, 1):
            assert (finished.out / recipe / f"seed{seed}" / "summary.json").is_file()
    record = json.loads((finished.out / "table.json").read_text())
    assert [(row["recipe"], row["seeds"]) for row in record["rows"]] == [("bf16", 2), ("nvfp4", 2)]
    assert all(row["speed_ratio"] is not None for row in record["rows"])
    page = (finished.out / "report.html").read_text()
    assert "fourbits compare small --jobs 1" in page
    assert "Sample output" in page


def test_recipes_share_weights_and_data_within_a_seed_but_not_across_seeds(finished: RunMatrix):
    comparison = read_comparison(finished, execute_runs(finished, CountingProgress(finished), "again", ALONE))
    hashes = {
        (recipe, seed): shared_hashes(comparison.runs[recipe][seed])
        for recipe in comparison.runs
        for seed in (0, 1)
    }
    assert hashes["bf16", 0] == hashes["nvfp4", 0]
    assert hashes["bf16", 0]["initial_weights"] != hashes["bf16", 1]["initial_weights"]
    assert hashes["bf16", 0]["data_order"] != hashes["bf16", 1]["data_order"]
    assert hashes["bf16", 0]["validation"] == hashes["bf16", 1]["validation"]


def test_a_finished_comparison_is_reused_without_training(finished: RunMatrix):
    before, progress = file_times(finished.out), CountingProgress(finished)
    compare(finished, progress, COMMANDS, ALONE)
    assert progress.steps == 0
    assert file_times(finished.out) == before


def test_a_recipe_added_later_runs_alone_and_has_no_speed_ratio(finished: RunMatrix, small_run: RunConfig):
    wider = matrix_for(small_run, finished.out, ("bf16", "nvfp4", "mxfp4"))
    progress = CountingProgress(wider)
    result = compare(wider, progress, COMMANDS, ALONE)
    assert progress.began == ["mxfp4/seed0", "mxfp4/seed1"]
    ratios = {row.recipe: row.speed_ratio for row in result.rows}
    assert ratios["mxfp4"] is None
    assert ratios["nvfp4"] is not None


def test_an_interrupted_comparison_resumes_to_the_same_losses(
    finished: RunMatrix, small_run: RunConfig, tmp_path: Path
):
    matrix = matrix_for(small_run, tmp_path)
    with pytest.raises(Interrupted):
        compare(matrix, CountingProgress(matrix, interrupt_after=12), COMMANDS, ALONE)
    progress = CountingProgress(matrix)
    result = compare(matrix, progress, COMMANDS, ALONE)
    # 8 steps of bf16 and 4 of nvfp4 were saved; 4 of nvfp4 and the whole other seed remain.
    assert progress.steps == 4 * 8 - 12
    unbroken = json.loads((finished.out / "table.json").read_text())["rows"]
    for row, expected in zip(result.rows, unbroken, strict=False):
        assert (row.recipe, row.val_loss, row.gap_nats) == (
            expected["recipe"],
            expected["val_loss"],
            expected["gap_nats"],
        )
    made = json.loads((tmp_path / "compare.json").read_text())["runs"]
    assert made["nvfp4/seed0"] is None, "a run executed in two sessions belongs to neither"
    assert made["nvfp4/seed1"] == made["bf16/seed1"] != made["bf16/seed0"]
    assert {key: made["bf16/seed1"][key] for key in ("jobs", "threads", "together")} == {
        "jobs": 1,
        "threads": 1,
        "together": 8,
    }


def test_a_run_with_a_non_finite_loss_is_a_result_and_is_not_repeated(small_run: RunConfig, tmp_path: Path):
    wild = replace(small_run, optim=replace(small_run.optim, lr=1e30, grad_clip=None, warmup_share=0.0))
    matrix = build_matrix(wild, "wild", ("bf16", "nvfp4"), (0,), tmp_path)
    result = compare(matrix, CountingProgress(matrix), COMMANDS, ALONE)
    assert [row.verdict for row in result.rows] == ["diverged", "diverged"]
    assert [row.val_loss for row in result.rows] == [None, None]
    progress = CountingProgress(matrix)
    compare(matrix, progress, COMMANDS, ALONE)
    assert progress.steps == 0


def test_a_folder_with_runs_of_other_settings_is_refused(finished: RunMatrix, small_run: RunConfig):
    other = matrix_for(replace(small_run, optim=replace(small_run.optim, lr=2e-2)), finished.out)
    with pytest.raises(ValueError, match=r"optim\.lr"):
        compare(other, CountingProgress(other), COMMANDS, ALONE)


def test_piped_progress_shows_the_run_the_step_and_the_time_left(small_run: RunConfig, tmp_path: Path):
    matrix = build_matrix(small_run, "small", ("bf16", "nvfp4"), (0,), tmp_path)
    progress = CountingProgress(matrix)
    execute_runs(matrix, progress, "fourbits compare small", ALONE)
    lines = progress.out.getvalue().splitlines()
    validations = [line for line in lines if "step 8/8, validation loss" in line]
    assert [line.split(":")[0] for line in validations] == ["bf16, seed 0 (1/2)", "nvfp4, seed 0 (2/2)"]
    assert validations[0].endswith("left in total")
    assert validations[1].endswith("0 s left in total")
    assert sum("finished, validation loss" in line for line in lines) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipes": ("bf16", "nvfp5")}, "Did you mean 'nvfp4'"),
        ({"recipes": ("bf16", "bf16")}, "the recipe bf16 is repeated"),
        ({"recipes": ()}, "at least one recipe"),
        ({"seeds": (1, 1)}, "the seed 1 is repeated"),
        ({"seeds": (-1,)}, "seed must be at least 0"),
    ],
)
def test_an_invalid_matrix_is_refused(
    small_run: RunConfig, tmp_path: Path, arguments: dict[str, Any], message: str
):
    given: dict[str, Any] = {"recipes": ("bf16",), "seeds": (0,), **arguments}
    with pytest.raises(ValueError, match=message):
        build_matrix(small_run, "small", given["recipes"], given["seeds"], tmp_path)


def test_the_baseline_runs_first_and_a_seed_is_completed_before_the_next(
    small_run: RunConfig, tmp_path: Path
):
    matrix = build_matrix(small_run, "small", ("nvfp4", "bf16"), (3, 1), tmp_path)
    assert [run.key for run in matrix.runs] == ["bf16/seed3", "nvfp4/seed3", "bf16/seed1", "nvfp4/seed1"]
    assert matrix.baseline == "bf16"
    assert build_matrix(small_run, "small", ("fp8", "nvfp4"), (0,), tmp_path).baseline == "fp8"


def test_a_recipe_file_runs_under_its_own_name(small_run: RunConfig, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("base: nvfp4\nwgrad: {lhs: {rht: 0}, rhs: {rht: 0}}\n")
    matrix = build_matrix(small_run, "small", ("bf16", str(tmp_path / "mine.yaml")), (0,), tmp_path / "out")
    assert matrix.runs[1].folder == tmp_path / "out" / "mine" / "seed0"
    assert matrix.runs[1].config.recipe.wgrad.lhs.rht == 0


def test_a_recipe_name_that_is_not_a_valid_folder_name_is_refused(small_run: RunConfig, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("base: nvfp4\nname: ../elsewhere\n")
    with pytest.raises(ValueError, match="the name becomes a folder"):
        build_matrix(small_run, "small", (str(tmp_path / "mine.yaml"),), (0,), tmp_path / "out")
