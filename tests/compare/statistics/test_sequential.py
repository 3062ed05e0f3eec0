"""A race decides wrongly in at most 5 of 100 cases, and drops what is clearly worse early."""

import itertools
import math

import numpy as np
import pytest

from fourbits.compare.statistics import sequential
from fourbits.compare.statistics.interval import margin
from fourbits.compare.statistics.sequential import Race, seeds_needed, standard_error

NOISE = 0.011  # standard deviation of one pair's gap, nats
SEEDS = 6


def run_race(rng: np.random.Generator, gaps: dict[str, float], seeds: int = SEEDS) -> Race:
    """One race with normal noise; each seed also has a level of its own, which pairing removes."""
    race = Race("bf16", list(gaps), seeds)
    noise = NOISE / math.sqrt(2)
    level = rng.normal(3.0, 0.1, seeds)
    losses = {"bf16": level + rng.normal(0, noise, seeds)} | {
        name: level + gap + rng.normal(0, noise, seeds) for name, gap in gaps.items()
    }
    for look in range(2, seeds + 1):
        if race.racing:
            race.look({n: dict(enumerate(map(float, losses[n][:look]))) for n in ("bf16", *race.racing)})
    return race


def wrong(race: Race, gaps: dict[str, float]) -> bool:
    """Whether the race states something false: a recipe worse than one that is not better, a side of BF16."""
    for stop in race.stopped.values():
        if stop.why == "worse" and stop.against and gaps[stop.recipe] <= gaps[stop.against]:
            return True
        if stop.why == "separated" and (stop.text.startswith("above") != (gaps[stop.recipe] > 0)):
            return True
        if stop.why == "separated" and gaps[stop.recipe] == 0:
            return True
    return False


@pytest.mark.parametrize("gaps", [{"a": 0.0}, {"a": 0.0, "b": 0.0, "c": 0.0}, {"a": 0.0, "b": 0.02}])
def test_a_race_is_wrong_in_at_most_five_of_a_hundred_cases(gaps: dict[str, float]):
    rng, races = np.random.default_rng(7), 1500
    errors = sum(wrong(run_race(rng, gaps), gaps) for _ in range(races))
    # 0.05 plus three standard deviations of a count of that rate.
    assert errors / races <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / races)


def test_without_the_correction_the_same_races_are_wrong_far_more_often(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Race, "confidence", lambda self, look: 0.95)
    rng, races, gaps = np.random.default_rng(7), 500, {"a": 0.0, "b": 0.0, "c": 0.0}
    assert sum(wrong(run_race(rng, gaps), gaps) for _ in range(races)) / races > 0.15


@pytest.mark.parametrize(("recipes", "seeds"), [(1, 2), (1, 6), (4, 12)])
def test_the_levels_of_all_looks_and_comparisons_add_up_to_five_per_cent(recipes: int, seeds: int):
    race = Race("bf16", [str(i) for i in range(recipes)], seeds)
    comparisons = len(list(itertools.combinations(range(recipes + 1), 2)))
    spent = sum(1 - race.confidence(look) for look in range(2, seeds + 1))
    assert comparisons * spent == pytest.approx(0.05)


def test_a_clearly_worse_recipe_is_dropped_early_and_the_best_is_not():
    races = [
        run_race(np.random.default_rng(seed), {"good": 0.03, "bad": 0.15, "close": 0.031})
        for seed in range(40)
    ]
    dropped = [race.stopped["bad"] for race in races]
    assert np.mean([stop.seeds < SEEDS and stop.why == "worse" for stop in dropped]) > 0.9
    assert all(race.stopped["good"].why != "worse" for race in races)


def test_a_single_recipe_ends_when_its_gap_is_separated_from_the_baseline():
    race = run_race(np.random.default_rng(1), {"nvfp4": 0.2})
    assert (race.stopped["nvfp4"].why, race.stopped["nvfp4"].against) == ("separated", "bf16")
    assert race.stopped["nvfp4"].seeds < SEEDS


def test_recipes_that_are_equal_use_all_seeds_and_are_said_not_to_be_separated():
    losses = {name: {0: 3.0, 1: 3.1, 2: 2.9} for name in ("bf16", "a", "b")}
    losses["b"] = {0: 3.001, 1: 3.098, 2: 2.9}
    race = Race("bf16", ["a", "b"], 3)
    for look in (2, 3):
        race.look({name: dict(list(each.items())[:look]) for name, each in losses.items()})
    assert {stop.why for stop in race.stopped.values()} == {"out of seeds"}
    assert race.stopped["a"].text == "all seeds used; not separated from b"
    assert race.stopped["b"].text == "all seeds used; lowest loss, but 1 not separated from it"


def test_a_recipe_with_a_run_that_did_not_finish_stops_at_once():
    race = Race("bf16", ["a", "b"], 4)
    (stop,) = race.look({"bf16": {0: 3.0, 1: 3.0}, "a": {0: 3.1, 1: None}, "b": {0: 3.1, 1: 3.2}})
    assert (stop.recipe, stop.why, race.racing) == ("a", "not finished", ["b"])


def test_seeds_needed_is_the_fewest_with_that_margin():
    for difference in (0.002, 0.005, 0.02):
        n = seeds_needed(NOISE, difference)
        assert n is not None
        assert sequential._margin_at(NOISE, n) <= difference
        assert n == 2 or sequential._margin_at(NOISE, n - 1) > difference
    assert seeds_needed(1.0, 1e-6) is None
    values = [0.02, 0.03, 0.05]
    error = standard_error(values)
    assert error is not None
    assert margin(values) == pytest.approx(4.302653 * error, rel=1e-6)
    assert standard_error([0.02]) is None
