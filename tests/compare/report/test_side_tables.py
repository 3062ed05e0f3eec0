"""The small tables: ablations, tokens to match, noise, and losses by source."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fourbits.compare.report.ablation_table import ablation_rows, ablation_table
from fourbits.compare.report.comparison import Comparison
from fourbits.compare.report.noise_table import noise_rows, noise_table
from fourbits.compare.report.runs import Run
from fourbits.compare.report.side_table import print_side_table
from fourbits.compare.report.side_tables import SideRows
from fourbits.compare.report.source_table import source_rows, source_table
from fourbits.compare.report.table import final_table
from fourbits.compare.report.time_to_loss import loss_after, reached, reached_table, tokens_to_loss
from fourbits.compare.run.run_matrix import Ablation
from fourbits.compare.statistics.interval import margin
from fourbits.compare.statistics.sequential import Stop
from support.fabricated_runs import RECIPES, STEPS, TOKENS_PER_STEP, fabricate_comparison

SEEDS = [0, 1, 2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return fabricate_comparison(tmp_path_factory.mktemp("runs"), ["bf16", "nvfp4", "nvfp4-naive"], SEEDS)


def with_curve(run: Run, losses: list[float]) -> Run:
    """The run with validations that are equally spaced up to its end."""
    steps = np.linspace(0, STEPS, len(losses) + 1)[1:]
    return replace(run, validation={"step": steps, "val_loss": np.array(losses)})


def test_tokens_to_a_loss_are_interpolated_between_validations(found: Comparison):
    run = with_curve(found.any_run, [4.0, 3.0, 2.5, 2.4])
    quarter = STEPS * TOKENS_PER_STEP / 4
    assert tokens_to_loss(run, 3.25) == pytest.approx(1.75 * quarter)
    assert tokens_to_loss(run, 2.5) == pytest.approx(3 * quarter)
    assert tokens_to_loss(run, 5.0) == pytest.approx(quarter)
    assert tokens_to_loss(run, 2.3) is None
    assert loss_after(run, 0.875) == pytest.approx(2.45)
    assert loss_after(run, 0.2) is None, "nothing is known before the first validation"


def test_a_recipe_with_the_baselines_curve_at_half_the_pace_needs_twice_the_tokens(found: Comparison):
    base = with_curve(found.any_run, [4.0, 3.0, 2.9, 2.8])
    slow = with_curve(found.runs["nvfp4"][0], [4.5, 4.0, 3.5, 2.86])
    changed = replace(found, runs={"bf16": {0: base}, "nvfp4": {0: slow}})
    rows = {(row.recipe, row.share): row for row in reached(changed)}
    quarter = STEPS * TOKENS_PER_STEP / 4
    assert rows["bf16", 0.9].target == pytest.approx(2.84)  # between 2.9 and 2.8, at 3.6 quarters
    assert rows["bf16", 0.9].tokens == pytest.approx(3.6 * quarter)
    late = rows["nvfp4", 0.9]
    assert (late.tokens, late.seconds, late.tokens_ratio) == (None, None, None)
    assert late.more_than == pytest.approx(4 / 3.6)
    quick = with_curve(found.runs["nvfp4"][0], [3.5, 2.84, 2.8, 2.7])
    changed = replace(found, runs={"bf16": {0: base}, "nvfp4": {0: quick}})
    row = next(row for row in reached(changed) if (row.recipe, row.share) == ("nvfp4", 0.9))
    assert row.tokens == pytest.approx(2 * quarter)
    assert row.tokens_ratio == pytest.approx(2 / 3.6)
    assert row.seconds == pytest.approx(2 * quarter / RECIPES["nvfp4"][1], rel=0.02)


def test_a_recipe_that_never_matches_is_shown_with_what_it_spent(found: Comparison):
    table = reached_table(found, reached(found))
    assert table is not None
    naive = table.rows[2]
    assert naive[0] == "nvfp4-naive"
    assert naive[4:] == ("not reached", ">\N{NO-BREAK SPACE}1.00x", "\N{EN DASH}")
    assert table.rows[0][5] == "1.00x"


def test_an_ablation_is_a_difference_to_the_full_recipe_within_each_seed(found: Comparison):
    ablation = Ablation("nvfp4", ("rht",))
    runs = {
        "bf16": found.runs["bf16"],
        "nvfp4": found.runs["nvfp4"],
        "nvfp4-without-rht": found.runs["nvfp4-naive"],
    }
    speeds = {("nvfp4-without-rht", seed): found.provenance["nvfp4", seed] for seed in SEEDS}
    changed = replace(found, runs=runs, ablation=ablation, provenance={**found.provenance, **speeds})
    (row,) = ablation_rows(changed, final_table(changed))
    changes = [found.runs["nvfp4-naive"][s].final_loss - found.runs["nvfp4"][s].final_loss for s in SEEDS]
    assert row.change_nats is not None
    assert row.change_nats.mean == pytest.approx(sum(changes) / 3)
    assert row.change_nats.margin == pytest.approx(margin(changes))
    assert row.change_nats.seeds == 3
    table = ablation_table(changed, [row])
    assert table is not None
    assert table.rows[0][0] == "rht (random Hadamard transform)"
    assert table.rows[0][-1] == "worse without it"  # fabricated with 0.054 nats more, noise 0.003
    assert ablation_rows(found, final_table(found)) == []


def test_one_seed_shows_nothing_about_an_ablation(tmp_path: Path):
    one = fabricate_comparison(tmp_path, ["bf16", "nvfp4", "fp8"], [0])
    renamed = {"bf16": one.runs["bf16"], "nvfp4": one.runs["nvfp4"], "nvfp4-without-sr": one.runs["fp8"]}
    speeds = {("nvfp4-without-sr", 0): one.provenance["fp8", 0]}
    changed = replace(
        one,
        runs=renamed,
        ablation=Ablation("nvfp4", ("sr",)),
        provenance={**one.provenance, **speeds},
    )
    table = ablation_table(changed, ablation_rows(changed, final_table(changed)))
    assert table is not None
    assert table.rows[0][-1] == "nothing (one seed)"


def stopped(found: Comparison, recipe: str, seeds: int, confidence: float) -> Comparison:
    """The comparison in which a recipe stopped after so many seeds."""
    stop = Stop(
        recipe=recipe,
        seeds=seeds,
        why="worse",
        against="nvfp4",
        text="worse than nvfp4",
        confidence=confidence,
    )
    kept = {seed: found.runs[recipe][seed] for seed in SEEDS[:seeds]}
    return replace(found, runs={**found.runs, recipe: kept}, stops={recipe: stop})


def test_a_recipe_that_stopped_early_has_fewer_seeds_a_reason_and_a_wider_interval(found: Comparison):
    early = stopped(found, "nvfp4-naive", 2, 0.99)
    early.check()
    row = final_table(early)[2]
    gaps = [found.runs["nvfp4-naive"][s].final_loss - found.runs["bf16"][s].final_loss for s in (0, 1)]
    assert row.seeds == 2
    assert row.gap_nats == pytest.approx(sum(gaps) / 2)
    assert row.gap_nats_margin == pytest.approx(margin(gaps, 0.99))
    assert final_table(early)[1].seeds == 3
    table = noise_table(early, noise_rows(early))
    assert table is not None
    assert [(cells[0], cells[1], cells[-1]) for cells in table.rows] == [
        ("nvfp4", "3", "\N{EN DASH}"),
        ("nvfp4-naive", "2", "worse than nvfp4"),
    ]


def test_noise_names_the_seeds_that_a_difference_needs(found: Comparison):
    rows = noise_rows(found)
    assert [row.recipe for row in rows] == ["nvfp4", "nvfp4-naive"]
    for row in rows:
        assert row.standard_error == pytest.approx(row.deviation / 3**0.5)
        assert list(row.seeds_needed) == ["0.005", "0.01", "0.02"]
        needed = [each or 10_001 for each in row.seeds_needed.values()]
        assert needed == sorted(needed, reverse=True)


def test_losses_by_source_are_those_of_the_last_validation(found: Comparison):
    rows = {(row.source, row.recipe): row for row in source_rows(found)}
    assert {source for source, _ in rows} == {"code", "prose"}
    expected = [run.validation["val_prose"][-1] for run in found.runs["nvfp4"].values()]
    base = [run.validation["val_prose"][-1] for run in found.runs["bf16"].values()]
    assert rows["prose", "nvfp4"].val_loss == pytest.approx(sum(expected) / 3)
    assert rows["prose", "nvfp4"].gap.mean == pytest.approx((sum(expected) - sum(base)) / 3)
    table = source_table(found, list(rows.values()))
    assert table is not None
    assert [row[0] for row in table.rows] == ["code", "prose"]


def test_the_record_is_json_and_the_terminal_prints_every_row(found: Comparison):
    side = SideRows.of(found, final_table(found))
    record = json.loads(json.dumps(side.record(), allow_nan=False))
    assert set(record) == {"published", "ablation", "reached", "noise", "averaged", "sources"}
    for table in side.shown(found):
        out = StringIO()
        print_side_table(table, Console(file=out, width=40))
        lines = out.getvalue().splitlines()
        assert (lines[:2], lines[-1], len(lines)) == (["", table.title], table.note, len(table.rows) + 4)
