"""Gaps that were published for the same settings, next to those of a comparison."""

from dataclasses import dataclass

from fourbits.compare.number_format import DASH, short_count, signed
from fourbits.compare.published import DIFFERENCES
from fourbits.compare.report.comparison import Comparison
from fourbits.compare.report.side_table import SideTable
from fourbits.compare.report.table import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """A recipe's gap to bf16, ours and the published one. The fields are the keys in table.json."""

    recipe: str
    gap_nats: float | None
    gap_nats_margin: float | None
    gap_percent: float | None
    gap_percent_margin: float | None
    published_gap_nats: float
    published_gap_percent: float
    differs: str


def published_rows(comparison: Comparison, rows: list[Row]) -> list[PublishedRow]:
    """A row per recipe with a published gap; empty for a comparison without published results."""
    cell = comparison.published
    if cell is None:
        return []
    return [
        PublishedRow(
            recipe=row.recipe,
            gap_nats=row.gap_nats,
            gap_nats_margin=row.gap_nats_margin,
            gap_percent=row.gap_percent,
            gap_percent_margin=row.gap_percent_margin,
            published_gap_nats=cell.gaps[row.recipe],
            published_gap_percent=cell.percent(row.recipe),
            differs=DIFFERENCES[row.recipe],
        )
        for row in rows
        if row.recipe in cell.gaps
    ]


def published_table(comparison: Comparison, rows: list[PublishedRow]) -> SideTable | None:
    """The rows as text; None without published results."""
    cell = comparison.published
    if cell is None or not rows:
        return None
    return SideTable(
        title=f"Published: Llama {cell.model}, {short_count(cell.tokens)} tokens of C4",
        columns=("recipe", "gap (nats)", "gap (%)", "published (nats)", "published (%)"),
        rows=tuple(_cells(row) for row in rows),
        note=f"published: the repository of Quartet II (arXiv:2601.22813), one seed, where BF16 ended at "
        f"{cell.bf16:.4f}; gaps compare only if the text is C4. Theirs and ours differ: "
        + _differences(rows),
    )


def _cells(row: PublishedRow) -> tuple[str, ...]:
    return (
        row.recipe,
        DASH if row.gap_nats is None else signed(row.gap_nats, 4, row.gap_nats_margin),
        DASH if row.gap_percent is None else signed(row.gap_percent, 2, row.gap_percent_margin),
        signed(row.published_gap_nats, 4),
        signed(row.published_gap_percent, 2),
    )


def _differences(rows: list[PublishedRow]) -> str:
    return "; ".join(f"{row.recipe}: {row.differs}" for row in rows)
