"""Signals and times at which a run saves, or saves and ends."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

from fourbits.train.config import TrainConfig

#: end a run after its step. SIGHUP: the terminal closed; under nohup it is ignored
STOPS = tuple(signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
#: saves a checkpoint after the step; records the next step. None on Windows
SAVE, RECORD = getattr(signal, "SIGUSR1", None), getattr(signal, "SIGUSR2", None)
TIME_LIMIT = "train.time_limit"
#: the exit code of timeout(1)
TIME_LIMIT_CODE = 124


class StopRequest:
    """Whether the run was asked to stop, and by which signal, to save, or to record a step."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.save = self.record = False

    @property
    def requested(self) -> bool:
        """Whether to stop after the current step."""
        return self.signal is not None

    def take_save(self) -> bool:
        """Whether a checkpoint was requested since the last call."""
        requested, self.save = self.save, False
        return requested

    def take_record(self) -> bool:
        """Whether the recording of a step was requested since the last call."""
        requested, self.record = self.record, False
        return requested


class Clock:
    """When a run saves and when it ends, by its settings and the time."""

    def __init__(self, train: TrainConfig, started: float) -> None:
        """started: when the run began, in seconds of time.monotonic."""
        self._limit, self._interval = train.time_limit, train.save_every_minutes
        self._started, self._saved = started, time.monotonic()

    def is_up(self) -> bool:
        """Whether the run's time limit has passed."""
        return self._limit is not None and time.monotonic() - self._started >= 60 * self._limit

    def save_due(self) -> bool:
        """Whether the last checkpoint is older than train.save_every_minutes."""
        return self._interval is not None and time.monotonic() - self._saved >= 60 * self._interval

    def saved(self) -> None:
        """Restart the interval: a checkpoint has been written."""
        self._saved = time.monotonic()


@contextmanager
def stop_on_signals(notify: Callable[[str], None]) -> Generator[StopRequest]:
    """Turn the first of SIGINT, SIGTERM and SIGHUP into a request; a second SIGINT interrupts at once.

    SIGUSR1 requests a checkpoint, SIGUSR2 the recording of a step. notify: called with one sentence per
    request. Outside the main thread, where Python allows no handlers, signals are handled as before.
    """
    request = StopRequest()

    def stop(number: int, frame: FrameType | None) -> None:
        if request.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.signal = signal.Signals(number)
        # If a signal arrives during printing, the stream is busy; the request still counts.
        with contextlib.suppress(RuntimeError):
            notify("stopping after this step; Ctrl-C again stops at once, without saving")

    def save(number: int, frame: FrameType | None) -> None:
        request.save = True
        with contextlib.suppress(RuntimeError):
            notify("saving after this step, then continuing")

    def record(number: int, frame: FrameType | None) -> None:
        request.record = True
        with contextlib.suppress(RuntimeError):
            notify("recording the next step, then continuing")

    once = {number: handler for number, handler in ((SAVE, save), (RECORD, record)) if number}
    with handled({**dict.fromkeys(STOPS, stop), **once}):
        yield request


@contextmanager
def handled(handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]]) -> Generator[None]:
    """Handle signals inside, if this is the main thread. An ignored SIGHUP stays ignored, for nohup."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, handler)
        for number, handler in handlers.items()
        if number.name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code(reason: str | None) -> int:
    """The exit code of a run that was interrupted for `reason`, as in summary.json."""
    return TIME_LIMIT_CODE if reason == TIME_LIMIT else 128 + signal.Signals[reason or "SIGINT"]
