"""The final table: pairing by seed, deviations over seeds, speed ratios, runs that did not finish."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fourbits.compare.report.comparison import Comparison
from fourbits.compare.report.print_table import print_comparison
from fourbits.compare.report.table import final_table, table_record
from support.fabricated_runs import RECIPES, SAME_LOAD, STEPS, fabricate_comparison, fabricate_run


@pytest.fixture(scope="module")
def three_seeds(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return fabricate_comparison(tmp_path_factory.mktemp("runs"), ["bf16", "fp8", "nvfp4"], [0, 1, 2])


def test_a_gap_is_the_mean_of_the_gaps_within_each_seed(three_seeds: Comparison):
    row = final_table(three_seeds)[2]
    last = {
        recipe: [run.validation["val_loss"][-1] for run in runs.values()]
        for recipe, runs in three_seeds.runs.items()
    }
    gaps = [b - a for a, b in zip(last["bf16"], last["nvfp4"], strict=True)]
    assert row.gap_nats == pytest.approx(sum(gaps) / 3)
    mean = sum(gaps) / 3
    assert row.gap_nats_spread == pytest.approx((sum((gap - mean) ** 2 for gap in gaps) / 2) ** 0.5)
    percents = [100 * gap / base for gap, base in zip(gaps, last["bf16"], strict=True)]
    assert row.gap_percent == pytest.approx(sum(percents) / 3)


def test_the_baseline_has_no_gap_to_itself_and_ratio_one(three_seeds: Comparison):
    row = final_table(three_seeds)[0]
    assert (row.gap_nats, row.gap_percent, row.speed_ratio) == (0.0, 0.0, 1.0)


def test_the_margin_of_a_gap_is_that_of_students_t_and_not_two_deviations(three_seeds: Comparison):
    row = final_table(three_seeds)[2]
    assert row.gap_nats_spread is not None
    assert row.gap_nats_margin == pytest.approx(4.302653 * row.gap_nats_spread / 3**0.5, rel=1e-6)


def test_a_gap_within_its_margin_is_noise_and_one_far_above_is_not(three_seeds: Comparison):
    _, fp8, nvfp4 = final_table(three_seeds)
    assert nvfp4.within_noise is False  # fabricated with a gap of 0.038 nats and noise of 0.003
    assert replace(fp8, gap_nats=-0.004, gap_nats_margin=0.005).within_noise is True


def test_one_seed_has_no_deviation_and_no_verdict_on_noise(tmp_path: Path):
    row = final_table(fabricate_comparison(tmp_path, ["bf16", "nvfp4"], [0]))[1]
    assert row.gap_nats_spread is None
    assert row.val_loss_spread is None
    assert (row.gap_nats_margin, row.gap_percent_margin, row.val_loss_margin) == (None, None, None)
    assert row.within_noise is None


def test_runs_under_the_same_load_have_a_speed_ratio(three_seeds: Comparison):
    expected = RECIPES["nvfp4"][1] / RECIPES["bf16"][1]
    assert final_table(three_seeds)[2].speed_ratio == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("other", [{"session": "two"}, {"jobs": 1}, {"threads": 2}, {"together": 4}])
def test_runs_under_another_load_than_their_baseline_have_no_speed_ratio(
    three_seeds: Comparison, other: dict[str, Any]
):
    changed = {("nvfp4", seed): replace(SAME_LOAD, **other) for seed in (0, 1, 2)}
    rows = final_table(replace(three_seeds, provenance={**three_seeds.provenance, **changed}))
    assert rows[2].speed_ratio is None
    assert rows[1].speed_ratio is not None


def test_resumed_runs_have_no_speed_ratio(three_seeds: Comparison):
    resumed = replace(three_seeds, provenance=dict.fromkeys(three_seeds.provenance))
    assert [row.speed_ratio for row in final_table(resumed)] == [None, None, None]


def test_steps_with_the_machine_to_itself_do_not_count(three_seeds: Comparison):
    run = three_seeds.runs["nvfp4"][0]
    rates = run.train["tokens_per_second"].copy()
    rates[100:] *= 3
    faster = replace(run, train={**run.train, "tokens_per_second": rates})
    runs = {**three_seeds.runs, "nvfp4": {**three_seeds.runs["nvfp4"], 0: faster}}
    provenance = {**three_seeds.provenance, ("nvfp4", 0): replace(SAME_LOAD, together=100)}
    row = final_table(replace(three_seeds, runs=runs, provenance=provenance))[2]
    assert row.tokens_per_second == pytest.approx(RECIPES["nvfp4"][1], rel=0.02)
    assert row.speed_ratio == pytest.approx(RECIPES["nvfp4"][1] / RECIPES["bf16"][1], rel=0.02)


def test_speed_is_that_of_the_median_step_so_that_compilation_does_not_count(three_seeds: Comparison):
    run = three_seeds.any_run
    assert run.train["tokens_per_second"].min() < 0.2 * RECIPES["bf16"][1], "the first step is slow"
    assert run.tokens_per_second == pytest.approx(RECIPES["bf16"][1], rel=0.01)


def test_a_run_that_did_not_finish_has_a_verdict_and_no_losses(tmp_path: Path):
    base = fabricate_run(tmp_path / "a", "bf16")
    lost = fabricate_run(tmp_path / "b", "nvfp4-naive", non_finite_at=100)
    runs = {"bf16": {0: base}, "nvfp4-naive": {0: lost}}
    rows = final_table(
        Comparison("fabricated", "bf16", runs, {("bf16", 0): SAME_LOAD, ("nvfp4-naive", 0): SAME_LOAD})
    )
    assert (rows[1].val_loss, rows[1].gap_nats, rows[1].gap_percent, rows[1].train_loss) == (None,) * 4
    assert rows[1].verdict == "diverged"
    assert "step 100" in rows[1].verdict_reason
    assert rows[0].gap_nats == 0.0


def test_table_json_has_the_rows_and_the_gap_over_training(three_seeds: Comparison):
    record = json.loads(json.dumps(table_record(three_seeds, final_table(three_seeds)), allow_nan=False))
    assert (record["baseline"], record["seeds"], record["steps"]) == ("bf16", [0, 1, 2], STEPS)
    assert [row["recipe"] for row in record["rows"]] == ["bf16", "fp8", "nvfp4"]
    gaps = record["gap_percent_over_training"]
    assert set(gaps) == {"fp8", "nvfp4"}
    assert gaps["nvfp4"][-1]["tokens"] == record["tokens_per_run"]
    assert gaps["nvfp4"][-1]["gap_percent"] == pytest.approx(record["rows"][2]["gap_percent"])


def test_recipes_with_other_initial_weights_are_not_comparable(tmp_path: Path):
    comparison = fabricate_comparison(tmp_path, ["bf16", "nvfp4"], [0])
    comparison.check()
    other = comparison.runs["nvfp4"][0]
    hashes = {**other.manifest["hashes"], "initial_weights": "others"}
    changed = replace(other, manifest={**other.manifest, "hashes": hashes})
    broken = replace(comparison, runs={**comparison.runs, "nvfp4": {0: changed}})
    with pytest.raises(ValueError, match="nvfp4/seed0: initial weights must match bf16 with seed 0"):
        broken.check()


def test_a_piped_table_is_one_line_per_recipe_without_colour(three_seeds: Comparison):
    out = StringIO()
    print_comparison(final_table(three_seeds), "bf16", [0, 1, 2], Console(file=out, width=40))
    lines = out.getvalue().splitlines()
    assert len(lines) == 1 + 3 + 1
    assert "\x1b" not in out.getvalue()
    assert [line.split()[0] for line in lines[1:4]] == ["bf16", "fp8", "nvfp4"]
    assert "3 seeds (0, 1, 2)" in lines[-1]
