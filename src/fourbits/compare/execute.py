"""Make the runs of a plan, each once: finished ones are reused, interrupted ones continued."""

import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from fourbits.compare import words
from fourbits.compare.comparison import Comparison
from fourbits.compare.jobs import Jobs
from fourbits.compare.made import Ledger, Made
from fourbits.compare.plan import Plan
from fourbits.compare.pool import Pool, Worker
from fourbits.compare.progress import CompareReport
from fourbits.compare.runs import Run
from fourbits.compare.worker import make_run
from fourbits.data.config import open_data
from fourbits.train.run import num_threads
from fourbits.train.run_folder import RunFolder, read_json
from fourbits.train.stop import StopRequest, stop_on_signals


class Interrupted(Exception):  # noqa: N818 - a request that was met, not an error
    """Somebody asked the comparison to stop; what is done is kept."""


def make_runs(plan: Plan, report: CompareReport, command: str, jobs: Jobs) -> Comparison:
    """Make all runs that are not there yet, and read them. command: what was typed, for the record.

    A run that ends with a loss that is not finite is a result, not a failure: the others go on. Raises
    Interrupted after a signal, ValueError for folders that hold other runs or runs that are no comparison,
    RunLostError for a process that was killed.
    """
    plan.out.mkdir(parents=True, exist_ok=True)
    with report, stop_on_signals(report.note) as stop:
        # Once, before several processes ask for it.
        open_data(plan.runs[0].config.data, plan.data_cache, report.preparing)
        report.prepared()
        waiting = [number for number in range(len(plan.runs)) if not _reuse(plan, number, report, stop)]
        jobs = replace(jobs, at_a_time=max(1, min(jobs.at_a_time, len(waiting))))
        ledger = Ledger(plan, jobs, uuid.uuid4().hex, command)
        if not stop.requested:
            _make(ledger, waiting, report, stop)
        if stop.requested:
            raise Interrupted
    ledger.write()
    return read_comparison(plan, ledger.made)


def read_comparison(plan: Plan, made: dict[str, Made | None]) -> Comparison:
    """The runs of a plan, read and checked."""
    runs = {
        recipe: {run.seed: Run.read(run.folder) for run in plan.runs if run.recipe == recipe}
        for recipe in plan.recipes
    }
    by_run = {(run.recipe, run.seed): made.get(run.key) for run in plan.runs}
    comparison = Comparison(plan.name, plan.baseline, runs, by_run)
    comparison.check()
    return comparison


def _make(ledger: Ledger, waiting: list[int], report: CompareReport, stop: StopRequest) -> None:
    """Make runs in the order of `waiting`."""
    plan, jobs = ledger.plan, ledger.jobs
    for number in waiting:
        _tell_of_other_threads(plan.runs[number].folder, jobs.threads, report)
    if jobs.at_a_time > 1:

        def done(worker: Worker) -> None:
            first_step = worker.report.first_step if worker.report else None
            ledger.add(plan.runs[worker.number], first_step, worker.together)

        with Pool(plan, jobs, report, ledger.command) as pool:
            pool.make(waiting, stop, done)
        return
    for number in waiting:
        listener = report.listen(number)
        with num_threads(jobs.threads):
            make_run(plan.runs[number], plan.data_cache, listener, stop)
        ledger.add(plan.runs[number], listener.first_step, listener.last_step)
        report.over(number)
        if stop.requested:
            return


def _reuse(plan: Plan, number: int, report: CompareReport, stop: StopRequest) -> bool:
    """Whether a run is there already, which is checked and told."""
    planned = plan.runs[number]
    ended = _summary(planned.folder).get("ended")
    if ended == "finished":
        make_run(planned, plan.data_cache, report.listen(number), stop)
    if ended in ("finished", "non-finite"):
        report.over(number)
        return True
    return False


def _tell_of_other_threads(folder: Path, threads: int, report: CompareReport) -> None:
    """Sums over tokens are split by threads, so a run that continues on another number of them may differ."""
    run = RunFolder(folder)
    if not run.has_steps() or not run.manifest.is_file():
        return
    manifest = read_json(run.manifest)
    if manifest["device"]["kind"] == "cpu" and manifest["threads"] != threads:
        report.note(
            f"{folder}: continues on {words.plural(threads, 'CPU thread')} after {manifest['threads']}, so "
            "its last bits may not be those of an unbroken run"
        )


def _summary(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    return read_json(path) if path.is_file() else {}
