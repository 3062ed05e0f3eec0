"""report.html of a comparison: one page that opens anywhere, offline, on any screen."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fourbits.compare import words
from fourbits.compare.colours import stylesheet, variables
from fourbits.compare.comparison import Comparison
from fourbits.compare.corpus import CorpusFacts
from fourbits.compare.facts import blend_switches, caveats, run_facts
from fourbits.compare.figures import GapCurves, LossCurves, gap_chart, loss_chart
from fourbits.compare.html import Markup, Node, facts, page, section, tag
from fourbits.compare.sample import Sample
from fourbits.compare.sections import (
    commands_list,
    corpus_section,
    cost_section,
    maps_section,
    result_section,
    sample_section,
)
from fourbits.compare.table import Row, final_table
from fourbits.data.whole_file import write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a report says beside the runs. commands: what to type to repeat the comparison."""

    commands: tuple[str, ...]
    corpus: CorpusFacts | None = None
    sample: Sample | None = None


def write_report(comparison: Comparison, context: Context, path: Path) -> Path:
    """Write the page, whole or not at all."""
    write_whole(path, render(comparison, context).encode())
    return path


def render(comparison: Comparison, context: Context) -> str:
    """The page as text."""
    rows = final_table(comparison)
    colours = variables(comparison.recipes)
    notes = tag("ul", *(tag("li", sentence) for sentence in caveats(comparison, rows)))
    body: list[Node] = [
        tag("style", Markup(stylesheet(comparison.recipes))),
        *_opening(comparison, rows),
        result_section(comparison, rows, colours),
        _losses(comparison, context.corpus),
        _gaps(comparison),
        cost_section(comparison, rows, colours),
        maps_section(comparison, colours),
        sample_section(context.sample) if context.sample else None,
        corpus_section(context.corpus) if context.corpus else None,
        section("What this shows, and what it does not", notes),
        section("How it was made", facts(run_facts(comparison)), commands_list(context.commands)),
    ]
    return page(f"fourbits: {words.listed(comparison.recipes)}", *body)


def headline(comparison: Comparison, rows: Sequence[Row]) -> str:
    """The outcome in a sentence: of nvfp4 if it took part, else of the last recipe."""
    by_name = {row.recipe: row for row in rows}
    row, base = by_name.get("nvfp4", rows[-1]), by_name[comparison.baseline]
    after = f"after {words.short_count(comparison.any_run.tokens[-1])} tokens"
    if row.val_loss is None or row.gap_nats is None or row.gap_percent is None:
        return f"{row.recipe} did not reach its last step: {row.verdict_reason.removesuffix('.')}."
    if row is base:
        return f"{row.recipe} reaches a validation loss of {words.loss(row.val_loss)} nats per token {after}."
    side = "above" if row.gap_nats >= 0 else "below"
    gap = f"{abs(row.gap_percent):.2f} % {side} {base.recipe} ({words.signed(row.gap_nats, 4)} nats)"
    if row.within_noise:
        return f"{row.recipe} ends {gap} {after}: within the noise of its {row.seeds} seeds."
    return f"{row.recipe} ends {gap} {after}."


def _opening(comparison: Comparison, rows: Sequence[Row]) -> list[Node]:
    recipes, seeds = len(comparison.recipes), len(comparison.seeds)
    about = (
        f"{words.plural(recipes, 'recipe')} and {words.plural(seeds, 'seed')}, "
        f"{words.count(comparison.any_run.tokens[-1])} training tokens each, from the same initial weights, "
        "on the same batches in the same order."
    )
    return [
        tag("p", f"fourbits compare: {comparison.name}", class_="kicker"),
        tag("h1", headline(comparison, rows)),
        tag("p", about, class_="headline"),
    ]


def _losses(comparison: Comparison, corpus: CorpusFacts | None) -> Markup:
    curves = LossCurves(
        validation=[comparison.validation_line(recipe) for recipe in comparison.recipes],
        train=[comparison.train_line(recipe) for recipe in comparison.recipes],
        unigram_entropy=corpus.unigram_entropy if corpus else None,
        switches=blend_switches(comparison.any_run),
    )
    return section("Loss", loss_chart(curves))


def _gaps(comparison: Comparison) -> Markup | None:
    others = [recipe for recipe in comparison.recipes if recipe != comparison.baseline]
    if not others:
        return None
    curves = GapCurves(
        baseline=comparison.baseline,
        validation=[comparison.gap_line(recipe) for recipe in others],
        train=[comparison.train_gap_line(recipe) for recipe in others],
        switches=blend_switches(comparison.any_run),
    )
    return section(f"Gap to {comparison.baseline}", gap_chart(curves))
