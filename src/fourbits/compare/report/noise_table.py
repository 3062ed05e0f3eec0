"""The noise of gaps: standard error, seeds needed for a given difference, and why recipes stopped."""

import statistics
from dataclasses import dataclass

from fourbits.compare.number_format import DASH
from fourbits.compare.report.comparison import Comparison
from fourbits.compare.report.pairs import paired_losses
from fourbits.compare.report.side_table import SideTable
from fourbits.compare.statistics.sequential import seeds_needed, standard_error

#: differences in nats per token for which the number of seeds is shown
DIFFERENCES = (0.005, 0.01, 0.02)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseRow:
    """The noise of one recipe's gap to the baseline. The fields are the keys in table.json.

    deviation: standard deviation of one seed's gap; seeds_needed: for each of DIFFERENCES, the fewest seeds
    whose 95 % interval has at most that margin, None above 10,000; stopped: why the recipe stopped, None for
    a comparison that runs all seeds.
    """

    recipe: str
    seeds: int
    deviation: float
    standard_error: float
    seeds_needed: dict[str, int | None]
    stopped: str | None


def noise_rows(comparison: Comparison) -> list[NoiseRow]:
    """A row per recipe with at least two finished pairs."""
    found: list[NoiseRow] = []
    for recipe in comparison.recipes:
        gaps = [own - base for own, base in paired_losses(comparison, recipe, comparison.baseline)]
        error = standard_error(gaps)
        if recipe == comparison.baseline or error is None:
            continue
        deviation = statistics.stdev(gaps)
        stop = comparison.stops.get(recipe)
        found.append(
            NoiseRow(
                recipe=recipe,
                seeds=len(gaps),
                deviation=deviation,
                standard_error=error,
                seeds_needed={f"{each:g}": seeds_needed(deviation, each) for each in DIFFERENCES},
                stopped=stop and stop.text,
            )
        )
    return found


def noise_table(comparison: Comparison, rows: list[NoiseRow]) -> SideTable | None:
    """The rows as text; None for one seed."""
    if not rows:
        return None
    raced = bool(comparison.stops)
    note = (
        "seeds for a difference in nats: whose 95 % interval has at most this margin, if the standard "
        "deviation holds, which is itself uncertain with few seeds"
    )
    if raced:
        note += ". In 95 of 100 comparisons no recipe stops wrongly, all looks together"
    return SideTable(
        title=f"Noise of the gap to {comparison.baseline}",
        columns=(
            "recipe",
            "seeds",
            "std. deviation",
            "std. error",
            *(f"seeds for {each:g}" for each in DIFFERENCES),
            *(("stopped",) if raced else ()),
        ),
        rows=tuple(_cells(row, raced) for row in rows),
        note=note,
    )


def _cells(row: NoiseRow, raced: bool) -> tuple[str, ...]:
    return (
        row.recipe,
        str(row.seeds),
        f"{row.deviation:.4f}",
        f"{row.standard_error:.4f}",
        *(DASH if each is None else f"{each:,}" for each in row.seeds_needed.values()),
        *((row.stopped or DASH,) if raced else ()),
    )
