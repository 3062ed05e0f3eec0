"""Saves in a thread, of a copy in the host's memory, while training goes on.

Nothing here knows what a checkpoint is: it appears complete or not at all, as when training waits for it.
"""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fourbits.train.checkpoint import Tensors
from fourbits.train.host_copy import HostCopy, Stored

#: writes folder/step_N with the tensors of each part, and its state
Write = Callable[[Path, int, Mapping[str, Tensors], Mapping[str, Any]], object]


class BackgroundSaver:
    """At most one save at a time."""

    def __init__(self, write: Write, ranks: Stored) -> None:
        """write: called in the thread."""
        self._write, self._copy = write, HostCopy(ranks)
        self._thread: threading.Thread | None = None
        self._step = 0
        self._error: BaseException | None = None

    def reserve(self, files: Mapping[str, Tensors]) -> None:
        """Allocate what the copies need."""
        self._copy.reserve(files)

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way, or has ended and `ended` has not returned it yet."""
        return self._thread is not None

    def start(self, folder: Path, step: int, files: Mapping[str, Tensors], state: Mapping[str, Any]) -> None:
        """Copy the tensors, and write folder/step_N in the thread. Only when no save is under way."""
        assert self._thread is None
        copied, state = self._copy.copy(files), dict(state)
        self._step, self._error = step, None

        def save() -> None:
            try:
                self._write(folder, step, copied, state)
            except BaseException as error:  # noqa: BLE001 - `ended` raises it
                self._error = error

        # A daemon, so that a process can exit at once: an unfinished save leaves no checkpoint.
        self._thread = threading.Thread(target=save, name="fourbits-save", daemon=True)
        self._thread.start()

    def ended(self, *, wait: bool) -> int | None:
        """The step that was saved since the last call, or None. wait: for a save that is under way.

        Raises what the save raised.
        """
        thread = self._thread
        if thread is None or (thread.is_alive() and not wait):
            return None
        thread.join()
        self._thread = None
        if self._error is not None:
            raise self._error
        return self._step
