"""docs/results.md: its figures are those of the benchmarks, the log and the paper."""

import itertools
import re
from pathlib import Path

import pytest

from fourbits.harness.suites import PAPER_RESULTS
from fourbits.recipe.presets import get_recipe

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "results.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The cells of a section's tables."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line
    ]


def test_the_papers_scores_are_those_beside_which_reports_put_a_run():
    shown = {(float(fp8), float(nvfp4)) for _, fp8, nvfp4, _ in rows("Tasks")[2:]}
    assert shown - set(PAPER_RESULTS.values()) == {(74.0, 74.94)}, (
        "Global MMLU, of which a suite has languages"
    )
    assert set(PAPER_RESULTS.values()) <= shown


OWN = [row for row in rows("Loss against the baseline") if len(row) == 6 and row[0].startswith("`")]


@pytest.mark.parametrize("row", OWN, ids=lambda row: f"{row[0]} {row[2]}")
def test_our_losses_are_recorded_and_their_ratio_is_right(row):
    *_, found, baseline, more = row
    recorded = (DOCS / "benchmarks.md").read_text() + (DOCS / "log.md").read_text()
    assert re.search(rf"\b{re.escape(found)}\b", recorded)
    assert re.search(rf"\b{re.escape(baseline)}\b", recorded)
    assert more == f"{100 * (float(found) / float(baseline) - 1):.2f} %"


def test_ratios_of_proxies_are_those_of_their_table_and_agree_as_the_text_says():
    _, _, first, *others = rows("Proxies")
    for row in (first, *others):
        pairs = [(row[1], first[1], row[2]), (row[3], first[3], row[4])]
        for value, base, ratio in pairs if row[3] else pairs[:1]:
            # The quotient, rounded half up to four digits.
            assert abs(float(value) / float(base) - float(ratio)) <= 0.5e-4 + 1e-12
        if row[3]:
            assert abs(float(row[2]) / float(row[4]) - 1) < 0.005


def ordered(of: list[tuple[float, float]]) -> int:
    """Pairs of rows that two columns put in the same order."""
    return sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in itertools.combinations(of, 2))


def test_proxies_of_twelve_rules_order_as_many_pairs_as_the_text_says():
    table = rows("Proxies of twelve rules")[2:]
    forward = [(float(row[1]), float(row[2])) for row in table if row[2]]
    snr = [(float(row[1]), -float(row[3])) for row in table if row[3]]
    bias = [(float(row[1]), float(row[4])) for row in table if row[4]]
    assert (len(forward), len(bias)) == (6, 6)
    assert (ordered(forward), ordered(bias), ordered(snr)) == (14, 13, 10)


def test_the_command_for_proxies_names_recipes_with_the_forwards_of_the_table():
    names = re.search(r"--proxies --recipes ([\w -]+?) --train", PAGE)
    assert names is not None
    forwards = [get_recipe(name).fprop for name in names[1].split()]
    found = [(each.rhs.block_size, each.lhs.scale_rule, each.rhs.scale_rule) for each in forwards]
    assert found == [
        ((1, 16), "max", "max"),
        ((1, 16), "4over6-mse", "4over6-mse"),
        ((16, 16), "max", "max"),
        ((16, 16), "4over6-mse", "4over6-mse"),
    ]
    assert all(each.lhs.block_size == (1, 16) for each in forwards)


def test_losses_of_all_machines_are_shown():
    assert {row[1] for row in OWN} == {"CPU", "H100", "H200"}
