"""Writes report.html of a single run: its loss, training metrics, precision, and details."""

from pathlib import Path

from fourbits.compare.number_format import count, duration, loss, short_count
from fourbits.compare.report.colours import SHADES, palette, variables
from fourbits.compare.report.curves import Line, smooth
from fourbits.compare.report.figures import metric_chart, run_loss_chart
from fourbits.compare.report.page import render_page
from fourbits.compare.report.precision_map import legend, precision_map
from fourbits.compare.report.run_details import phase_starts, repetition, run_details
from fourbits.compare.report.runs import Run
from fourbits.compare.report.svg import Chart
from fourbits.compare.report.table import judge_run
from fourbits.data.whole_file import write_whole

METRICS = {
    "Learning rate": "lr",
    "Gradient norm before clipping": "grad_norm",
    "Tokens per second": "tokens_per_second",
}


def write_run_report(folder: Path) -> Path:
    """Write folder/report.html from the files of a run, finished or not. ValueError if it is not one."""
    path = folder / "report.html"
    write_whole(path, render_run(Run.read(folder)).encode())
    return path


def render_run(run: Run) -> str:
    """The page as HTML."""
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
        loss=_loss_chart(run),
        metrics=[
            metric_chart(title, Line(key, 0, run.tokens, run.train[key]), log=key == "grad_norm")
            for title, key in METRICS.items()
        ],
        legend=legend([precision], colours),
        map=precision_map(run.recipe, precision, run.config["model"]["pattern"], colours),
        details={**run_details(run), "status": _ended(run)},
        recipes={run.recipe: run.manifest["recipe"]["digest"]},
        commands=(f"fourbits train {run.path}/config.yaml --out NEW",),
    )


def _headline(run: Run) -> str:
    after = f"after {short_count(run.tokens[-1])} tokens"
    if not len(run.validation_steps):
        return f"{run.recipe}: training loss {loss(smooth(run.train['loss'])[-1])} {after}."
    return f"{run.recipe}: validation loss {loss(run.validation['val_loss'][-1])} nats per token {after}."


def _status(run: Run) -> str:
    finding = judge_run(run)
    speed = f"{count(run.tokens_per_second)} tokens/s (median step)."
    state = "" if finding.verdict == "stable" else f"{finding.verdict.capitalize()}: {finding.reason}."
    return " ".join(filter(None, (state, speed, repetition(run))))


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
    )
