"""Ctrl-C and SIGTERM as a request: the step is finished and saved, then the run ends."""

import contextlib
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether somebody asked the run to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def requested(self) -> bool:
        """Whether to stop after the present step."""
        return self.signal is not None


@contextmanager
def stop_on_signals(tell: Callable[[str], None]) -> Generator[StopRequest]:
    """Turn the first SIGINT or SIGTERM into a request; a second SIGINT interrupts at once.

    tell: called with one sentence at the first. Outside the main thread, where Python allows no handlers,
    signals keep their meaning.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if request.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.signal = signal.Signals(number)
        # A signal in the middle of printing finds the stream busy; the request counts all the same.
        with contextlib.suppress(RuntimeError):
            tell("stopping after this step; Ctrl-C again stops at once, without saving")

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
