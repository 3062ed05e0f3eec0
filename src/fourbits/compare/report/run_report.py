"""Writes report.html of a single run: its loss, training metrics, precision, and details."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fourbits.compare.number_format import count, duration, loss, short_count
from fourbits.compare.report.colours import SHADES, palette, variables
from fourbits.compare.report.curves import Line, smooth
from fourbits.compare.report.evaluations import evaluation_sections
from fourbits.compare.report.figures import metric_chart, run_loss_chart
from fourbits.compare.report.health_section import health_section
from fourbits.compare.report.page import render_page
from fourbits.compare.report.precision_map import legend, precision_map
from fourbits.compare.report.run_details import phase_starts, repetition, rolled_back, run_details, switches
from fourbits.compare.report.runs import Run
from fourbits.compare.report.svg import Chart
from fourbits.compare.report.table import judge_run
from fourbits.data.whole_file import write_whole

METRICS = {
    "Learning rate": "lr",
    "Gradient norm before clipping": "grad_norm",
    "Tokens per second": "tokens_per_second",
}
# A line needs at least this many finite points.
POINTS_OF_A_CURVE = 2


def write_run_report(folder: Path, commands: Sequence[str] = ()) -> Path:
    """Write folder/report.html from the files of a run, finished or not. ValueError if it is not one.

    commands: command lines that repeat the run.
    """
    path = folder / "report.html"
    write_whole(path, render_run(Run.read(folder), commands).encode())
    return path


def render_run(run: Run, commands: Sequence[str] = ()) -> str:
    """The page as HTML. commands: command lines that repeat the run."""
    # The run's recipe first: series 0 is the colour of all curves. The others colour the precision map.
    names = [run.recipe, *(name for name in SHADES if name != run.recipe)]
    precision, colours = run.manifest["precision"], variables(names)
    return render_page(
        "run.html",
        title=f"{run.recipe}, {run.path.name}",
        palette=palette(names),
        folder=run.path.name,
        headline=_headline(run),
        status=_status(run),
        loss=_loss_chart(run) if _has_curve(run, "loss") else None,
        metrics=[
            metric_chart(title, Line(key, 0, run.tokens, run.train[key]), log=key == "grad_norm")
            for title, key in METRICS.items()
            if _has_curve(run, key)
        ],
        last_values=_last_values(run),
        evaluations=evaluation_sections(run.path),
        health=health_section(run),
        legend=legend([precision], colours),
        map=precision_map(run.recipe, precision, run.config["model"]["pattern"], colours),
        details={**run_details(run), "status": _ended(run)},
        recipes={run.recipe: run.manifest["recipe"]["digest"]},
        commands=commands,
    )


def _has_curve(run: Run, key: str) -> bool:
    return key in run.train and int(np.isfinite(run.train[key]).sum()) >= POINTS_OF_A_CURVE


def _last_values(run: Run) -> dict[str, str]:
    """The last finite value of each metric that has too few values for a chart."""
    found: dict[str, str] = {}
    for title, key in {"Training loss": "loss", **METRICS}.items():
        values = run.train.get(key, np.empty(0))
        values = values[np.isfinite(values)]
        if len(values) and not _has_curve(run, key):
            found[title] = f"{values[-1]:,.4g}"
    return found


def _headline(run: Run) -> str:
    after = f"after {short_count(run.tokens[-1])} tokens"
    if not len(run.validation_steps):
        return f"{run.recipe}: training loss {loss(smooth(run.train['loss'])[-1])} {after}."
    return f"{run.recipe}: validation loss {loss(run.validation['val_loss'][-1])} nats per token {after}."


def _status(run: Run) -> str:
    finding = judge_run(run)
    speed = f"{count(run.tokens_per_second)} tokens/s (median step)."
    state = "" if finding.verdict == "stable" else f"{finding.verdict.capitalize()}: {finding.reason}."
    return " ".join(filter(None, (state, rolled_back(run), speed, repetition(run))))


def _ended(run: Run) -> str:
    if not run.summary:
        return "still running, or killed"
    return f"{run.summary['ended']}, {duration(run.summary['seconds'])}"


def _loss_chart(run: Run) -> Chart:
    steps = run.validation_steps
    return run_loss_chart(
        Line("each step", 0, run.tokens, run.train["loss"]),
        Line("training", 0, run.tokens, smooth(run.train["loss"])),
        Line("validation", 0, run.tokens_at(steps), run.validation_loss(steps)),
        phase_starts(run),
        switches(run),
    )
