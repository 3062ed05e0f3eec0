"""Writes report.html of a comparison: one page that opens anywhere, offline, on any screen."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fourbits.compare.number_format import count, listed, loss, mebibytes, ratio, short_count, signed
from fourbits.compare.report.caveats import caveats
from fourbits.compare.report.colours import palette, variables
from fourbits.compare.report.comparison import Comparison
from fourbits.compare.report.context import Context
from fourbits.compare.report.figures import GapCurves, LossCurves, Switch, gap_chart, loss_chart
from fourbits.compare.report.page import render_page
from fourbits.compare.report.precision_map import legend, precision_map
from fourbits.compare.report.run_details import comparison_details, phase_starts, ran_native, switches
from fourbits.compare.report.side_tables import SideRows
from fourbits.compare.report.svg import Chart
from fourbits.compare.report.table import Row, final_table
from fourbits.compare.report.technique_section import measured_names, technique_section
from fourbits.compare.report.technique_summary import headline as gradient_headline
from fourbits.data.whole_file import write_whole


def write_report(comparison: Comparison, context: Context, path: Path) -> Path:
    """Write the page atomically."""
    write_whole(path, render(comparison, context).encode())
    return path


def render(comparison: Comparison, context: Context) -> str:
    """The page as HTML."""
    rows, found = final_table(comparison), context.techniques
    hashes = {row.recipe: row.digest for row in rows}
    names = list(dict.fromkeys([*comparison.recipes, *(measured_names(found) if found else ())]))
    of_losses = headline(comparison, rows)
    return render_page(
        "comparison.html",
        title=listed(comparison.recipes),
        palette=palette(names),
        name=comparison.name,
        headline=gradient_headline(found) if found else of_losses,
        of_losses=of_losses if found else None,
        techniques=technique_section(found, names) if found else None,
        baseline=comparison.baseline,
        num_seeds=len(comparison.seeds),
        tokens=comparison.any_run.tokens[-1],
        beginning=beginning(comparison),
        rows=rows,
        side_tables=SideRows.of(comparison, rows).shown(comparison),
        colours=variables(names),
        loss=_loss_chart(comparison, context),
        gap=_gap_chart(comparison),
        **_costs(comparison, rows),
        **_precision(comparison),
        sample=context.sample,
        corpus=context.corpus,
        caveats=caveats(comparison, rows),
        details=comparison_details(comparison),
        recipes=hashes,
        commands=context.commands,
    )


def headline(comparison: Comparison, rows: Sequence[Row]) -> str:
    """The outcome in a sentence: of nvfp4 if the comparison has it, else of the last recipe.

    One seed allows no comparison; several are compared by the interval of the gap.
    """
    by_name = {row.recipe: row for row in rows}
    row, base = by_name.get("nvfp4", rows[-1]), by_name[comparison.baseline]
    after = f"after {short_count(comparison.any_run.tokens[-1])} tokens"
    if comparison.fork_step is not None:
        after += f", of which it trained the last {short_count(_tokens_after_fork(comparison))}"
    if row.val_loss is None or row.gap_nats is None or row.gap_percent is None:
        return f"{row.recipe} did not reach its last step: {row.verdict_reason.removesuffix('.')}."
    if row is base:
        return f"{row.recipe} reaches a validation loss of {loss(row.val_loss)} nats per token {after}."
    if row.gap_nats_margin is None:
        return f"{listed(comparison.recipes)} trained with one seed: too few to compare their losses."
    low, high = (signed(row.gap_nats + side * row.gap_nats_margin, 4) for side in (-1, 1))
    gap = f"{signed(row.gap_nats, 4)} nats, 95 % interval {low} to {high}, {row.seeds} seeds"
    if row.within_noise:
        return f"No difference between {row.recipe} and {base.recipe} shown {after} ({gap})."
    side = "above" if row.gap_nats >= 0 else "below"
    return f"{row.recipe} ends {abs(row.gap_percent):.2f} % {side} {base.recipe} {after} ({gap})."


def beginning(comparison: Comparison) -> str:
    """What the runs of a seed have in common, in a sentence."""
    if comparison.fork_step is None:
        return "All recipes start from the same weights and read the same batches in the same order."
    steps = int(comparison.any_run.train["step"][-1])
    return (
        f"Every other recipe continues {comparison.baseline}'s run of its seed after "
        f"{comparison.fork_step:,} of {steps:,} steps, on the same batches."
    )


def _tokens_after_fork(comparison: Comparison) -> int:
    """Tokens that a recipe trains after it has taken over the baseline's run."""
    steps, step = int(comparison.any_run.train["step"][-1]), comparison.fork_step or 0
    return int(comparison.any_run.tokens[-1]) * (steps - step) // steps


def _loss_chart(comparison: Comparison, context: Context) -> Chart:
    return loss_chart(
        LossCurves(
            validation=[comparison.validation_line(recipe) for recipe in comparison.recipes],
            train=[comparison.train_line(recipe) for recipe in comparison.recipes],
            unigram_entropy=context.corpus.unigram_entropy if context.corpus else None,
            phase_starts=phase_starts(comparison.any_run),
            switches=_switches(comparison),
        )
    )


def _gap_chart(comparison: Comparison) -> Chart | None:
    others = [recipe for recipe in comparison.recipes if recipe != comparison.baseline]
    if not others:
        return None
    return gap_chart(
        GapCurves(
            baseline=comparison.baseline,
            validation=[comparison.gap_line(recipe) for recipe in others],
            train=[comparison.train_gap_line(recipe) for recipe in others],
            phase_starts=phase_starts(comparison.any_run),
            switches=_switches(comparison),
        )
    )


def _switches(comparison: Comparison) -> list[Switch]:
    """The precision switches of all recipes; with the recipe's name if several have a schedule."""
    found = {name: switches(next(iter(runs.values()))) for name, runs in comparison.runs.items()}
    several = sum(bool(each) for each in found.values()) > 1
    return [
        (tokens, f"{recipe}: {name}" if several else name)
        for recipe, each in found.items()
        for tokens, name in each
    ]


def _costs(comparison: Comparison, rows: Sequence[Row]) -> dict[str, Any]:
    """Bars of speed and memory: name, value, text, note."""
    return {
        "speeds": [
            (row.recipe, row.tokens_per_second, count(row.tokens_per_second), ratio(row.speed_ratio))
            for row in rows
        ],
        "memory": [
            (row.recipe, row.peak_memory_bytes, mebibytes(row.peak_memory_bytes), None) for row in rows
        ],
        "native": ran_native(comparison.any_run),
        "shared_machine": any(each and each.jobs > 1 for each in comparison.provenance.values()),
    }


def _precision(comparison: Comparison) -> dict[str, Any]:
    """A map of every recipe that quantizes any layer, and the legend of all maps."""
    colours, seed = variables(comparison.recipes), comparison.seeds[0]
    pattern = comparison.any_run.config["model"]["pattern"]
    found = {name: runs[seed].manifest["precision"] for name, runs in comparison.runs.items()}
    found = {name: each for name, each in found.items() if each["share_of_linears"] > 0}
    return {
        "maps": [precision_map(name, each, pattern, colours) for name, each in found.items()],
        "legend": legend(list(found.values()), colours),
    }
