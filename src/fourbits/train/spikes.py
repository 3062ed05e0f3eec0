"""Loss spikes: a step whose loss is far above those of the steps before it.

The threshold is robust: the median of the last WINDOW losses plus DEVIATIONS standard deviations, which are
estimated by 1.4826 times the median absolute deviation (the factor for normal noise), and at least FLOOR of
the median above it, because late losses hardly vary. Losses of spikes do not enter the window. After PATIENCE
spikes in a row the loss has a new level, as after a change of data, and the window starts again.

All of this stays on the device, so that a step can be skipped without waiting for the host.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

WINDOW, FEWEST = 128, 32
DEVIATIONS, FLOOR = 8.0, 0.05
PATIENCE = 10
_NORMAL = 1.4826


class SpikeState(NamedTuple):
    """The state in a checkpoint: the losses in the window, oldest first, and the spikes in a row."""

    losses: Sequence[float]
    in_a_row: int


class SpikeDetector:
    """Compares each loss with the window before it."""

    def __init__(self, device: torch.device) -> None:
        self._losses = torch.full((WINDOW,), math.nan, dtype=torch.float32, device=device)
        self._in_a_row = torch.zeros((), dtype=torch.int64, device=device)

    def compare(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """(whether the loss is a spike, bool; the threshold, FP32, infinite below FEWEST losses).

        loss: FP32 scalar; one that is not finite is no spike and does not enter the window.
        """
        threshold = self._threshold()
        spiked = loss > threshold
        spiked &= loss.isfinite()
        in_a_row = torch.where(spiked, self._in_a_row + 1, 0)
        new_level = in_a_row >= PATIENCE
        kept = torch.where(new_level, math.nan, self._losses)
        enters = loss.isfinite() & ~spiked
        self._losses = torch.where(enters, torch.cat((kept[1:], loss.reshape(1))), kept)
        self._in_a_row = torch.where(new_level, 0, in_a_row)
        return spiked, threshold

    def state(self) -> SpikeState:
        """The state for a checkpoint; waits for the device."""
        losses = [loss for loss in self._losses.tolist() if not math.isnan(loss)]
        return SpikeState(losses, int(self._in_a_row))

    def load(self, state: SpikeState) -> None:
        """Continue from a saved state."""
        losses = [math.nan] * (WINDOW - len(state.losses)) + list(state.losses)
        device = self._losses.device
        self._losses = torch.tensor(losses, dtype=torch.float32, device=device)
        self._in_a_row = torch.tensor(state.in_a_row, dtype=torch.int64, device=device)

    def _threshold(self) -> Tensor:
        median = self._losses.nanmedian()
        deviation = _NORMAL * (self._losses - median).abs().nanmedian()
        above = torch.maximum(DEVIATIONS * deviation, FLOOR * median.abs())
        enough = (~self._losses.isnan()).sum() >= FEWEST
        return torch.where(enough, median + above, math.inf)
