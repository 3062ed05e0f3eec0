"""A race of recipes over seeds: looks after each seed, drops recipes that are worse, ends when decided.

Checking a 95 % interval after every seed and stopping at the first that excludes zero is wrong far more often
than in 5 of 100 races. Here all intervals of all looks together have an error of at most 5 %: look n (after n
seeds, n >= 2) of one comparison uses intervals of level

    alpha_n = 0.05 / C * (n - 1) / (1 + 2 + ... + (N - 1))

with N seeds at most and C = K (K + 1) / 2 comparisons among K recipes and the baseline. The shares of the
looks add up to 1, so by Bonferroni's inequality the probability that any interval of the race misses the
difference that it estimates is at most C * 0.05 / C, whatever the dependence between looks and between
recipes. Early looks get a smaller share, because with two seeds t is 12.7 even at the level 0.05.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fourbits.compare.statistics.interval import CONFIDENCE, margin, t_quantile

#: seed -> validation loss; None for a run that did not reach its last step
Losses = Mapping[int, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Why a recipe stopped. seeds: the number it had; against: the recipe or baseline that decided, if any;
    confidence: that of one interval at that look.
    """

    recipe: str
    seeds: int
    why: Literal["worse", "separated", "not finished", "out of seeds"]
    against: str | None
    text: str
    confidence: float


class Race:
    """The recipes that are still in a race, and why the others are not.

    A recipe is out if its interval to the best one lies above zero; the last one ends when its interval to
    the baseline excludes zero. The best is the one with the lowest mean gap.
    """

    def __init__(self, baseline: str, recipes: Sequence[str], seeds: int) -> None:
        """recipes: without the baseline. seeds: the largest number that a recipe can have."""
        self.baseline, self.seeds = baseline, seeds
        self.racing = list(recipes)
        self.stopped: dict[str, Stop] = {}
        self._comparisons = len(recipes) * (len(recipes) + 1) // 2

    def confidence(self, look: int) -> float:
        """Confidence of one interval after `look` seeds."""
        share = (look - 1) / (self.seeds * (self.seeds - 1) / 2)
        return 1 - (1 - CONFIDENCE) * share / self._comparisons

    def look(self, losses: Mapping[str, Losses]) -> list[Stop]:
        """The recipes that stop now. losses: those of racing recipes and the baseline, with equal seeds."""
        seeds = len(losses[self.baseline])
        before = set(self.stopped)
        for recipe in list(self.racing):
            if None in losses[recipe].values():
                self._stop(recipe, seeds, "not finished", None, "a run did not reach its last step")
        self._drop_worse(losses, seeds)
        if len(self.racing) == 1:
            (last,) = self.racing
            mean, half = self._interval(losses, last, self.baseline, seeds)
            if half is not None and abs(mean) > half:
                side = "above" if mean > 0 else "below"
                self._stop(last, seeds, "separated", self.baseline, f"{side} {self.baseline}")
        if seeds == self.seeds:
            self._end(losses, seeds)
        return [stop for name, stop in self.stopped.items() if name not in before]

    def _drop_worse(self, losses: Mapping[str, Losses], seeds: int) -> None:
        if len(self.racing) < 2:
            return
        best = self._best(losses)
        for recipe in [name for name in self.racing if name != best]:
            mean, half = self._interval(losses, recipe, best, seeds)
            if half is not None and mean > half:
                self._stop(recipe, seeds, "worse", best, f"worse than {best}")

    def _end(self, losses: Mapping[str, Losses], seeds: int) -> None:
        """The remaining recipes, after all seeds: not separated from the best, or from the baseline."""
        left = list(self.racing)
        best = self._best(losses) if len(left) > 1 else self.baseline
        for recipe in left:
            if recipe == best:
                text = f"all seeds used; lowest loss, but {len(left) - 1} not separated from it"
            else:
                text = f"all seeds used; not separated from {best}"
            self._stop(recipe, seeds, "out of seeds", None, text)

    def _best(self, losses: Mapping[str, Losses]) -> str:
        """The racing recipe with the lowest mean loss."""
        return min(self.racing, key=lambda name: _mean_of(losses[name]))

    def _interval(
        self, losses: Mapping[str, Losses], recipe: str, other: str, look: int
    ) -> tuple[float, float | None]:
        """Mean difference of two recipes over the seeds that both have, and the margin at this look."""
        pairs = [(own, losses[other][seed]) for seed, own in losses[recipe].items()]
        differences = [own - base for own, base in pairs if own is not None and base is not None]
        if len(differences) < 2:
            return 0.0, None
        return statistics.fmean(differences), margin(differences, self.confidence(look))

    def _stop(
        self,
        recipe: str,
        seeds: int,
        why: Literal["worse", "separated", "not finished", "out of seeds"],
        against: str | None,
        text: str,
    ) -> None:
        self.racing.remove(recipe)
        self.stopped[recipe] = Stop(
            recipe=recipe,
            seeds=seeds,
            why=why,
            against=against,
            text=text,
            confidence=self.confidence(seeds),
        )


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean; None below two values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def seeds_needed(deviation: float, difference: float, most: int = 10_000) -> int | None:
    """Fewest seeds whose 95 % interval has a margin of at most `difference`; None above `most`.

    deviation: standard deviation of a pair's difference, assumed equal for all pairs.
    """
    if _margin_at(deviation, most) > difference:
        return None
    low, high = 1, most  # the margin decreases with n
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _margin_at(deviation, middle) <= difference else (middle, high)
    return high


def _margin_at(deviation: float, n: int) -> float:
    return t_quantile(n - 1) * deviation / math.sqrt(n)


def _mean_of(losses: Losses) -> float:
    return statistics.fmean(loss for loss in losses.values() if loss is not None)
