"""Gaps of averaged weights, and their noise beside that of the last weights."""

import statistics
from dataclasses import dataclass

from fourbits.compare.number_format import DASH, loss
from fourbits.compare.report.comparison import Comparison
from fourbits.compare.report.pairs import Difference, difference, signed_difference
from fourbits.compare.report.side_table import SideTable
from fourbits.compare.statistics.interval import standard_deviation


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragedRow:
    """A recipe with averaged weights. The fields are the keys in table.json.

    val_loss: mean over seeds; gap_nats, gap_percent: to the baseline with averaged weights and the same seed,
    None for the baseline; deviation, last_deviation: standard deviation of one seed's gap with averaged and
    with the last weights, None for one seed.
    """

    recipe: str
    seeds: int
    val_loss: float
    gap_nats: Difference | None
    gap_percent: Difference | None
    deviation: float | None
    last_deviation: float | None


def averaged_rows(comparison: Comparison) -> list[AveragedRow]:
    """A row per recipe with finished runs; empty without averaged weights."""
    averaged, base = comparison.averaged, comparison.baseline
    found: list[AveragedRow] = []
    for recipe, runs in comparison.runs.items():
        own = {seed: averaged[recipe, seed] for seed in runs if (recipe, seed) in averaged}
        if not own:
            continue
        pairs = {seed: averaged[base, seed] for seed in own if recipe != base and (base, seed) in averaged}
        gaps = [own[seed] - pairs[seed] for seed in pairs]
        last = [runs[seed].final_loss - comparison.runs[base][seed].final_loss for seed in pairs]
        found.append(
            AveragedRow(
                recipe=recipe,
                seeds=len(own),
                val_loss=statistics.fmean(own.values()),
                gap_nats=difference(gaps),
                gap_percent=difference(
                    [100 * gap / pairs[seed] for seed, gap in zip(pairs, gaps, strict=True)]
                ),
                deviation=standard_deviation(gaps),
                last_deviation=standard_deviation(last),
            )
        )
    return found


def averaged_table(comparison: Comparison, rows: list[AveragedRow]) -> SideTable | None:
    """The rows as text; None without averaged weights."""
    if not rows:
        return None
    base = comparison.baseline
    return SideTable(
        title="Mean of the weights of the last checkpoints",
        columns=(
            "recipe",
            "val loss",
            f"vs {base} (nats)",
            f"vs {base} (%)",
            "std. deviation",
            "of the last weights",
        ),
        rows=tuple(_cells(row) for row in rows),
        note="measured in the forward pass of each recipe; standard deviation of one seed's gap in nats",
    )


def _cells(row: AveragedRow) -> tuple[str, ...]:
    return (
        row.recipe,
        loss(row.val_loss),
        signed_difference(row.gap_nats, 4),
        signed_difference(row.gap_percent, 2),
        *(DASH if each is None else f"{each:.4f}" for each in (row.deviation, row.last_deviation)),
    )
