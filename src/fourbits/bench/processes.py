"""Calls a function for several arguments in parallel, in spawned processes.

A call that crashes or hangs costs its own result only. Processes are spawned, since CUDA does not survive a
fork, and take call after call, since each imports torch at first.
"""

import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, NamedTuple, TypeVar

import torch

#: seconds that idle processes have to exit before they are killed
_EXIT_SECONDS = 3.0
_FEW_CORES = 4

A = TypeVar("A")
R = TypeVar("R")


class Lost(NamedTuple):
    """A call without a result, because its process ended or the time limit was reached."""

    reason: str
    #: from the call to its end
    seconds: float


class Limits(NamedTuple):
    """Seconds: within which calls begin, and in which each call must end, the start of a process included."""

    begin: float
    end: float


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def useful_processes() -> int:
    """One per core; 1 on few cores, where importing torch in each costs more than calls in parallel gain."""
    return cores() if cores() >= _FEW_CORES else 1


def call_in_processes(
    function: Callable[[A], R],
    arguments: Sequence[A],
    processes: int,
    limits: Limits,
    ends_process: Callable[[R], bool] = lambda result: False,
) -> dict[A, R | Lost]:
    """Results by argument, of the calls that began in time; processes share the CPU's cores.

    function: picklable, as are arguments and results; ends_process: whether no further call may use the
    process that returned this result. Raises the exception of a call, after which no process is left.
    """
    began, waiting, results = time.monotonic(), deque(arguments), dict[A, R | Lost]()
    threads = max(1, cores() // processes)
    started: list[_Process[A, R]] = []

    def start() -> "_Process[A, R]":
        started.append(_Process(function, threads))
        return started[-1]

    try:
        busy = [start() for _ in range(min(processes, len(waiting)))]
        for process in busy:
            process.call(waiting.popleft(), limits.end)
        while busy:
            for process in _finished(busy):
                busy.remove(process)
                argument, result = process.result()
                results[argument] = result
                reusable = not isinstance(result, Lost) and not ends_process(result)
                if waiting and time.monotonic() - began <= limits.begin:
                    busy.append(process if reusable else start())
                    busy[-1].call(waiting.popleft(), limits.end)
    finally:
        _end(started)
    return results


class _Process(Generic[A, R]):
    """A process and the call that it executes."""

    def __init__(self, function: Callable[[A], R], threads: int) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, function, threads), daemon=True)
        self.process.start()
        theirs.close()  # so that the pipe ends with the process
        self._argument: Any = None
        self._began = self.deadline = 0.0

    def call(self, argument: A, seconds: float) -> None:
        self._argument, self._began = argument, time.monotonic()
        self.deadline = self._began + seconds
        with suppress(OSError):  # a process that has ended is noticed when its pipe is read
            self.connection.send(argument)

    def result(self) -> tuple[A, R | Lost]:
        """The call's argument and result, once the process has answered, ended or exceeded its limit."""
        seconds = time.monotonic() - self._began
        if not self.connection.poll():
            self.process.kill()
            return self._argument, Lost(f"did not end within {seconds:.0f} s", seconds)
        try:
            result = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            return self._argument, Lost(f"its process {_cause(self.process.exitcode)}", seconds)
        if isinstance(result, Exception):
            raise result
        return self._argument, result


def _end(processes: "Sequence[_Process[A, R]]") -> None:
    """Close all pipes, at which idle processes exit; kill those that do not."""
    for each in processes:
        each.connection.close()
    deadline = time.monotonic() + _EXIT_SECONDS
    for each in processes:
        each.process.join(max(0.0, deadline - time.monotonic()))
        each.process.kill()
        each.process.join()


def _finished(busy: "list[_Process[A, R]]") -> "list[_Process[A, R]]":
    """Wait for processes with an answer, without a pipe, or beyond their deadline."""
    nearest = min(process.deadline for process in busy)
    ready = wait([process.connection for process in busy], max(0.0, nearest - time.monotonic()))
    return [p for p in busy if p.connection in ready or p.deadline <= time.monotonic()]


def _cause(code: int | None) -> str:
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}"


def _serve(connection: Connection, function: Callable[[Any], Any], threads: int) -> None:
    """A process: calls the function for each argument it receives, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which kills
    logging.getLogger("fourbits").setLevel(logging.ERROR)  # compilation, reported once per process
    torch.set_num_threads(threads)
    while True:
        try:
            argument = connection.recv()
        except EOFError:
            return
        try:
            result = function(argument)
        except Exception as error:  # noqa: BLE001 - the parent raises it
            result = error
        connection.send(result)
