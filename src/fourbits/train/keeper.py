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
from fourbits.train.checkpoint import Tensors, checkpoints, remove_old, save_checkpoint, step_of

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
    ) -> None:
        """keep: newest checkpoints that stay; keep_every: those of multiples of this step stay, too.

        resumed: step of the checkpoint that the run continues from, which has yet to prove good.
        """
        self._write = write
        self.folder, self.keep, self.keep_every = folder, keep, keep_every
        self._unproved = resumed

    def save(self, step: int, files: Mapping[str, Tensors], state: Mapping[str, Any]) -> None:
        """Write the checkpoint of `step`. Raises what `save_checkpoint` raises."""
        self._write(self.folder, step, files, state)
        self._unproved = step

    def proved(self, step: int) -> None:
        """`step` was finite: if a checkpoint of an earlier step waits for this, remove old checkpoints."""
        if self._unproved is not None and step > self._unproved:
            self.rotate()

    def rotate(self) -> None:
        """Remove old checkpoints, and unfinished ones that killed runs left behind."""
        remove_old(self.folder, self.keep, self.keep_every)
        self._unproved = None


def require_space(folder: Path, keep: int, checkpoint_bytes: int) -> None:
    """Raises OSError unless keep + 1 checkpoints fit on the disk, counting those that are there already."""
    needed = max(1, keep + 1 - len(checkpoints(folder))) * checkpoint_bytes
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"{free / 1e6:,.1f} MB are free, {needed / 1e6:,.1f} MB are needed: {keep + 1} checkpoints of "
            f"{checkpoint_bytes / 1e6:,.1f} MB exist at a time (train.keep_checkpoints + 1). {FREE_SPACE}",
            str(folder),
        )


def last_good(folder: Path, first_bad: int) -> Path | None:
    """The newest checkpoint that a finite step followed, where `first_bad` is the first step that was not."""
    good = [path for path in checkpoints(folder) if step_of(path) < first_bad - 1]
    return good[-1] if good else None
