"""Make the runs of a plan, each once: finished ones are reused, interrupted ones continued."""

import uuid
from pathlib import Path
from typing import Any

from fourbits.compare.comparison import Comparison
from fourbits.compare.plan import Plan, PlannedRun
from fourbits.compare.progress import CompareReport
from fourbits.compare.runs import Run
from fourbits.data.whole_file import write_json
from fourbits.train.non_finite import NonFiniteError
from fourbits.train.run import run
from fourbits.train.run_folder import read_json
from fourbits.train.stop import stop_on_signals

RECORD = "compare.json"


class Interrupted(Exception):  # noqa: N818 - a request that was met, not an error
    """Somebody asked the comparison to stop; what is done is kept."""


def make_runs(plan: Plan, report: CompareReport, command: str) -> Comparison:
    """Make all runs that are not there yet, and read them. command: what was typed, for the record.

    A run that ends with a loss that is not finite is a result, not a failure: the others go on. Raises
    Interrupted after a signal, ValueError for folders that hold other runs or runs that are no comparison.
    """
    plan.out.mkdir(parents=True, exist_ok=True)
    session = uuid.uuid4().hex
    sessions = _recorded_sessions(plan.out)
    with report, stop_on_signals(report.note) as stop:
        for number, planned in enumerate(plan.runs):
            report.next_run(number, planned)
            if _ended(planned) != "non-finite":
                try:
                    run(planned.config, planned.folder, report=report, stop=stop, data_cache=plan.data_cache)
                except NonFiniteError as error:
                    report.note(str(error))
            if report.first_step is not None:
                # The speed of a run that was made in parts belongs to no session.
                sessions[planned.key] = session if report.first_step == 0 else None
                _record(plan, sessions, command)
            if stop.requested:
                raise Interrupted
    _record(plan, sessions, command)
    return read_comparison(plan, sessions)


def read_comparison(plan: Plan, sessions: dict[str, str | None]) -> Comparison:
    """The runs of a plan, read and checked."""
    runs = {
        recipe: {run.seed: Run.read(run.folder) for run in plan.runs if run.recipe == recipe}
        for recipe in plan.recipes
    }
    by_run = {(run.recipe, run.seed): sessions.get(run.key) for run in plan.runs}
    comparison = Comparison(plan.name, plan.baseline, runs, by_run)
    comparison.check()
    return comparison


def _ended(planned: PlannedRun) -> str | None:
    summary = planned.folder / "summary.json"
    return read_json(summary).get("ended") if summary.is_file() else None


def _recorded_sessions(out: Path) -> dict[str, str | None]:
    path = out / RECORD
    return read_json(path).get("sessions", {}) if path.is_file() else {}


def _record(plan: Plan, sessions: dict[str, str | None], command: str) -> None:
    content: dict[str, Any] = {
        "name": plan.name,
        "baseline": plan.baseline,
        "recipes": list(plan.recipes),
        "seeds": list(plan.seeds),
        "command": command,
        "sessions": sessions,
    }
    write_json(plan.out / RECORD, content)
