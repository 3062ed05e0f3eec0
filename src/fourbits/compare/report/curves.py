"""Curves over training: lines for charts, running means, gaps, and the steps that runs have in common."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Curve = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]

# Share of the run: wide enough to average out batch noise, narrow enough to show a new data phase.
WINDOW_SHARE = 0.04


@dataclass(frozen=True, slots=True)
class Line:
    """A curve over training tokens. series: index of its colour.

    tokens, value: [n], and n may be 0; low, high: [n], the range over seeds, None for one seed.
    """

    name: str
    series: int
    tokens: Curve
    value: Curve
    low: Curve | None = None
    high: Curve | None = None


def smooth(values: npt.ArrayLike, window: int | None = None) -> Curve:
    """Centred running mean; windows at the ends are shorter. values: [n] -> [n].

    window: number of steps; default 4 % of the curve, at least 3. From the first window with a non-finite
    value onwards the mean is NaN, so that a diverged run does not appear to recover.
    """
    curve = np.asarray(values, dtype=np.float64)
    half = (window or max(3, round(WINDOW_SHARE * len(curve)))) // 2
    sums = np.concatenate([np.zeros(1), np.cumsum(np.where(np.isfinite(curve), curve, np.nan))])
    first = np.maximum(np.arange(len(curve)) - half, 0)
    last = np.minimum(np.arange(len(curve)) + half + 1, len(curve))
    return (sums[last] - sums[first]) / (last - first)


def relative_gap(curve: npt.ArrayLike, baseline: npt.ArrayLike) -> Curve:
    """Gap of a loss curve to the baseline, in per cent of the baseline. Both [n], on the same steps."""
    base = np.asarray(baseline, dtype=np.float64)
    return 100.0 * (np.asarray(curve, dtype=np.float64) - base) / base


def common_steps(runs: Sequence[Steps]) -> Steps:
    """Steps that all runs have, in order."""
    shared = runs[0]
    for steps in runs[1:]:
        shared = np.intersect1d(shared, steps)
    return shared
