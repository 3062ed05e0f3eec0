"""Several runs at a time, each in a process of its own, under the eyes of this one.

A worker is a fresh interpreter, not a fork: a copy of a process that has computed with threads may hang. Each
has a pipe of its own, so that one that is killed in the middle of a sentence silences nobody else.
"""

import contextlib
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

from fourbits.compare.jobs import Jobs
from fourbits.compare.plan import Plan
from fourbits.compare.progress import CompareReport, RunReport
from fourbits.compare.worker import DONE, FAILED, MAKE, STOP, WARNING
from fourbits.train.stop import StopRequest

WORKER = "fourbits.compare.worker"
# Seconds between two looks at whether somebody asked to stop.
PATIENCE = 0.2
# Seconds that a worker without work has for ending.
FAREWELL = 5.0


class RunLostError(ChildProcessError):
    """The process of a run ended before the run did."""


class Worker:
    """One process, and the run it makes: `report` listens to it, None while there is none."""

    def __init__(self, plan: Plan, threads: int) -> None:
        self.connection, theirs = Pipe()
        pipe = theirs.fileno()
        # -P: a file in the present folder that is called like a module stays what it is, a file.
        words = [sys.executable, "-P", "-m", WORKER, str(pipe)]
        with theirs, _deaf_to_interrupts():
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=[pipe])
        self._tell(plan, threads)
        self.number, self.together = 0, 0
        self.report: RunReport | None = None
        self.told_to_stop = False

    def make(self, number: int, report: RunReport) -> None:
        """Begin a run of the plan."""
        self.number, self.report, self.together = number, report, 0
        self._tell(MAKE, number)

    def stop(self, number: signal.Signals) -> None:
        """Let the present step be the last."""
        if not self.told_to_stop:
            self.told_to_stop = True
            self._tell(STOP, number)

    def cause_of_death(self) -> str:
        """What the system says of a process that is gone."""
        code = self.process.wait()
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name
        return f"was killed by {name}{', as when memory runs out' if name == 'SIGKILL' else ''}"

    def end(self, patience: float) -> None:
        """See to it that the process is gone: by itself within so many seconds, else killed."""
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        self.process.kill()
        self.process.wait()

    def _tell(self, *words: object) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # as the next look at its pipe shows
            self.connection.send(words)


class Pool:
    """Workers while runs are made; when it is left, none of them is."""

    def __init__(self, plan: Plan, jobs: Jobs, report: CompareReport, command: str) -> None:
        """command: what continues the comparison, for errors."""
        self.plan, self.jobs, self.report, self.command = plan, jobs, report, command
        self.workers: list[Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for worker in self.workers:
            worker.end(FAREWELL if kind is None else 0)

    def make(self, numbers: Sequence[int], stop: StopRequest, done: Callable[[Worker], None]) -> None:
        """Make runs of the plan in this order, and call `done` after each that ended.

        After a request to stop, or after an error, runs under way finish their step and save. Raises the
        error of a run as the run raised it, and RunLostError for a process that is gone.
        """
        waiting = deque(numbers)
        failure: Exception | None = None
        for _ in range(min(self.jobs.at_a_time, len(waiting))):
            self.workers.append(Worker(self.plan, self.jobs.threads))
        while True:
            if stop.requested or failure:
                waiting.clear()
                for worker in self._busy():
                    worker.stop(stop.signal or signal.SIGTERM)
            for worker in self.workers:
                if waiting and worker.report is None:
                    number = waiting.popleft()
                    worker.make(number, self.report.listen(number))
            if not self._busy():
                break
            pipes = {worker.connection: worker for worker in self._busy()}
            for ready in wait(list(pipes), PATIENCE):
                error = self._hear(pipes[ready], stop, done)  # pyright: ignore[reportArgumentType]
                failure = failure or error
        if failure:
            raise failure

    def _busy(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.report is not None]

    def _hear(self, worker: Worker, stop: StopRequest, done: Callable[[Worker], None]) -> Exception | None:
        """Take one message of a worker. Returns the error if its run failed."""
        run = worker.report
        assert run is not None
        try:
            kind, value = worker.connection.recv()
        except (EOFError, OSError):
            return self._bury(worker, run, stop)
        if kind == WARNING:
            warnings.warn(*value, stacklevel=1)
        elif kind == DONE:
            if value == "interrupted" and not worker.told_to_stop:  # somebody stopped this process alone
                stop.signal = signal.SIGTERM
            done(worker)
            self._over(worker, run)
        elif kind == FAILED:
            self._over(worker, run)
            return value
        else:
            getattr(run, kind)(value)
            if len(self._busy()) == self.jobs.at_a_time:
                worker.together = run.last_step
        return None

    def _over(self, worker: Worker, run: RunReport) -> None:
        worker.report = None
        run.close()
        self.report.over(worker.number)

    def _bury(self, worker: Worker, run: RunReport, stop: StopRequest) -> RunLostError | None:
        """Forget a worker that is gone, and say why and what to do."""
        self.workers.remove(worker)
        self._over(worker, run)
        how = worker.cause_of_death()
        text = f"{run.label}: its process {how}, after step {run.last_step} of {run.num_steps}."
        if stop.requested:
            self.report.note(text)
            return None
        return RunLostError(
            f"{text}\nTo continue from what is saved: {self.command} (--jobs 1 needs the least memory)"
        )


@contextmanager
def _deaf_to_interrupts() -> Generator[None]:
    """A process started inside ignores SIGINT from its first moment, before it runs any code of ours."""
    if threading.current_thread() is not threading.main_thread():  # Python allows no handlers there
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
