"""Predictions beside measured figures: one set of rates, deviations as the page shows them, misses named."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fourbits.model.counts import count_parameters
from fourbits.plan.calibration import calibrated, gpu_of, load_calibration
from fourbits.plan.gpus import GPUS
from fourbits.plan.published import CASES, Prediction, predict
from fourbits.plan.rates import DECLARED
from fourbits.plan.software import FOURBITS

PAGE = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
BENCHMARKS = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
#: what the plan does not explain, as docs/plan.md says
MISSED = {
    "Llama 8B, torchtitan",
    "Llama 8B, TransformerEngine",
    "Llama 8B, TransformerEngine, 4 BF16 blocks",
    "Nemotron-H 8B, TransformerEngine",
    "Nemotron-H 8B, all blocks, no transform",
    "hybrid-1.2b, 2 GPUs that share layers, 2 micro-batches",
}
SHARED = "hybrid-1.2b, 2 GPUs that share layers, 2 micro-batches"
#: rows of missed names that are within the bar
WITHIN = {(SHARED, "bf16")}
FOUND = [predict(case) for case in CASES]
IDS = [f"{p.case.name}-{p.case.recipe.name}-{p.case.recipe.saved_inputs}-{p.case.gpu}" for p in FOUND]


@pytest.mark.parametrize("found", FOUND, ids=IDS)
def test_a_speed_is_predicted_within_20_percent_unless_the_page_calls_it_missed(found):
    missed = found.case.name in MISSED and (found.case.name, found.case.recipe.name) not in WITHIN
    assert (abs(found.speed_deviation) <= 0.2) == (not missed)


def test_steps_of_this_project_on_hopper_are_predicted_within_15_percent_but_for_those_the_page_names():
    own = [found for found in FOUND if found.case.source == "benchmarks.md"]
    beyond = [
        (found.case.name, found.case.recipe.name, f"{found.speed_deviation:+.0%}")
        for found in own
        if abs(found.speed_deviation) > 0.15
    ]
    assert beyond == [(SHARED, "bf16", "+16%"), (SHARED, "nvfp4", "+52%"), ("30m", "bf16", "-18%")]
    assert "+16 and +52 %" in PAGE.replace("\n", " ")
    assert "-18 % for one row of 30m" in PAGE


@pytest.mark.parametrize("found", [p for p in FOUND if p.case.gib], ids=lambda p: p.case.name)
def test_a_measured_peak_is_predicted_within_5_percent(found):
    missed = (found.case.name, found.case.recipe.name) == (SHARED, "nvfp4")
    assert (abs(found.memory_deviation) <= 0.05) == (not missed)


def test_peaks_at_size_are_predicted_within_1_percent():
    own = [p for p in FOUND if p.case.name.endswith("1.2b")]  # on one GPU
    assert len(own) == 11
    assert max(abs(p.memory_deviation or 0.0) for p in own) < 0.01


def row(found: Prediction) -> str:
    case, memory = found.case, found.memory_deviation
    packed = ", packed" if case.recipe.saved_inputs == "packed" else ""
    cells = (
        f"{case.name}, {case.layout.micro_batch} x {case.seq_len}",
        case.recipe.name + packed,
        case.gpu,
        f"{found.tokens_per_second:,.0f}",
        f"{case.tokens_per_second:,.0f}",
        f"{found.speed_deviation:+.0%}",
        "" if case.gib is None else f"{found.gib:.1f}",
        "" if case.gib is None else f"{case.gib:.1f}",
        "" if memory is None else f"{memory:+.1%}",
    )
    return re.sub(r"  +", " ", f"| {' | '.join(cells)} |")


@pytest.mark.parametrize("found", FOUND, ids=IDS)
def test_the_pages_have_the_figures_of_the_code(found):
    assert row(found) in PAGE
    assert (row(found) in BENCHMARKS) == (found.case.source == "benchmarks.md")


@pytest.mark.parametrize(
    ("row", "changed", "expected"),
    [
        (0, "network", "21,775"),
        (1, "network", "29,389"),
        (2, "network", "29,389"),
        (3, "host", "3,919"),
        (4, "host", "3,520"),
    ],
)
def test_what_would_explain_a_missed_row_is_what_the_page_says(row, changed, expected, monkeypatch):
    case, rates = CASES[row], DECLARED
    if changed == "network":
        monkeypatch.setitem(GPUS, case.gpu, replace(GPUS[case.gpu], domain=4))
    else:
        rates = replace(rates, host_quantized=2e-3)
    assert f"{predict(case, rates).tokens_per_second:,.0f}" == expected
    assert expected in PAGE.partition("**Missed:**")[2]


def test_torchtitan_sums_gradients_in_every_micro_batch_and_holds_no_copy_of_all():
    case = CASES[0]
    several = replace(case.layout, accumulation=2 * case.layout.accumulation)
    assert predict(replace(case, layout=several)).gib == predict(case).gib
    ours = replace(case, software=FOURBITS)
    once = replace(case.layout, accumulation=1)
    held = predict(ours).gib - predict(replace(ours, layout=once)).gib
    parameters = sum(count_parameters(case.model).values())
    assert held == pytest.approx(4 * parameters / 2**30)


RECORDED = load_calibration(Path(__file__).parent / "h200.json")


CALIBRATED = [predict(c, calibrated(RECORDED, gpu_of(RECORDED))) for c in CASES if c.gpu == "h200"]
ONE_GPU = [found for found in CALIBRATED if found.case.layout.gpus == 1]


@pytest.mark.parametrize("found", ONE_GPU, ids=lambda found: found.case.name)
def test_with_its_measured_rates_one_gpu_is_predicted_within_15_percent(found):
    assert abs(found.speed_deviation) <= 0.15


@pytest.mark.parametrize("found", CALIBRATED, ids=lambda found: found.case.name)
def test_the_page_has_what_measured_rates_predict(found):
    case = found.case
    packed = ", packed" if case.recipe.saved_inputs == "packed" else ""
    speeds = (
        f"{found.tokens_per_second:,.0f} | {case.tokens_per_second:,.0f} | {found.speed_deviation:+.0%} |"
    )
    name = f"{case.name}, {case.layout.micro_batch} x {case.seq_len}"
    assert f"| {name} | {case.recipe.name}{packed} | {speeds}" in PAGE


def test_what_measured_rates_miss_of_two_gpus_is_what_the_page_says():
    several = [found for found in CALIBRATED if found.case.layout.gpus == 2]
    own = sorted(found.speed_deviation for found in several if found.case.layout.tensor == 1)
    shared = sorted(found.speed_deviation for found in several if found.case.layout.tensor == 2)
    assert [len(own), sum(found <= 0.15 for found in own)] == [8, 1]
    said = f"the rows of two GPUs, {100 * own[0]:+.0f} to {100 * own[-1]:+.0f} % (one of eight within 15 %)"
    assert f"{said}, and {100 * shared[0]:+.0f} and {100 * shared[1]:+.0f} % where" in PAGE.replace("\n", " ")


def test_nothing_is_fitted_to_a_case():
    before = [(p.tokens_per_second, p.gib) for p in FOUND[:3]]
    renamed = [replace(case, why="", source="", tokens_per_second=1.0, gib=1.0) for case in CASES[:3]]
    assert [(p.tokens_per_second, p.gib) for p in (predict(case, DECLARED) for case in renamed)] == before
