"""Executes one run of a comparison, in this process or in a worker process that executes run after run.

A worker receives jobs through a pipe, forwards the events of its runs through it, and exits when the pipe
closes, so it never outlives its parent. Code traced and compiled for one recipe is reused for the next.
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

from fourbits.compare.run.run_matrix import RunSpec
from fourbits.train.listener import Record, RunListener, RunStart
from fourbits.train.non_finite import NonFiniteError
from fourbits.train.run import run
from fourbits.train.stop import StopRequest

# Messages to a worker, with one value each.
EXECUTE, STOP, SAVE, RECORD = "execute", "stop", "save", "record"
# Messages from a worker, with one value each. Any other message is the name of a listener's method.
WARNING, DONE, FAILED = "warning", "done", "failed"

Send = Callable[[str, Any], None]


def execute_run(spec: RunSpec, data_cache: Path, listener: RunListener, stop: StopRequest) -> str:
    """Start or resume a run, and return how it ended: finished, interrupted or non-finite.

    A non-finite loss is a result; `listener` is notified. Raises what `run` raises for anything else.
    """
    try:
        summary = run(
            spec.config,
            spec.folder,
            listener=listener,
            stop=stop,
            data_cache=data_cache,
            start_from=spec.start_from,
        )
    except NonFiniteError as error:
        listener.note(str(error))
        return "non-finite"
    return summary["ended"]


def work(connection: Connection) -> None:
    """Main loop of a worker: receives the matrix and its number of CPU threads, then jobs. Never returns."""
    stop = StopRequest()
    _handle_signals(stop)
    matrix, threads = connection.recv()
    torch.set_num_threads(threads)
    jobs: SimpleQueue[int] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, jobs, stop), daemon=True).start()

    def send(kind: str, value: Any) -> None:
        try:
            connection.send((kind, value))
        except OSError:  # the parent is gone
            os._exit(1)

    def warn(message: Warning | str, category: type[Warning], *_: object) -> None:
        send(WARNING, (str(message), category))

    warnings.showwarning = warn
    while True:
        spec = matrix.runs[jobs.get()]
        if stop.requested:  # skip building a run whose first step would take long
            send(DONE, "interrupted")
            continue
        try:
            send(DONE, execute_run(spec, matrix.data_cache, ForwardingListener(send), stop))
        except Exception as error:  # noqa: BLE001 - the parent raises it, whatever it is
            send(FAILED, portable(error))


class ForwardingListener(RunListener):
    """Sends the events of a run to the parent process."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def begin(self, start: RunStart) -> None:
        """Forward to the parent process."""
        self._send("begin", start)

    def step(self, record: Record) -> None:
        """Forward to the parent process."""
        self._send("step", record)

    def validation(self, record: Record) -> None:
        """Forward to the parent process."""
        self._send("validation", record)

    def note(self, text: str) -> None:
        """Forward to the parent process."""
        self._send("note", text)

    def end(self, summary: Record) -> None:
        """Forward to the parent process."""
        self._send("end", summary)


def portable(error: Exception) -> Exception:
    """The error in a form that survives pickling, with its traceback as a note."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - pickling a foreign class can fail in any way
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        plain.add_note(error.__notes__[-1])
        return plain
    return error


def _handle_signals(stop: StopRequest) -> None:
    """Treat SIGTERM as a request to stop. Ignore SIGINT and SIGHUP, which a terminal sends to every process,
    and SIGUSR1 and SIGUSR2, which may be sent to a group of processes: the parent counts and forwards the
    requests.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        stop.signal = signal.Signals(number)

    for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, handle)


def _receive(connection: Connection, jobs: "SimpleQueue[int]", stop: StopRequest) -> None:
    """Queue jobs until the pipe closes, then exit at once: checkpoints are written atomically."""
    try:
        while True:
            kind, value = connection.recv()
            if kind == STOP:
                stop.signal = value
            elif kind == SAVE:
                stop.save = True
            elif kind == RECORD:
                stop.record = True
            else:
                jobs.put(value)
    except (EOFError, OSError):
        os._exit(0)


if __name__ == "__main__":
    work(Connection(int(sys.argv[1])))
