"""Rolling back: a run returns to a checkpoint before a step that went wrong, and skips the data since.

The weights that led to a loss spike or to a NaN may be bad some steps before anything shows, so that skipping
one update does not help (PaLM, arXiv:2204.02311, section 5.1: restart about 100 steps before the spike,
without the batches around it). What a rollback does is a function of the steps that were trained: only
checkpoints of `train.checkpoint_interval` count, and not those saved on a signal or by the clock. So a run
that is killed before, within or after one ends with the bits of an undisturbed one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fourbits.train.config import TrainConfig
from fourbits.train.non_finite import NonFiniteError


class RollbackCause(Exception):  # noqa: N818 - a decision, which the run acts on
    """Why a run rolls back: the step that went wrong, and how."""

    def __init__(self, step: int, reason: str, finite: bool) -> None:
        """step: 1 for the first. finite: whether it was a spike, and not a NaN or an infinity."""
        super().__init__(reason)
        self.step, self.reason, self.finite = step, reason, finite


class RollbackError(RuntimeError):
    """A run has rolled back as often as it may, and its loss spikes again."""


class Rollbacks(NamedTuple):
    """The rollbacks of a run so far. data_offset: steps whose data they skipped."""

    count: int = 0
    data_offset: int = 0

    def after(self, cause: RollbackCause, to: int) -> "Rollbacks":
        """One more rollback, to the checkpoint of step `to`."""
        return Rollbacks(self.count + 1, self.data_offset + cause.step - to)


@dataclass(frozen=True, slots=True)
class RollbackPolicy:
    """Where a run rolls back to. steps: at least this far back; start_step: the step it started after."""

    steps: int
    interval: int
    limit: int
    start_step: int = 0

    @classmethod
    def of(cls, train: TrainConfig, start_step: int) -> "RollbackPolicy | None":
        """The policy of a run's settings; None if it does not roll back."""
        if not train.rolls_back or train.checkpoint_interval is None:
            return None
        return cls(train.rollback_steps, train.checkpoint_interval, train.max_rollbacks, start_step)

    @property
    def most(self) -> int:
        """How many checkpoints are needed at a time."""
        return self.steps // self.interval + 2

    def target(self, saved: Sequence[int], bad: int, count: int = 0) -> int | None:
        """The newest of the saved steps that is `steps` before step `bad`, or start_step; else None.

        saved: steps with a checkpoint; count: how often the run has rolled back; at the limit, returns None.
        """
        if count >= self.limit:
            return None
        latest = max(bad - self.steps, self.start_step)
        return max((step for step in saved if step <= latest and self._counts(step)), default=None)

    def needed(self, saved: Sequence[int], finite: int) -> set[int]:
        """The saved steps that a rollback may need once step `finite` was finite."""
        target = self.target(saved, finite + 1)
        return {step for step in saved if self._counts(step) and (target is None or step >= target)}

    def error(self, cause: RollbackCause, count: int, checkpoints: Path) -> NonFiniteError | RollbackError:
        """The error of a run that cannot roll back. count: its rollbacks; checkpoints: their folder."""
        why = f"No checkpoint is {self.steps} steps older (train.rollback_steps)"
        if count >= self.limit:
            why = f"The run has rolled back {count} times, as often as train.max_rollbacks allows"
        text = f"step {cause.step}: {cause.reason}. {why}."
        if not cause.finite:
            return NonFiniteError(text)
        return RollbackError(
            f"{text} Rerun the command with train.spike report, or start from an earlier checkpoint with a "
            f"lower learning rate: fourbits train --from {checkpoints}/step_N --out NEW --optim.lr LOWER."
        )

    def _counts(self, step: int) -> bool:
        return step % self.interval == 0 or step == self.start_step
