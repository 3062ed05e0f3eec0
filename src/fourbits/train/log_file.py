"""log.txt: what a run prints, with times, so that it outlives the terminal.

A resumed run appends. The log never ends a run: where it cannot be written, the run reports it and continues.
"""

import logging
import os
import platform
import traceback
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from fourbits.data.whole_file import system_remedy
from fourbits.train.corruption import CorruptionError
from fourbits.train.listener import ProgressPrinter, Record, RunStart
from fourbits.train.metrics import FolderChangedError
from fourbits.train.non_finite import NonFiniteError
from fourbits.train.ranks.failure import LostRankError
from fourbits.train.rollback import RollbackError
from fourbits.version import VERSION

# Errors whose text says what happened and what to do; others are logged with their traceback.
_EXPLAINED = (
    *(ValueError, OSError, KeyboardInterrupt, FolderChangedError),
    *(NonFiniteError, RollbackError, CorruptionError, LostRankError),
)


class LogFile(ProgressPrinter):
    """Appends the events of a run to a file: the lines that a pipe would get, each after its local time."""

    def __init__(self, path: Path, log_interval: int, notify: Callable[[str], None]) -> None:
        """notify: called with one sentence, once, if the file cannot be written."""
        self._path, self._notify, self._failed = path, notify, False
        self._pending = ""  # what precedes the first line of a process
        lines: Any = _Lines(self.write)
        super().__init__(Console(file=lines, width=1000, color_system=None), log_interval)

    def write(self, text: str) -> None:
        """Append the lines of a text. An error does not stop later lines: a disk may have room by then."""
        text, self._pending = self._pending + text, ""
        time = datetime.now().astimezone().isoformat(timespec="seconds")
        lines = "".join(f"{time} {line}\n" for line in text.splitlines())
        try:
            with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(lines)
        except FileNotFoundError:
            return  # the run's folder is gone, which the run itself reports
        except OSError as error:
            if not self._failed:
                self._failed = True
                reason = f"{error.strerror}{system_remedy(error.errno)}"
                self._notify(f"{self._path}: {reason}. The run continues without its log.")

    def begin(self, start: RunStart) -> None:
        """Log the precision, the device and the length of the run."""
        self.write(
            f"{start.conversion}\ndevice: {start.device}; {start.backend}\ndata: {start.data}\n"
            f"{start.step:,} of {start.num_steps:,} steps done, {start.tokens_per_step:,} tokens each"
        )
        super().begin(start)

    def end(self, summary: Record) -> None:
        """Log how the run ended."""
        why = f" ({summary['reason']})" if summary["reason"] else ""
        self.write(f"ended: {summary['ended']}{why} after {summary['steps']:,} steps")

    @contextmanager
    def session(self) -> Generator[None]:
        """Log the process with its first line, its warnings and log messages, and the error that ends it."""
        self._pending = (
            f"=== fourbits {VERSION}, torch {version('torch')}, process {os.getpid()} on {platform.node()}\n"
        )
        show = warnings.showwarning
        warnings.showwarning = self._showing(show)
        messages = _Messages(self.write)
        loggers = _loggers()
        for logger in loggers:
            logger.addHandler(messages)
        try:
            yield
        except BaseException as error:
            self.write(_text_of(error))
            raise
        finally:
            for logger in loggers:
                logger.removeHandler(messages)
            warnings.showwarning = show

    def _showing(self, show: Callable[..., None]) -> Callable[..., None]:
        def showwarning(message: Warning | str, *others: Any, **named: Any) -> None:
            self.write(f"warning: {message}")
            show(message, *others, **named)

        return showwarning


class _Messages(logging.Handler):
    """Logs the messages of a logger, and lets Python print what it prints without this handler."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        """Log a message. Python's handler of last resort prints it only where there is no other handler."""
        self._write(self.format(record))
        last = logging.lastResort
        if last is not None and record.levelno >= last.level and not self._others(record.name):
            last.handle(record)

    def _others(self, name: str) -> bool:
        """Whether a logger has handlers besides this one, its own or those of loggers above it."""
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


class _Lines:
    """The file interface that rich needs, for lines that are printed whole."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def write(self, text: str) -> int:
        """Pass on a text that is more than a line end."""
        if text.strip():
            self._write(text.rstrip("\n"))
        return len(text)

    def flush(self) -> None:
        """Do nothing: lines are written at once."""


def _loggers() -> list[logging.Logger]:
    """Our logger, and those of PyTorch that print, none of which passes its messages on to another.

    A handler at the root would change what other libraries print.
    """
    printing = [
        logger
        for name, logger in list(logging.root.manager.loggerDict.items())
        if name.split(".")[0] == "torch" and isinstance(logger, logging.Logger)
        if any(type(handler) is logging.StreamHandler for handler in logger.handlers)
    ]
    return [logging.getLogger("fourbits"), *printing]


def _text_of(error: BaseException) -> str:
    if isinstance(error, _EXPLAINED):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error))
