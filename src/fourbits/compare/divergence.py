"""Did a run diverge? Says so with the step, or that it did not.

A loss that is not finite is divergence. Else the smoothed loss is held against a level: the smoothed loss of
the baseline with the same data order, in which what the data do cancels, or without a baseline its own lowest
value so far. A run that rises above the level by a margin and stays there to the end diverged where it last
crossed; one that came back had a spike.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fourbits.compare.smooth import Curve, smooth

# Far outside what a working 4-bit recipe loses (about 1 to 4 %), far below what a lost run shows.
MARGIN_TO_BASELINE = 0.10
# A blend switch moves the training loss by itself; a lost run returns to near the loss of its first steps.
MARGIN_TO_OWN_BEST = 0.25
# The first steps are where initial weights are lost, at different speeds in different precisions.
IGNORED_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Stability:
    """The finding on one run. step: where it diverged, or the top of the spike."""

    verdict: Literal["stable", "spike", "diverged"]
    step: int | None
    reason: str


def judge(steps: npt.ArrayLike, loss: npt.ArrayLike, baseline: npt.ArrayLike | None = None) -> Stability:
    """Judge a training loss curve. steps, loss, baseline: [n], the baseline on the same steps."""
    numbers, curve = np.asarray(steps), np.asarray(loss, dtype=np.float64)
    lost = np.flatnonzero(~np.isfinite(curve))
    if lost.size:
        step = int(numbers[lost[0]])
        return Stability("diverged", step, f"the loss is not finite from step {step} on")
    if baseline is None:
        margin, against = MARGIN_TO_OWN_BEST, "its lowest so far"
        level = np.minimum.accumulate(smooth(curve))
    else:
        margin, against = MARGIN_TO_BASELINE, "the baseline"
        level = smooth(baseline)
    return _judge_excess(numbers, smooth(curve) / level - 1.0, margin, against)


def _judge_excess(steps: np.ndarray, excess: Curve, margin: float, against: str) -> Stability:
    late = np.arange(len(excess)) >= IGNORED_SHARE * len(excess)
    above = (excess > margin) & late
    if not above.any():
        return Stability("stable", None, f"never more than {margin:.0%} above {against}")
    if above[-1]:
        below = np.flatnonzero(~above)
        step = int(steps[below[-1] + 1 if below.size else 0])
        return Stability("diverged", step, f"{excess[-1]:.0%} above {against} at the end")
    top = int(np.nanargmax(np.where(late, excess, -np.inf)))
    return Stability("spike", int(steps[top]), f"{excess[top]:.0%} above {against}, and back")
