"""One run of a comparison, in this process or in a worker: a process that makes one run after another.

A worker takes orders from a pipe, tells through it what its runs tell, and lives as long as the pipe does:
when the process at the other end is gone, however it went, the worker is gone too. What it has traced and
compiled for one recipe serves the next.
"""

import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

import torch

from fourbits.compare.plan import PlannedRun
from fourbits.train.non_finite import NonFiniteError
from fourbits.train.report import Record, Report, RunStart
from fourbits.train.run import run
from fourbits.train.stop import StopRequest

# To a worker. What it answers is the name of a Report's method, WARNING, DONE or FAILED, and one value.
MAKE, STOP = "make", "stop"
WARNING, DONE, FAILED = "warning", "done", "failed"

Send = Callable[[str, Any], None]


def make_run(planned: PlannedRun, data_cache: Path, report: Report, stop: StopRequest) -> str:
    """Make or continue a run, and return how it ended: finished, interrupted or non-finite.

    A loss that is not finite is a result, and told to `report`. Raises what `run` raises for anything else.
    """
    try:
        summary = run(planned.config, planned.folder, report=report, stop=stop, data_cache=data_cache)
    except NonFiniteError as error:
        report.note(str(error))
        return "non-finite"
    return summary["ended"]


def work(connection: Connection) -> None:
    """What a worker does: it hears the plan and the number of CPU threads, then orders. Never returns."""
    request = StopRequest()
    _hear_signals(request)
    plan, threads = connection.recv()
    torch.set_num_threads(threads)
    orders: SimpleQueue[int] = SimpleQueue()
    threading.Thread(target=_hear, args=(connection, orders, request), daemon=True).start()

    def send(kind: str, value: Any) -> None:
        try:
            connection.send((kind, value))
        except OSError:  # nobody listens any more
            os._exit(1)

    def warn(message: Warning | str, category: type[Warning], *_: object) -> None:
        send(WARNING, (str(message), category))

    warnings.showwarning = warn
    while True:
        planned = plan.runs[orders.get()]
        if request.requested:  # before the run is built, whose first step would take long
            send(DONE, "interrupted")
            continue
        try:
            send(DONE, make_run(planned, plan.data_cache, Forward(send), request))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other process raises it
            send(FAILED, portable(error))


class Forward(Report):
    """Tells another process what a run tells."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def begin(self, start: RunStart) -> None:
        """Pass on."""
        self._send("begin", start)

    def step(self, record: Record) -> None:
        """Pass on."""
        self._send("step", record)

    def validation(self, record: Record) -> None:
        """Pass on."""
        self._send("validation", record)

    def note(self, text: str) -> None:
        """Pass on."""
        self._send("note", text)

    def end(self, summary: Record) -> None:
        """Pass on."""
        self._send("end", summary)


def portable(error: Exception) -> Exception:
    """The error in a form that survives pickling, with its traceback as a note."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - a class may refuse in any way
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        plain.add_note(error.__notes__[-1])
        return plain
    return error


def _hear_signals(request: StopRequest) -> None:
    """SIGTERM is a request to stop. SIGINT, which a terminal sends to all its processes, is left to the other
    process, which counts it and tells.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, handle)


def _hear(connection: Connection, orders: "SimpleQueue[int]", request: StopRequest) -> None:
    """Take orders until the pipe ends, and with it this process: a checkpoint is complete or invisible."""
    try:
        while True:
            kind, value = connection.recv()
            if kind == STOP:
                request.signal = value
            else:
                orders.put(value)
    except (EOFError, OSError):
        os._exit(0)


if __name__ == "__main__":
    work(Connection(int(sys.argv[1])))
