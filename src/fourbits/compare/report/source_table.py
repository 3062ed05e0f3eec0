"""Validation loss by source of text: the baseline's loss, and the gap of every other recipe to it."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fourbits.compare.number_format import DASH, loss, signed
from fourbits.compare.report.comparison import Comparison
from fourbits.compare.report.pairs import Difference, difference, finished_pairs
from fourbits.compare.report.runs import Run
from fourbits.compare.report.side_table import SideTable

_SUFFIX = "_bits_per_byte"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRow:
    """One source under one recipe. val_loss: mean over seeds; gap: to the baseline, nats."""

    source: str
    recipe: str
    val_loss: float
    gap: Difference


def source_rows(comparison: Comparison) -> list[SourceRow]:
    """A row per source and recipe that has a finished pair."""
    found: list[SourceRow] = []
    for source in sources_of(comparison.any_run):
        for recipe in comparison.recipes:
            pairs = [
                (_final(run, source), _final(base, source))
                for run, base in finished_pairs(comparison, recipe, comparison.baseline)
            ]
            gap = difference([own - base for own, base in pairs], comparison.confidence(recipe))
            if gap is not None:
                mean = statistics.fmean(own for own, _ in pairs)
                found.append(SourceRow(source=source, recipe=recipe, val_loss=mean, gap=gap))
    return found


def source_table(comparison: Comparison, rows: Sequence[SourceRow]) -> SideTable | None:
    """The rows as text, a column per recipe; None for a single source, whose loss is that of all text."""
    sources = sources_of(comparison.any_run)
    if len(sources) < 2 or not rows:
        return None
    base = comparison.baseline
    others = [recipe for recipe in comparison.recipes if recipe != base]
    by_key = {(row.source, row.recipe): row for row in rows}
    return SideTable(
        title="Validation loss by source",
        columns=("source", base, *(f"{recipe}, gap (nats)" for recipe in others)),
        rows=tuple(
            (
                source,
                loss(row.val_loss if (row := by_key.get((source, base))) else None),
                *(_gap(by_key.get((source, recipe))) for recipe in others),
            )
            for source in sources
        ),
        note=f"nats per token after the last step; gaps relative to {base} with the same seed",
    )


def sources_of(run: Run) -> list[str]:
    """The sources of the validation text that the run's metrics name."""
    return [
        name.removeprefix("val_").removesuffix(_SUFFIX)
        for name in run.validation
        if name.startswith("val_") and name.endswith(_SUFFIX) and name != f"val{_SUFFIX}"
    ]


def _final(run: Run, source: str) -> float:
    return float(run.validation[f"val_{source}"][-1])


def _gap(row: SourceRow | None) -> str:
    return DASH if row is None else signed(row.gap.mean, 4, row.gap.margin)
