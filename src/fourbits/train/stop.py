"""Ctrl-C and SIGTERM as requests: the run finishes its step, saves, and ends."""

import contextlib
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether the run was asked to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def requested(self) -> bool:
        """Whether to stop after the current step."""
        return self.signal is not None


@contextmanager
def stop_on_signals(notify: Callable[[str], None]) -> Generator[StopRequest]:
    """Turn the first SIGINT or SIGTERM into a request; a second SIGINT interrupts at once.

    notify: called with one sentence at the first signal. Outside the main thread, where Python allows no
    handlers, signals are handled as before.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if request.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.signal = signal.Signals(number)
        # A signal that arrives during printing finds the stream busy; the request is valid all the same.
        with contextlib.suppress(RuntimeError):
            notify("stopping after this step; Ctrl-C again stops at once, without saving")

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
