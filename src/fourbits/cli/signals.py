"""Handles signals that end a command outside its training steps: one line, and an exit code per signal."""

import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

NAMES = ("SIGTERM", "SIGHUP")
#: ask a run for a checkpoint and for the recording of a step
REQUESTS = ("SIGUSR1", "SIGUSR2")


class Stopped(KeyboardInterrupt):
    """Raised by a signal to stop. It unwinds the stack like Ctrl-C, so the same cleanup runs."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def ended_by_signals(name: str) -> Generator[None]:
    """Inside the block, SIGTERM and SIGHUP raise Stopped; SIGUSR1 and SIGUSR2 print that it is too early.

    Training replaces these handlers with its own. An ignored SIGHUP stays ignored, for nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    def nothing(number: int, frame: FrameType | None) -> None:
        what = "save" if signal.Signals(number).name == "SIGUSR1" else "record"
        print(f"fourbits {name}: nothing to {what} yet", file=sys.stderr)

    handlers = {**dict.fromkeys(NAMES, stop), **dict.fromkeys(REQUESTS, nothing)}
    numbers = {getattr(signal, each): handler for each, handler in handlers.items() if hasattr(signal, each)}
    before = {
        number: signal.signal(number, handler)
        for number, handler in numbers.items()
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_requests() -> None:
    """Ignore REQUESTS from now on: by default they would kill a process that is done and still exits."""
    for name in REQUESTS:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def stopped(error: KeyboardInterrupt) -> tuple[str, int]:
    """The final message, and the exit code: 130 for Ctrl-C, else 128 plus the signal's number."""
    if isinstance(error, Stopped):
        return f"stopped by {signal.Signals(error.number).name}.", 128 + error.number
    return "stopped by Ctrl-C.", 130
