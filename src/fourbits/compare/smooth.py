"""Curves made readable: a running mean over training steps, and steps that several curves share."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Curve = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]

# Of the length of a run: wide enough to average the noise of batches, narrow enough to show a new data phase.
WINDOW_SHARE = 0.04


def smooth(values: npt.ArrayLike, window: int | None = None) -> Curve:
    """Mean over the steps around each one, as far as there are any. values: [n] -> [n].

    window: how many steps; default 4 % of the curve, at least 3. From the first window with a value that is
    not finite on, the mean is NaN: a curve does not recover from it unseen.
    """
    curve = np.asarray(values, dtype=np.float64)
    half = (window or max(3, round(WINDOW_SHARE * len(curve)))) // 2
    sums = np.concatenate([np.zeros(1), np.cumsum(np.where(np.isfinite(curve), curve, np.nan))])
    first = np.maximum(np.arange(len(curve)) - half, 0)
    last = np.minimum(np.arange(len(curve)) + half + 1, len(curve))
    return (sums[last] - sums[first]) / (last - first)


def relative_gap(curve: npt.ArrayLike, baseline: npt.ArrayLike) -> Curve:
    """How far a loss curve lies above the baseline's, in per cent of it. Both [n], on the same steps."""
    base = np.asarray(baseline, dtype=np.float64)
    return 100.0 * (np.asarray(curve, dtype=np.float64) - base) / base


def common_steps(runs: Sequence[Steps]) -> Steps:
    """Steps that all of several curves have, in order."""
    shared = runs[0]
    for steps in runs[1:]:
        shared = np.intersect1d(shared, steps)
    return shared
