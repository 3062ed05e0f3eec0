"""The checkpoints that a run keeps: the newest, every N-th, and always the last one that proved good.

The weights after step N are first used by step N + 1. So a checkpoint of step N is good once step N + 1 had a
finite loss and finite gradients, and only then are older checkpoints removed. Within a streak of skipped
steps nothing is saved: the state is that of the step before the streak, and no later step has succeeded.
"""

import errno
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fourbits.data.whole_file import FREE_SPACE
from fourbits.train.background import BackgroundSaver, Write
from fourbits.train.checkpoint import (
    Tensors,
    amend,
    checkpoints,
    remove_after,
    remove_old,
    save_checkpoint,
    step_of,
)
from fourbits.train.rollback import RollbackPolicy


class CheckpointKeeper:
    """Saves the checkpoints of one run and removes those that are no longer needed."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        keep_every: int | None,
        resumed: int | None,
        write: Write = save_checkpoint,
        background: BackgroundSaver | None = None,
        rollback: RollbackPolicy | None = None,
    ) -> None:
        """keep: how many of the newest checkpoints are kept; keep_every: those of its multiples are, too.

        resumed: step of the checkpoint that the run continues from, which has yet to prove good. background:
        saves in place of `write`, while training goes on. rollback: checkpoints that it may need are kept.
        """
        self._write, self._background, self.rollback = write, background, rollback
        self.folder, self.keep, self.keep_every = folder, keep, keep_every
        self._unproved = resumed

    def save(self, step: int, files: Mapping[str, Tensors], state: Mapping[str, Any]) -> None:
        """Write the checkpoint of `step`, or begin to. Raises what `save_checkpoint` raises.

        In the background, also what the save before this one raised.
        """
        if self._background is None:
            self._write(self.folder, step, files, state)
            self._unproved = step
            return
        self.settle()
        self._background.start(self.folder, step, files, state)

    def settle(self) -> None:
        """Wait for a save in the background. Raises what it raised."""
        self._check_save(wait=True)

    def _check_save(self, wait: bool) -> bool:
        """Record a background save that has ended, or raise its error. Returns whether none is running."""
        if self._background is None:
            return True
        saved = self._background.ended(wait=wait)
        self._unproved = self._unproved if saved is None else saved
        return not self._background.is_saving

    def proved(self, step: int) -> None:
        """`step` was finite: if a checkpoint of an earlier step waits for this, remove old checkpoints.

        Not during a save, whose unfinished folder looks like one of a killed run.
        """
        if self._check_save(wait=False) and self._unproved is not None and step > self._unproved:
            self.remove_old(step)

    def remove_old(self, finite: int | None = None) -> None:
        """Remove old checkpoints, and unfinished ones that killed runs left behind.

        finite: the last step that was finite, if later ones may make the run roll back.
        """
        self.settle()
        needed: set[int] = set()
        if self.rollback is not None and finite is not None:
            needed = self.rollback.needed(self.saved(), finite)
        remove_old(self.folder, self.keep, self.keep_every, needed)
        self._unproved = None

    def saved(self) -> list[int]:
        """The steps that have a checkpoint, oldest first."""
        return [step_of(path) for path in checkpoints(self.folder)]

    def return_to(self, step: int, state: Mapping[str, Any]) -> None:
        """Remove the checkpoints of later steps, and change the state of that of `step`.

        In this order: a run killed in between continues from a checkpoint before the rollback, and rolls
        back again.
        """
        remove_after(self.folder, step)
        amend(self.folder / f"step_{step}", state)
        self._unproved = None


def require_space(
    folder: Path, keep: int, checkpoint_bytes: int, rollback: RollbackPolicy | None = None
) -> None:
    """Raises OSError unless keep + 1 checkpoints fit on the disk, counting those that are there already.

    rollback: it may need more of them.
    """
    why = "train.keep_checkpoints + 1"
    if rollback is not None and rollback.most > keep:
        keep, why = rollback.most, "for rollbacks, train.rollback_steps / train.checkpoint_interval + 3"
    needed = max(1, keep + 1 - len(checkpoints(folder))) * checkpoint_bytes
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"{free / 1e6:,.1f} MB are free, {needed / 1e6:,.1f} MB are needed: {keep + 1} checkpoints of "
            f"{checkpoint_bytes / 1e6:,.1f} MB exist at a time ({why}). {FREE_SPACE}",
            str(folder),
        )


def last_good(folder: Path, first_bad: int) -> Path | None:
    """The newest checkpoint that a finite step followed, where `first_bad` is the first step that was not."""
    good = [path for path in checkpoints(folder) if step_of(path) < first_bad - 1]
    return good[-1] if good else None


def remedy_of(good: Path | None) -> str:
    """The remedy after a non-finite step. good: the last good checkpoint."""
    if good is None:
        return "No checkpoint before it is good: train again in another --out with a lower optim.lr."
    return (
        f"The last good checkpoint is {good}: continue from it with a lower learning rate, "
        f"fourbits train --from {good} --out NEW --optim.lr LOWER."
    )
