"""The tables of a plan: every number has a unit, and little is not shown as nothing."""

import re

import pytest

from fourbits.cli.main import main
from fourbits.compare.number_format import long_duration
from fourbits.compare.report.plan_tables import plan_tables
from fourbits.plan.estimate import Prices, plan_run
from fourbits.plan.gpus import GPUS
from fourbits.train.presets import RUN_PRESETS

TINY = list(plan_tables("tiny", plan_run(RUN_PRESETS["tiny"], GPUS["h100"], 1), Prices(gpu_hour=2.0)))
#: what names the unit of a column of bare numbers
UNITS = ("parameters", "FLOPs", "GiB", "tokens/s", "step s", "ms", "MWh", "cost")
NUMBER = re.compile(r"[\d,.]+(e-\d+)?[kMBT]?")


@pytest.mark.parametrize(
    "table", [t for t in TINY if t.columns[0] != "setting"], ids=lambda table: table.title[:20]
)
def test_a_column_of_bare_numbers_names_its_unit(table):
    for column, cells in zip(table.columns, zip(*table.rows, strict=True), strict=True):
        if any(NUMBER.fullmatch(cell) for cell in cells):
            assert any(unit in column for unit in UNITS), column


def test_memory_and_times_of_a_small_model_are_not_shown_as_zero():
    shown = [
        cell
        for table in TINY
        for row in table.rows
        for name, cell in zip(table.columns, row, strict=True)
        if name in ("GiB", "ms", "step s") and cell
    ]
    assert len(shown) > 20
    assert [cell for cell in shown if float(cell.replace(",", "")) == 0] == []


def test_the_title_has_the_unit_of_a_step():
    assert TINY[0].title.endswith("in 245 steps of 2.05k tokens")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 s"), (0.213, "0.21 s"), (2.04, "2 s"), (9.96, "10 s"), (42.4, "42 s")]
)
def test_seconds_below_ten_have_two_digits(seconds, text):
    assert long_duration(seconds) == text


def test_published_figures_have_units(capsys):
    assert main(["plan", "--published"]) == 0
    header = capsys.readouterr().out.splitlines()[1]
    for name in ("predicted tokens/s", "measured tokens/s", "predicted GiB", "measured GiB"):
        assert name in header
