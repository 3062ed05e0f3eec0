"""The blend: exact integer shares at every prefix, and cursors that neither lose nor repeat a sample."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourbits.data.stream.blend import MAX_PERIOD, Blend, Phase, fair_order, integer_weights

NAMES = ("a", "b", "c", "d")


@st.composite
def shares(draw):
    """Weights of NAMES that sum to 1, some of them 0, with awkward denominators."""
    slots = draw(st.lists(st.integers(0, 60), min_size=4, max_size=4).filter(any))
    return {name: count / sum(slots) for name, count in zip(NAMES, slots, strict=True)}


@st.composite
def runs(draw):
    """Phases and a number of samples."""
    cuts = sorted(draw(st.sets(st.integers(1, 99), max_size=3)))
    phases = [Phase(until=cut / 100, weights=draw(shares())) for cut in [*cuts, 100]]
    return phases, draw(st.integers(1, 700))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any))
def test_every_prefix_of_a_period_is_within_one_turn_of_the_weights(slots):
    order = fair_order(slots)
    length = np.arange(1, len(order) + 1)
    for source, count in enumerate(slots):
        got = np.cumsum(order == source)
        assert (np.abs(got * len(order) - length * count) < len(order)).all()
        assert got[-1] == count


def test_the_order_of_seven_to_three_by_hand():
    # The turns of a are released at slots 0 1 2 4 5 7 8, due before 2 3 5 6 8 9 10; those of b at 0 3 6, due
    # before 4 7 10. The earliest deadline goes first; in slot 8 both are 10, and the first source wins.
    assert fair_order([7, 3]).tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 0, 1]


@settings(deadline=None)
@given(runs())
def test_each_source_is_read_from_its_start_without_loss_or_repetition(run):
    phases, total = run
    blend = Blend(NAMES, phases, total)
    source, cursor = blend.locate(np.arange(total))
    for number in range(len(NAMES)):
        assert cursor[source == number].tolist() == list(range(int((source == number).sum())))


@settings(deadline=None)
@given(runs(), st.data())
def test_cursors_count_the_samples_that_locate_returns(run, data):
    phases, total = run
    blend = Blend(NAMES, phases, total)
    sample = data.draw(st.integers(0, total))
    source, _ = blend.locate(np.arange(sample))
    assert list(blend.cursors(sample).values()) == [
        int((source == number).sum()) for number in range(len(NAMES))
    ]


@settings(deadline=None)
@given(runs())
def test_every_prefix_of_a_phase_is_within_one_sample_of_its_integer_weights(run):
    phases, total = run
    blend = Blend(NAMES, phases, total)
    source, _ = blend.locate(np.arange(total))
    for phase in blend.phases:
        period = phase.weights.period
        part = source[phase.first : phase.end]
        for number, name in enumerate(NAMES):
            got = np.cumsum(part == number)
            ideal = np.arange(1, len(part) + 1) * phase.weights.slots[name]
            assert (np.abs(got * period - ideal) < period).all()


def test_phases_switch_at_seventy_and_ninety_percent_exactly():
    thirds = [Phase(until=until, weights={"a": 1.0}) for until in (0.7, 0.9, 1.0)]
    assert [phase.end for phase in Blend(["a"], thirds, 10).phases] == [7, 9, 10]
    assert [phase.end for phase in Blend(["a"], thirds, 1_000_003).phases] == [700_002, 900_003, 1_000_003]


@given(shares())
def test_fractions_of_a_small_period_are_exact(weights):
    integer = integer_weights(weights)
    assert integer.error == 0
    assert sum(integer.slots.values()) == integer.period <= 240
    for name, weight in weights.items():
        assert integer.slots[name] / integer.period == pytest.approx(weight, abs=1e-15)


@given(st.lists(st.floats(1e-3, 1), min_size=2, max_size=20))
def test_other_weights_are_rounded_by_largest_remainder_with_the_reported_error(values):
    weights = {f"s{i}": value / sum(values) for i, value in enumerate(values)}
    integer = integer_weights(weights)
    assert sum(integer.slots.values()) == integer.period <= MAX_PERIOD
    errors = [abs(Fraction(integer.slots[n], integer.period) - Fraction(w)) for n, w in weights.items()]
    assert float(max(errors)) <= 1 / MAX_PERIOD
    assert integer.error == pytest.approx(float(max(errors)), abs=1e-12)


def test_a_tiny_weight_keeps_a_slot_and_a_lost_one_is_an_error():
    kept = integer_weights({"big": 1 - 0.6 / MAX_PERIOD, "small": 0.6 / MAX_PERIOD})
    assert kept.slots == {"big": MAX_PERIOD - 1, "small": 1}
    with pytest.raises(ValueError, match="'small' is less than half of 1/65536"):
        integer_weights({"big": 1 - 1e-7, "small": 1e-7})


def test_the_slots_of_sources_raised_to_one_come_from_the_others():
    weights = {f"s{i}": 0.6 / MAX_PERIOD for i in range(100)}
    integer = integer_weights({**weights, "big": 1 - sum(weights.values())})
    assert all(integer.slots[name] == 1 for name in weights)
    assert sum(integer.slots.values()) == MAX_PERIOD


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([], "at least one phase"),
        ([Phase(until=0.5, weights={"a": 1.0})], "last phase must end at 1"),
        ([Phase(until=1.5, weights={"a": 1.0})], "phase 1 must end after 0"),
        (
            [Phase(until=1.0, weights={"a": 1.0}), Phase(until=1.0, weights={"a": 1.0})],
            "phase 2 must end after 1",
        ),
        ([Phase(until=1.0, weights={"a": 0.5, "b": 0.4})], "must sum to 1, got 0.9"),
        ([Phase(until=1.0, weights={"a": 1.5, "b": -0.5})], "'a' must be between 0 and 1, got 1.5"),
        (
            [Phase(until=1.0, weights={"code1": 1.0})],
            "'code1'; the sources are a, b, code. Did you mean 'code'",
        ),
    ],
)
def test_invalid_phases_are_rejected(phases, message):
    with pytest.raises(ValueError, match=message):
        Blend(["a", "b", "code"], phases, 100)
