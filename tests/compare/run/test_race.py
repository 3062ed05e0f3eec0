"""Comparisons that stop early: rounds by seed, recipes dropped, and the same decisions when continued."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from fourbits.compare.compare import Commands, compare
from fourbits.compare.run import race
from fourbits.compare.run.jobs import Jobs
from fourbits.compare.run.progress import MatrixProgress
from fourbits.compare.run.race import SeedRounds
from fourbits.compare.run.run_matrix import RunMatrix, build_matrix
from fourbits.train.config import RunConfig

RECIPES = ("bf16", "nvfp4", "mxfp4")
#: fabricated losses: mxfp4 is far worse in every seed, the others differ by little
LOSSES = {
    "bf16": (3.000, 3.100, 2.900, 3.050, 2.950, 3.020),
    "nvfp4": (3.010, 3.095, 2.912, 3.044, 2.961, 3.015),
    "mxfp4": (3.211, 3.294, 3.113, 3.246, 3.160, 3.214),
}


class Rounds:
    """A matrix of six seeds whose losses are LOSSES, without any training."""

    def __init__(
        self, config: RunConfig, out: Path, monkeypatch: pytest.MonkeyPatch, parallel: int = 1
    ) -> None:
        self.matrix = build_matrix(config, "small", RECIPES, range(6), out)
        by_folder = {run.folder: LOSSES[run.recipe][run.seed] for run in self.matrix.runs}
        monkeypatch.setattr(
            race, "outcome", lambda folder: {"ended": "finished", "val_loss": by_folder[folder]}
        )
        self.out = StringIO()
        self.progress = MatrixProgress(self.matrix, Console(file=self.out))
        self.rounds = SeedRounds(self.matrix, self.progress, parallel)

    def keys(self) -> list[list[str]]:
        return [[self.matrix.runs[number].key for number in numbers] for numbers in self.rounds]


def test_a_recipe_that_is_worse_gets_no_more_seeds(
    small_run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    case = Rounds(small_run, tmp_path, monkeypatch)
    rounds = case.keys()
    assert rounds[0] == [f"{recipe}/seed{seed}" for seed in (0, 1) for recipe in RECIPES]
    assert rounds[1] == [f"{recipe}/seed2" for recipe in RECIPES]
    stop = case.rounds.race.stopped["mxfp4"]
    assert (stop.why, stop.against) == ("worse", "nvfp4")
    assert 2 < stop.seeds < 6
    assert rounds[-1] == ["bf16/seed5", "nvfp4/seed5"]
    assert case.rounds.ran == {"bf16": tuple(range(6)), "nvfp4": tuple(range(6))} | {
        "mxfp4": tuple(range(stop.seeds))
    }
    assert case.rounds.race.stopped["nvfp4"].text == "all seeds used; not separated from bf16"
    text = case.out.getvalue()
    assert f"mxfp4: stops after {stop.seeds} seeds, worse than nvfp4" in text
    assert case.progress._num_ended == 6 - stop.seeds, "the bar counts what will not execute"


def test_a_round_has_several_seeds_where_processes_would_be_idle(
    small_run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rounds = Rounds(small_run, tmp_path, monkeypatch, parallel=9).keys()
    assert len(rounds[0]) == 9
    assert all(len(numbers) >= 2 for numbers in rounds)


def short(config: RunConfig) -> RunConfig:
    """Two steps, validated after each."""
    return replace(
        config, train=replace(config.train, steps=2, validation_interval=1, checkpoint_interval=None)
    )


class Watcher(MatrixProgress):
    """Records which runs started a step."""

    def __init__(self, matrix: RunMatrix) -> None:
        super().__init__(matrix, Console(file=StringIO()))
        self.steps: list[str] = []

    def start_run(self, number: int):
        run = super().start_run(number)
        begin = run.begin

        def record(start) -> None:
            self.steps.append(self.matrix.runs[number].key)
            begin(start)

        run.begin = record
        return run


def test_a_comparison_that_stopped_early_reports_it_and_decides_alike_when_repeated(
    small_run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    matrix = build_matrix(short(small_run), "small", RECIPES, (0, 1, 2), tmp_path / "out")

    original = race.outcome

    def outcome(folder: Path) -> dict[str, object]:
        found = original(folder)
        assert found["ended"] == "finished", "a look comes after the runs of its round"
        recipe, seed = folder.parent.name, int(folder.name.removeprefix("seed"))
        shift = 5.0 if recipe == "mxfp4" else 0.0
        return {**found, "val_loss": LOSSES[recipe][seed] + shift}

    monkeypatch.setattr(race, "outcome", outcome)
    commands = Commands("fourbits compare small", ())
    first = Watcher(matrix)
    result = compare(matrix, first, commands, Jobs(1, 1), stop_early=True)
    assert first.steps[:6] == [f"{recipe}/seed{seed}" for seed in (0, 1) for recipe in RECIPES]
    assert "mxfp4/seed2" not in first.steps
    rows = {row.recipe: row for row in result.rows}
    assert (rows["mxfp4"].seeds, rows["nvfp4"].seeds, rows["bf16"].seeds) == (2, 3, 3)
    page = result.report.read_text()
    assert "worse than nvfp4" in page
    assert "unequal numbers of seeds" in page
    again = Watcher(matrix)
    assert compare(matrix, again, commands, Jobs(1, 1), stop_early=True).record == result.record
    assert again.steps == []


def test_an_ablation_trains_the_recipe_without_each_technique(small_run: RunConfig, tmp_path: Path):
    techniques = ("rht", "bf16-blocks")
    matrix = build_matrix(short(small_run), "small", ("nvfp4",), (0,), tmp_path / "out", techniques)
    names = ["bf16", "nvfp4", "nvfp4-without-rht", "nvfp4-without-bf16-blocks"]
    assert list(matrix.recipes) == names
    result = compare(matrix, Watcher(matrix), Commands("", ()), Jobs(1, 1))
    found = {name: result.comparison.runs[name][0].manifest["recipe"] for name in names}
    assert [found[name]["name"] for name in names] == names
    assert len({each["digest"] for each in found.values()}) == 4
    shares = {name: result.comparison.runs[name][0].manifest["precision"]["share_of_flops"] for name in names}
    assert shares["nvfp4-without-bf16-blocks"] > shares["nvfp4-without-rht"] == shares["nvfp4"] > 0
    assert [row["technique"] for row in result.record["ablation"]] == ["rht", "bf16-blocks"]
    assert "nvfp4 without one technique at a time" in result.report.read_text()
