"""Real comparisons of very small runs: order, sharing, reuse, interruption, a run that is lost."""

import json
import os
import signal
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fourbits.compare.compare import compare
from fourbits.compare.comparison import shared_facts
from fourbits.compare.execute import Interrupted, make_runs
from fourbits.compare.jobs import Jobs
from fourbits.compare.plan import Plan, make_plan
from fourbits.compare.progress import CompareReport, RunReport
from fourbits.train.config import RunConfig
from fourbits.train.report import Record, RunStart

ALONE = Jobs(1, 1)


class Listener(CompareReport):
    """Notes what begins, counts steps, and can send this process a signal after some of them."""

    def __init__(self, plan: Plan, interrupt_after: int | None = None) -> None:
        self.out = StringIO()
        super().__init__(plan, Console(file=self.out))
        self.began: list[str] = []
        self.steps, self.interrupt_after = 0, interrupt_after

    def listen(self, number: int) -> RunReport:
        listener = super().listen(number)
        begin, step = listener.begin, listener.step

        def note_begin(start: RunStart) -> None:
            self.began.append(self.plan.runs[number].key)
            begin(start)

        def count_step(record: Record) -> None:
            step(record)
            self.steps += 1
            if self.steps == self.interrupt_after:
                os.kill(os.getpid(), signal.SIGINT)

        listener.begin, listener.step = note_begin, count_step
        return listener


def plan_for(config: RunConfig, out: Path, recipes: tuple[str, ...] = ("bf16", "nvfp4")) -> Plan:
    return make_plan(config, "small", recipes, (0, 1), out)


def file_times(out: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")}


@pytest.fixture(scope="module")
def finished(small_run: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    plan = plan_for(small_run, tmp_path_factory.mktemp("finished"))
    compare(plan, Listener(plan), "fourbits compare small", ALONE)
    return plan


def test_a_comparison_leaves_run_folders_a_table_and_a_report(finished: Plan):
    for recipe in ("bf16", "nvfp4"):
        for seed in (0, 1):
            assert (finished.out / recipe / f"seed{seed}" / "summary.json").is_file()
    record = json.loads((finished.out / "table.json").read_text())
    assert [(row["recipe"], row["seeds"]) for row in record["rows"]] == [("bf16", 2), ("nvfp4", 2)]
    assert all(row["speed_ratio"] is not None for row in record["rows"])
    page = (finished.out / "report.html").read_text()
    assert "fourbits compare small" in page
    assert "A continuation" in page


def test_recipes_of_a_seed_share_weights_data_and_validation_and_seeds_do_not(finished: Plan):
    comparison = make_runs(finished, Listener(finished), "again", ALONE)
    facts = {
        (recipe, seed): shared_facts(comparison.runs[recipe][seed])
        for recipe in comparison.runs
        for seed in (0, 1)
    }
    assert facts["bf16", 0] == facts["nvfp4", 0]
    assert facts["bf16", 0]["initial_weights"] != facts["bf16", 1]["initial_weights"]
    assert facts["bf16", 0]["data_order"] != facts["bf16", 1]["data_order"]
    assert facts["bf16", 0]["validation"] == facts["bf16", 1]["validation"]


def test_a_finished_comparison_is_reused_without_a_step(finished: Plan):
    before, listener = file_times(finished.out), Listener(finished)
    compare(finished, listener, "again", ALONE)
    assert listener.steps == 0
    assert file_times(finished.out) == before


def test_a_recipe_added_later_runs_alone_and_gets_no_speed_ratio(finished: Plan, small_run: RunConfig):
    wider = plan_for(small_run, finished.out, ("bf16", "nvfp4", "mxfp4"))
    listener = Listener(wider)
    result = compare(wider, listener, "wider", ALONE)
    assert listener.began == ["mxfp4/seed0", "mxfp4/seed1"]
    ratios = {row.recipe: row.speed_ratio for row in result.rows}
    assert ratios["mxfp4"] is None
    assert ratios["nvfp4"] is not None


def test_an_interrupted_comparison_continues_to_the_same_losses(
    finished: Plan, small_run: RunConfig, tmp_path: Path
):
    plan = plan_for(small_run, tmp_path)
    with pytest.raises(Interrupted):
        compare(plan, Listener(plan, interrupt_after=12), "first", ALONE)
    listener = Listener(plan)
    result = compare(plan, listener, "second", ALONE)
    # 8 steps of bf16 and 4 of nvfp4 were made and saved: 4 remain of it, and all of the other seed.
    assert listener.steps == 4 * 8 - 12
    unbroken = json.loads((finished.out / "table.json").read_text())["rows"]
    for row, expected in zip(result.rows, unbroken, strict=False):
        assert (row.recipe, row.val_loss, row.gap_nats) == (
            expected["recipe"],
            expected["val_loss"],
            expected["gap_nats"],
        )
    made = json.loads((tmp_path / "compare.json").read_text())["made"]
    assert made["nvfp4/seed0"] is None, "a run made in two processes belongs to neither"
    assert made["nvfp4/seed1"] == made["bf16/seed1"] != made["bf16/seed0"]
    assert {key: made["bf16/seed1"][key] for key in ("jobs", "threads", "together")} == {
        "jobs": 1,
        "threads": 1,
        "together": 8,
    }


def test_a_run_that_is_lost_is_a_result_and_is_not_tried_again(small_run: RunConfig, tmp_path: Path):
    wild = replace(small_run, optim=replace(small_run.optim, lr=1e30, grad_clip=None, warmup_share=0.0))
    plan = make_plan(wild, "wild", ("bf16", "nvfp4"), (0,), tmp_path)
    result = compare(plan, Listener(plan), "wild", ALONE)
    assert [row.verdict for row in result.rows] == ["diverged", "diverged"]
    assert [row.val_loss for row in result.rows] == [None, None]
    listener = Listener(plan)
    compare(plan, listener, "wild", ALONE)
    assert listener.steps == 0


def test_a_folder_with_other_runs_is_refused(finished: Plan, small_run: RunConfig):
    other = plan_for(replace(small_run, optim=replace(small_run.optim, lr=2e-2)), finished.out)
    with pytest.raises(ValueError, match=r"optim\.lr"):
        compare(other, Listener(other), "other", ALONE)


def test_piped_progress_says_which_run_how_far_and_how_long(small_run: RunConfig, tmp_path: Path):
    plan = make_plan(small_run, "small", ("bf16", "nvfp4"), (0,), tmp_path)
    listener = Listener(plan)
    make_runs(plan, listener, "fourbits compare small", ALONE)
    lines = listener.out.getvalue().splitlines()
    validations = [line for line in lines if "step 8/8, validation loss" in line]
    assert [line.split(":")[0] for line in validations] == ["bf16, seed 0 (1/2)", "nvfp4, seed 0 (2/2)"]
    assert validations[0].endswith("left in all")
    assert validations[1].endswith("0 s left in all")
    assert sum("finished, validation loss" in line for line in lines) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipes": ("bf16", "nvfp5")}, "Did you mean 'nvfp4'"),
        ({"recipes": ("bf16", "bf16")}, "the recipe bf16 was given twice"),
        ({"recipes": ()}, "at least one recipe"),
        ({"seeds": (1, 1)}, "the seed 1 was given twice"),
        ({"seeds": (-1,)}, "seed must be at least 0"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(
    small_run: RunConfig, tmp_path: Path, arguments: dict[str, Any], message: str
):
    asked: dict[str, Any] = {"recipes": ("bf16",), "seeds": (0,), **arguments}
    with pytest.raises(ValueError, match=message):
        make_plan(small_run, "small", asked["recipes"], asked["seeds"], tmp_path)


def test_the_baseline_comes_first_and_whole_seeds_come_before_the_next(small_run: RunConfig, tmp_path: Path):
    plan = make_plan(small_run, "small", ("nvfp4", "bf16"), (3, 1), tmp_path)
    assert [run.key for run in plan.runs] == ["bf16/seed3", "nvfp4/seed3", "bf16/seed1", "nvfp4/seed1"]
    assert plan.baseline == "bf16"
    assert make_plan(small_run, "small", ("fp8", "nvfp4"), (0,), tmp_path).baseline == "fp8"


def test_a_recipe_file_takes_part_under_its_own_name(small_run: RunConfig, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("base: nvfp4\nwgrad: {lhs: {rht: 0}, rhs: {rht: 0}}\n")
    plan = make_plan(small_run, "small", ("bf16", str(tmp_path / "mine.yaml")), (0,), tmp_path / "out")
    assert plan.runs[1].folder == tmp_path / "out" / "mine" / "seed0"
    assert plan.runs[1].config.recipe.wgrad.lhs.rht == 0


def test_a_recipe_whose_name_is_no_folder_is_refused(small_run: RunConfig, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("base: nvfp4\nname: ../elsewhere\n")
    with pytest.raises(ValueError, match="a recipe's name becomes a folder's"):
        make_plan(small_run, "small", (str(tmp_path / "mine.yaml"),), (0,), tmp_path / "out")
