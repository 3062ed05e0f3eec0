"""Differences between two recipes with the same seed, and their intervals."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fourbits.compare.number_format import DASH, signed
from fourbits.compare.report.comparison import Comparison
from fourbits.compare.report.runs import Run
from fourbits.compare.statistics.interval import CONFIDENCE, margin


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Mean over seeds, and half the width of its interval (None for one seed)."""

    mean: float
    margin: float | None
    seeds: int

    @property
    def within_noise(self) -> bool | None:
        """Whether the interval includes zero; None for one seed."""
        return None if self.margin is None else abs(self.mean) <= self.margin


def difference(values: Sequence[float], confidence: float = CONFIDENCE) -> Difference | None:
    """The mean of one value per seed; None without values."""
    if not values:
        return None
    return Difference(mean=statistics.fmean(values), margin=margin(values, confidence), seeds=len(values))


def signed_difference(found: Difference | None, digits: int) -> str:
    """A difference with its sign and margin; a dash for None."""
    return DASH if found is None else signed(found.mean, digits, found.margin)


def finished_pairs(comparison: Comparison, recipe: str, other: str) -> list[tuple[Run, Run]]:
    """The runs of two recipes with one seed each, for the seeds in which both reached their last step."""
    others = comparison.runs[other]
    return [
        (run, others[seed])
        for seed, run in comparison.runs[recipe].items()
        if run.finished and seed in others and others[seed].finished
    ]


def paired_losses(comparison: Comparison, recipe: str, other: str) -> list[tuple[float, float]]:
    """Final validation losses of two recipes, by seed."""
    return [(run.final_loss, base.final_loss) for run, base in finished_pairs(comparison, recipe, other)]
