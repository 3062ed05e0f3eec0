"""Executes the runs of a matrix, each once: finished runs are reused, interrupted runs resume."""

import signal
import uuid
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from fourbits.compare.run.jobs import Jobs
from fourbits.compare.run.pool import Pool, Worker
from fourbits.compare.run.progress import MatrixProgress
from fourbits.compare.run.provenance import Provenance, ProvenanceFile
from fourbits.compare.run.run_matrix import RunMatrix
from fourbits.compare.run.worker import execute_run
from fourbits.data.config import open_data
from fourbits.device import choose_backend, probe
from fourbits.train.run import num_threads
from fourbits.train.run_folder import read_json
from fourbits.train.sinks import make_sinks
from fourbits.train.stop import StopRequest, stop_on_signals

# How a run ends that is not executed again.
ENDED = ("finished", "non-finite")


class Interrupted(Exception):  # noqa: N818 - a request that was met, not an error
    """The comparison stopped after a signal; every run under way is saved."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number


def execute_runs(
    matrix: RunMatrix,
    progress: MatrixProgress,
    command: str,
    jobs: Jobs,
    rounds: Iterable[Sequence[int]] | None = None,
) -> dict[str, Provenance | None]:
    """Execute all runs that are not finished, and return how each executed, by its key.

    command: the command line, stored in compare.json. rounds: runs of the matrix by number; the next round is
    asked for when the one before has ended; default: all runs in one round. A run whose loss becomes
    non-finite is a result, not a failure: the others continue. Raises Interrupted after a signal, ValueError
    for folders that hold other runs, WorkerDiedError for a process that was killed.
    """
    train = matrix.runs[0].config.train
    choose_backend(train.backend, probe(None if train.device == "auto" else train.device))
    make_sinks(train.sinks)  # refuses what every run would refuse
    matrix.out.mkdir(parents=True, exist_ok=True)
    with progress, stop_on_signals(progress.note) as stop:
        # Prepare the data here, before several processes need it.
        data = open_data(matrix.runs[0].config.data, matrix.data_cache, progress.preparing)
        progress.prepared()
        progress.plain(f"data: {data.sizes()}")
        unfinished = sum(outcome(spec.folder).get("ended") not in ENDED for spec in matrix.runs)
        jobs = replace(jobs, parallel=max(1, min(jobs.parallel, unfinished)))
        provenance = ProvenanceFile(matrix, jobs, uuid.uuid4().hex, command)
        with _pool(provenance, progress) as pool:
            for numbers in [range(len(matrix.runs))] if rounds is None else rounds:
                pending = [number for number in numbers if not _is_done(matrix, number, progress, stop)]
                if not stop.requested:
                    _execute(provenance, pending, progress, stop, pool)
                if stop.signal is not None:
                    raise Interrupted(stop.signal)
    provenance.write()
    return provenance.by_key


def _pool(provenance: ProvenanceFile, progress: MatrixProgress) -> AbstractContextManager[Pool | None]:
    """The processes of runs in parallel; None where runs execute one after the other in this process."""
    if provenance.jobs.parallel == 1:
        return nullcontext()
    return Pool(provenance.matrix, provenance.jobs, progress, provenance.command)


def _execute(
    provenance: ProvenanceFile,
    pending: Sequence[int],
    progress: MatrixProgress,
    stop: StopRequest,
    pool: Pool | None,
) -> None:
    """Execute runs in the order of `pending`."""
    matrix = provenance.matrix
    if pool is not None:

        def record(worker: Worker) -> None:
            first_step = worker.run.first_step if worker.run else None
            provenance.add(matrix.runs[worker.number], first_step, worker.together)

        pool.execute(pending, stop, record)
        return
    for number in pending:
        run = progress.start_run(number)
        with num_threads(provenance.jobs.threads):
            execute_run(matrix.runs[number], matrix.data_cache, run, stop)
        provenance.add(matrix.runs[number], run.first_step, run.last_step)
        progress.end_run(number)
        if stop.requested:
            return


def _is_done(matrix: RunMatrix, number: int, progress: MatrixProgress, stop: StopRequest) -> bool:
    """Whether a run has ended in an earlier session; a finished one is checked and reported."""
    spec = matrix.runs[number]
    ended = outcome(spec.folder).get("ended")
    if ended == "finished":
        execute_run(spec, matrix.data_cache, progress.start_run(number), stop)
    if ended in ENDED:
        progress.end_run(number)
        return True
    return False


def outcome(folder: Path) -> dict[str, Any]:
    """The summary of a run; empty while it has none."""
    path = folder / "summary.json"
    return read_json(path) if path.is_file() else {}
