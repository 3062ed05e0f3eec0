"""A listener that stops a run after a step, and keeps its notes."""

import signal
from typing import Any

from fourbits.train.listener import RunListener
from fourbits.train.stop import StopRequest


class Stopper(RunListener):
    """after: the step after which the run is asked to stop, as by SIGTERM; None for never."""

    def __init__(self, after: int | None = None) -> None:
        self.after, self.stop, self.notes = after, StopRequest(), list[str]()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, record: Any) -> None:
        if record["step"] == self.after:
            self.stop.signal = signal.SIGTERM
