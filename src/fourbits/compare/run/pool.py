"""Executes several runs in parallel, each in its own worker process.

A worker is a fresh interpreter, not a fork: a forked copy of a process that has computed with threads can
hang. Each worker has its own pipe, so a worker that is killed mid-message cannot corrupt another's messages.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Pipe, wait
from typing import Self

from fourbits.compare.run.jobs import Jobs
from fourbits.compare.run.progress import MatrixProgress, RunProgress
from fourbits.compare.run.run_matrix import RunMatrix
from fourbits.compare.run.worker import DONE, EXECUTE, FAILED, RECORD, SAVE, STOP, WARNING
from fourbits.train.stop import StopRequest

WORKER_MODULE = "fourbits.compare.run.worker"
# Seconds between two checks for a request to stop.
POLL_SECONDS = 0.2
# Seconds an idle worker has to exit before it is killed.
EXIT_SECONDS = 5.0


class WorkerDiedError(ChildProcessError):
    """The process of a run ended before the run did."""


class Worker:
    """One worker process. run: the progress of the run it executes, None while it is idle."""

    def __init__(self, matrix: RunMatrix, threads: int, gpu: str | None = None) -> None:
        """gpu: the only GPU that the process sees; None for all."""
        self.connection, other_end = Pipe()
        pipe = other_end.fileno()
        # -P: a file in the current folder must not shadow an installed module of the same name.
        command = [sys.executable, "-P", "-m", WORKER_MODULE, str(pipe)]
        environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        with other_end, _ignored_interrupts():
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[pipe], env=environment
            )
        self._send(matrix, threads)
        self.number, self.together = 0, 0
        self.run: RunProgress | None = None
        self.stopping = False

    def start(self, number: int, run: RunProgress) -> None:
        """Start a run of the matrix."""
        self.number, self.run, self.together = number, run, 0
        self._send(EXECUTE, number)

    def stop(self, number: signal.Signals) -> None:
        """Ask the worker to stop after the current step."""
        if not self.stopping:
            self.stopping = True
            self._send(STOP, number)

    def save(self) -> None:
        """Ask the worker to save a checkpoint after the current step."""
        self._send(SAVE, None)

    def record(self) -> None:
        """Ask the worker to record the next step."""
        self._send(RECORD, None)

    def cause_of_death(self) -> str:
        """How the process ended, according to its exit code."""
        code = self.process.wait()
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name
        return f"was killed by {name}{' (possibly out of memory)' if name == 'SIGKILL' else ''}"

    def end(self, seconds: float) -> None:
        """Wait this long for the process to exit, then kill it."""
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.process.kill()
        self.process.wait()

    def _send(self, *message: object) -> None:
        # A dead worker is noticed at the next read from its pipe.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(message)


class Pool:
    """Worker processes of a comparison; all of them have ended when the context exits."""

    def __init__(self, matrix: RunMatrix, jobs: Jobs, progress: MatrixProgress, command: str) -> None:
        """command: resumes the comparison; quoted in errors."""
        self.matrix, self.jobs, self.progress, self.command = matrix, jobs, progress, command
        self.workers: list[Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for worker in self.workers:
            worker.end(EXIT_SECONDS if kind is None else 0)

    def execute(self, numbers: Sequence[int], stop: StopRequest, record: Callable[[Worker], None]) -> None:
        """Execute runs of the matrix in this order, and call `record` after each that ended.

        Workers that have started serve the next call, too.

        After a request to stop, or after an error, runs under way finish their step and save. Re-raises the
        error of a run, and raises WorkerDiedError for a process that died.
        """
        pending = deque(numbers)
        failure: Exception | None = None
        for number in range(len(self.workers), min(self.jobs.parallel, len(pending))):
            gpu = self.jobs.gpus[number % len(self.jobs.gpus)] if self.jobs.gpus else None
            self.workers.append(Worker(self.matrix, self.jobs.threads, gpu))
        while True:
            if stop.requested or failure:
                pending.clear()
                for worker in self._busy():
                    worker.stop(stop.signal or signal.SIGTERM)
            if stop.take_save():
                for worker in self._busy():
                    worker.save()
            if stop.take_record():
                for worker in self._busy():
                    worker.record()
            for worker in self.workers:
                if pending and worker.run is None:
                    number = pending.popleft()
                    worker.start(number, self.progress.start_run(number))
            if not self._busy():
                break
            pipes = {worker.connection: worker for worker in self._busy()}
            for ready in wait(list(pipes), POLL_SECONDS):
                error = self._receive(pipes[ready], stop, record)  # pyright: ignore[reportArgumentType]
                failure = failure or error
        if failure:
            raise failure

    def _busy(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.run is not None]

    def _receive(
        self, worker: Worker, stop: StopRequest, record: Callable[[Worker], None]
    ) -> Exception | None:
        """Handle one message of a worker. Returns the error if its run failed."""
        run = worker.run
        assert run is not None
        try:
            kind, value = worker.connection.recv()
        except (EOFError, OSError):
            return self._remove_dead(worker, run, stop)
        if kind == WARNING:
            warnings.warn(*value, stacklevel=1)
        elif kind == DONE:
            if value == "interrupted" and not worker.stopping:  # the signal went to this worker only
                stop.signal = stop.signal or signal.SIGTERM
            record(worker)
            self._end_run(worker, run)
        elif kind == FAILED:
            self._end_run(worker, run)
            return value
        else:
            getattr(run, kind)(value)
            if len(self._busy()) == self.jobs.parallel:
                worker.together = run.last_step
        return None

    def _end_run(self, worker: Worker, run: RunProgress) -> None:
        worker.run = None
        run.close()
        self.progress.end_run(worker.number)

    def _remove_dead(self, worker: Worker, run: RunProgress, stop: StopRequest) -> WorkerDiedError | None:
        """Remove a worker that died. Returns an error with the cause and the remedy, unless stopping."""
        self.workers.remove(worker)
        self._end_run(worker, run)
        cause = worker.cause_of_death()
        text = f"{run.label}: its process {cause}, after step {run.last_step} of {run.num_steps}."
        if stop.requested:
            self.progress.note(text)
            return None
        return WorkerDiedError(
            f"{text}\nTo resume from the last checkpoint: {self.command} (--jobs 1 needs the least memory)"
        )


@contextmanager
def _ignored_interrupts() -> Generator[None]:
    """A process started inside ignores SIGINT from the start, before it runs any of its own code."""
    if threading.current_thread() is not threading.main_thread():  # Python allows no handlers there
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
