"""Which checkpoints of a run stay: the newest, every N-th, and always the last one that proved good.

The weights after step N are first used by step N + 1. So a checkpoint of step N is good once step N + 1 had a
finite loss and finite gradients, and only then older checkpoints are removed. Within a streak of skipped
steps nothing is saved: its state is that of the step before the streak, which no later step could use.
"""

import errno
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fourbits.data.whole_file import FREE_SPACE
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

#: writes folder/step_N with the tensors of each part, and its state
Write = Callable[[Path, int, Mapping[str, Tensors], Mapping[str, Any]], object]


class CheckpointKeeper:
    """Saves the checkpoints of one run and removes those that are no longer needed."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        keep_every: int | None,
        resumed: int | None,
        write: Write = save_checkpoint,
        rollback: RollbackPolicy | None = None,
    ) -> None:
        """keep: newest checkpoints that stay; keep_every: those of multiples of this step stay, too.

        resumed: step of the checkpoint that the run continues from, which has yet to prove good.
        rollback: those that it may need stay, too.
        """
        self._write, self.rollback = write, rollback
        self.folder, self.keep, self.keep_every = folder, keep, keep_every
        self._unproved = resumed

    def save(self, step: int, files: Mapping[str, Tensors], state: Mapping[str, Any]) -> None:
        """Write the checkpoint of `step`. Raises what `save_checkpoint` raises."""
        self._write(self.folder, step, files, state)
        self._unproved = step

    def proved(self, step: int) -> None:
        """`step` was finite: if a checkpoint of an earlier step waits for this, remove old checkpoints."""
        if self._unproved is not None and step > self._unproved:
            self.rotate(step)

    def rotate(self, finite: int | None = None) -> None:
        """Remove old checkpoints, and unfinished ones that killed runs left behind.

        finite: the last step that was finite, if later ones may make the run roll back.
        """
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
    """What to do after a non-finite step. good: the last good checkpoint."""
    if good is None:
        return "No checkpoint before it is good: train again in another --out with a lower optim.lr."
    return (
        f"The last good checkpoint is {good}: continue from it with a lower learning rate, "
        f"fourbits train --from {good} --out NEW --optim.lr LOWER."
    )
