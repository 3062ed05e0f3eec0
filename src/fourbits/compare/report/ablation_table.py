"""The ablation table: the change of the loss when one technique is removed from a recipe, by seed."""

from dataclasses import dataclass

from fourbits.compare.number_format import loss
from fourbits.compare.report.comparison import Comparison
from fourbits.compare.report.pairs import Difference, difference, paired_losses, signed_difference
from fourbits.compare.report.side_table import SideTable
from fourbits.compare.report.table import Row
from fourbits.recipe.ablations import TECHNIQUES


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationRow:
    """A recipe without one technique. The fields are the keys in table.json.

    change_nats, change_percent: change of the validation loss from the full recipe with the same seed; None
    if no seed has both.
    """

    technique: str
    recipe: str
    val_loss: float | None
    change_nats: Difference | None
    change_percent: Difference | None


def ablation_rows(comparison: Comparison, rows: list[Row]) -> list[AblationRow]:
    """A row per technique; empty without an ablation."""
    if comparison.ablation is None:
        return []
    by_name, full = {row.recipe: row for row in rows}, comparison.ablation.recipe
    found: list[AblationRow] = []
    for technique, recipe in comparison.ablation.recipes.items():
        pairs = paired_losses(comparison, recipe, full)
        confidence = comparison.confidence(recipe, full)
        found.append(
            AblationRow(
                technique=technique,
                recipe=recipe,
                val_loss=by_name[recipe].val_loss,
                change_nats=difference([own - base for own, base in pairs], confidence),
                change_percent=difference([100 * (own - base) / base for own, base in pairs], confidence),
            )
        )
    return found


def ablation_table(comparison: Comparison, rows: list[AblationRow]) -> SideTable | None:
    """The rows as text; None without an ablation."""
    if comparison.ablation is None:
        return None
    full = comparison.ablation.recipe
    return SideTable(
        title=f"{full} without one technique at a time",
        columns=("without", "val loss", f"vs {full} (nats)", f"vs {full} (%)", "seeds", "shown"),
        rows=tuple(_cells(row) for row in rows),
        note=f"changes relative to {full} with the same seed; \u00b1: 95 % interval over seeds (Student's t)",
    )


def _cells(row: AblationRow) -> tuple[str, ...]:
    nats, percents = row.change_nats, row.change_percent
    return (
        f"{row.technique} ({TECHNIQUES[row.technique].what})",
        loss(row.val_loss),
        signed_difference(nats, 4),
        signed_difference(percents, 2),
        str(nats.seeds if nats else 0),
        _shown(nats),
    )


def _shown(found: Difference | None) -> str:
    if found is None:
        return "no finished pair"
    if found.within_noise is None:
        return "nothing (one seed)"
    if found.within_noise:
        return "no difference"
    return "worse without it" if found.mean > 0 else "better without it"
