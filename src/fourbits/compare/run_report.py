"""report.html of a single run: its course, its precision, its facts."""

from pathlib import Path

from fourbits.compare import words
from fourbits.compare.colours import SHADES, stylesheet, variables
from fourbits.compare.facts import blend_switches, machine_facts, training_facts
from fourbits.compare.figures import Line, course_chart, run_loss_chart
from fourbits.compare.html import Markup, Node, facts, page, section, tag
from fourbits.compare.precision_map import legend, precision_map, reasons
from fourbits.compare.runs import Run
from fourbits.compare.sections import commands_list
from fourbits.compare.smooth import smooth
from fourbits.compare.table import judge_run
from fourbits.data.whole_file import write_whole


def write_run_report(folder: Path) -> Path:
    """Write folder/report.html from the files of a run, finished or not. ValueError if it is no run."""
    path = folder / "report.html"
    write_whole(path, render_run(Run.read(folder)).encode())
    return path


def render_run(run: Run) -> str:
    """The page as text."""
    # The run's recipe first: series 0 is the colour of all curves. The others colour the precision map.
    names = [run.recipe, *(name for name in SHADES if name != run.recipe)]
    body: list[Node] = [
        tag("style", Markup(stylesheet(names))),
        tag("p", f"fourbits train: {run.path.name}", class_="kicker"),
        tag("h1", _headline(run)),
        tag("p", _course(run), class_="headline"),
        _loss(run),
        _charts(run),
        _precision(run, names),
        section(
            "How it was made", facts(_facts(run)), commands_list((f"fourbits train {run.path}/config.yaml",))
        ),
    ]
    return page(f"fourbits: {run.recipe}, {run.path.name}", *body)


def _headline(run: Run) -> str:
    after = f"after {words.short_count(run.tokens[-1])} tokens"
    if not len(run.validation_steps):
        return f"{run.recipe}: training loss {words.loss(smooth(run.train['loss'])[-1])} {after}."
    return (
        f"{run.recipe}: validation loss {words.loss(run.validation['val_loss'][-1])} nats per token {after}."
    )


def _course(run: Run) -> str:
    finding = judge_run(run)
    speed = f"{words.count(run.tokens_per_second)} tokens/s in the median step"
    stability = "" if finding.verdict == "stable" else f"{finding.verdict.capitalize()}: {finding.reason}. "
    return f"{stability}{speed.capitalize()}."


def _loss(run: Run) -> Markup:
    steps = run.validation_steps
    chart = run_loss_chart(
        Line("each step", 0, run.tokens, run.train["loss"]),
        Line("training", 0, run.tokens, smooth(run.train["loss"])),
        Line("validation", 0, run.tokens_at(steps), run.validation_loss(steps)),
        blend_switches(run),
    )
    return section("Loss", chart)


def _charts(run: Run) -> Markup:
    columns = {"Learning rate": "lr", "Gradient norm before clipping": "grad_norm"}
    columns["Tokens per second"] = "tokens_per_second"
    charts = [
        course_chart(title, Line(key, 0, run.tokens, run.train[key]), log=key == "grad_norm")
        for title, key in columns.items()
    ]
    return section("Course", *charts)


def _precision(run: Run, names: list[str]) -> Markup:
    precision, colours = run.manifest["precision"], variables(names)
    return section(
        "Precision map",
        legend([precision], colours),
        precision_map(run.recipe, precision, run.config["model"]["pattern"], colours),
        tag("details", tag("summary", "All linears"), reasons(precision)),
        lead="Every linear, blocks in order (M: Mamba-2, -: FFN, *: attention). Outlined: in BF16.",
    )


def _facts(run: Run) -> dict[str, Node]:
    summary = run.summary
    ended = f"{summary['ended']}, {words.duration(summary['seconds'])}" if summary else "not ended"
    recipe = f"{run.recipe}, {run.manifest['recipe']['digest']}"
    return {**machine_facts(run), **training_facts(run), "recipe, by hash": recipe, "course": ended}
