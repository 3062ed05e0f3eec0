"""Charts as inline SVG: labels do not overlap, colours are CSS variables, ids are unique."""

import itertools
import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fourbits.compare.number_format import short_count
from fourbits.compare.report.curves import Line
from fourbits.compare.report.figures import metric_chart
from fourbits.compare.report.svg import separate

CURVE = Line("lr", 3, np.array([1.0, 2.0, 3.0]), np.array([0.1, 0.2, 0.1]))
PLACES = st.lists(st.floats(0, 100), min_size=1, max_size=8).map(sorted)


@given(PLACES)
def test_labels_are_moved_apart_in_order_and_within_the_axes(places: list[float]):
    moved = separate(places, 10.0, 0.0, 100.0)
    assert len(moved) == len(places)
    assert all(after - before >= 10.0 - 1e-9 for before, after in itertools.pairwise(moved))
    assert moved[0] >= 0.0
    assert moved[-1] <= 100.0 + 1e-9


@given(PLACES)
def test_labels_that_do_not_overlap_stay_in_place(places: list[float]):
    apart = [12.0 * at + 0.01 * place for at, place in enumerate(places)]
    assert separate(apart, 10.0, 0.0, 200.0) == apart


def test_two_labels_at_one_position_move_equally_far():
    assert separate([50.0, 50.0], 10.0, 0.0, 100.0) == [45.0, 55.0]


def test_a_chart_takes_its_colours_and_fonts_from_the_page():
    chart = metric_chart("Learning rate", CURVE)
    for svg in (chart.wide, chart.narrow):
        assert "var(--series-3)" in svg
        assert "var(--sans)" in svg
        assert not re.findall(r"#[0-9a-f]{6}\b", svg), "a colour that the page does not set"


def test_the_ids_of_the_two_forms_of_a_chart_differ():
    chart = metric_chart("Learning rate", CURVE)
    svg = chart.wide + chart.narrow
    ids = re.findall(r'id="([^"]+)"', svg)
    assert len(ids) == len(set(ids)) > 0
    used = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', svg)
    assert {a or b for a, b in used} <= set(ids)


def test_token_counts_are_short():
    assert [short_count(t, digits=6) for t in (0, 500, 250e3, 1.5e6, 2e9)] == [
        "0",
        "500",
        "250k",
        "1.5M",
        "2B",
    ]
