"""Decides whether a run diverged, and at which step.

A non-finite loss is divergence. Otherwise the smoothed loss is compared with a reference level: the smoothed
loss of the baseline on the same data order, which cancels the effect of the data, or without a baseline the
run's own minimum so far. A run that rises above the level by a margin and stays there to the end diverged
where it last crossed the margin; a run that came back had a spike.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fourbits.compare.report.curves import Curve, smooth

# Far outside the gap of a working 4-bit recipe (about 1 to 4 %), far below that of a diverged run.
MARGIN_TO_BASELINE = 0.10
# A new data phase shifts the training loss by itself; a diverged run returns to nearly its initial loss.
MARGIN_TO_OWN_MINIMUM = 0.25
# In the first steps the loss falls fast, and at different rates in different precisions.
IGNORED_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Stability:
    """The verdict on one run. step: where it diverged, or the peak of the spike."""

    verdict: Literal["stable", "spike", "diverged"]
    step: int | None
    reason: str


def judge(steps: npt.ArrayLike, loss: npt.ArrayLike, baseline: npt.ArrayLike | None = None) -> Stability:
    """Judge a training loss curve. steps, loss, baseline: [n], the baseline on the same steps."""
    numbers, curve = np.asarray(steps), np.asarray(loss, dtype=np.float64)
    non_finite = np.flatnonzero(~np.isfinite(curve))
    if non_finite.size:
        step = int(numbers[non_finite[0]])
        return Stability("diverged", step, f"the loss is not finite from step {step} onwards")
    if baseline is None:
        margin, reference = MARGIN_TO_OWN_MINIMUM, "its own minimum"
        level = np.minimum.accumulate(smooth(curve))
    else:
        margin, reference = MARGIN_TO_BASELINE, "the baseline"
        level = smooth(baseline)
    return _judge_excess(numbers, smooth(curve) / level - 1.0, margin, reference)


def _judge_excess(steps: np.ndarray, excess: Curve, margin: float, reference: str) -> Stability:
    late = np.arange(len(excess)) >= IGNORED_SHARE * len(excess)
    above = (excess > margin) & late
    if not above.any():
        return Stability("stable", None, f"never more than {margin:.0%} above {reference}")
    if above[-1]:
        below = np.flatnonzero(~above)
        step = int(steps[below[-1] + 1 if below.size else 0])
        return Stability("diverged", step, f"{excess[-1]:.0%} above {reference} at the end")
    top = int(np.nanargmax(np.where(late, excess, -np.inf)))
    return Stability("spike", int(steps[top]), f"{excess[top]:.0%} above {reference}, then recovered")
