"""The phases of a schedule that concern one layer, and the tables they give it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fourbits.linear.amax_history import depends_on_past_steps
from fourbits.linear.native_gemms import with_native_gemms
from fourbits.linear.selection import matches, nearest_module
from fourbits.recipe.presets import RECIPES
from fourbits.recipe.recipe import GemmTable, Recipe
from fourbits.recipe.schedule import PrecisionPhase, Stage, require_no_overlap
from fourbits.recipe.schedules import with_phases
from fourbits.settings import nearest


class LayerPhases(NamedTuple):
    """The effect of a schedule on a layer: its table outside of all phases, and the phases by their index."""

    base: GemmTable
    phases: dict[int, tuple[PrecisionPhase, GemmTable]]
    native: bool

    def table(self, indices: Sequence[int]) -> GemmTable:
        """The layer's table while these phases are active."""
        chosen = [self.phases[index] for index in indices if index in self.phases]
        table = with_phases(self.base, chosen)
        return with_native_gemms(table) if self.native else table

    def tables(self, stage: Stage) -> tuple[GemmTable, GemmTable | None]:
        """The table of a stage, and the one that a blending phase of this layer mixes in."""
        table = self.table(stage.full)
        if not any(index in self.phases for index in stage.blending):
            return table, None
        return table, self.table([*stage.full, *stage.blending])


def phases_of(
    recipe: Recipe, name: str, table: GemmTable, native: bool, holds_several: bool
) -> LayerPhases | None:
    """The phases of a recipe's schedule for the layer of this name; None if none concerns it.

    Raises ValueError for phases that overlap in this layer, and for blends that its table does not support.
    """
    found = {
        index: (phase, precision_table(phase))
        for index, phase in enumerate(recipe.schedule)
        if matches(name, phase.layers)
    }
    for index, (phase, _) in found.items():
        for other in range(index):
            if other in found:
                require_no_overlap(phase, found[other][0], name)
    phases = LayerPhases(table, found, native)
    for index, (phase, _) in found.items():
        changed = phases.table([index])  # building it checks it
        if phase.blend_in or phase.blend_out:
            _require_blend(phase, name, (table, changed), holds_several)
    return phases if found else None


def require_phases_act(recipe: Recipe, layers: Mapping[str, LayerPhases | None]) -> None:
    """Raises ValueError for a phase that concerns no quantized layer. layers: by name."""
    for index, phase in enumerate(recipe.schedule):
        if layers and not any(found is not None and index in found.phases for found in layers.values()):
            raise ValueError(
                f"schedule: layers of phase {phase.name!r} must match a quantized layer, got "
                f"{', '.join(phase.layers)}, which match none."
                f"{nearest_module(phase.layers[0], list(layers))} '*' also matches dots."
            )


def phase_notes(recipe: Recipe, layers: Sequence[LayerPhases | None]) -> list[str]:
    """A line per phase of the schedule, for the summary of a conversion."""
    notes: list[str] = []
    for index, phase in enumerate(recipe.schedule):
        start, end = phase.span
        until = "on" if end is None else f"to {end}"
        count = sum(found is not None and index in found.phases for found in layers)
        which = "quantized layer" if count == 1 else "quantized layers"
        notes.append(f"phase {phase.name}, from step {start} {until}: {phase.describe()}, {count} {which}")
    return notes


def precision_table(phase: PrecisionPhase) -> GemmTable:
    """The table whose GEMMs a phase uses. Raises ValueError for a precision that is no shipped recipe."""
    if phase.precision not in RECIPES:
        raise ValueError(
            f"schedule: precision of phase {phase.name!r} must be bf16 or a shipped recipe, got "
            f"{phase.precision!r}.{nearest(phase.precision, list(RECIPES))} Shipped: {', '.join(RECIPES)}."
        )
    return RECIPES[phase.precision].table


def _require_blend(
    phase: PrecisionPhase, name: str, tables: Sequence[GemmTable], holds_several: bool
) -> None:
    reason = ""
    if holds_several:
        reason = "is a group of linear layers"
    elif any(depends_on_past_steps(table) for table in tables):
        reason = "has amax policies or adaptive layouts, which see one table per step"
    if reason:
        raise ValueError(
            f"schedule: phase {phase.name!r} blends, which {name!r} does not support: it {reason}. Set "
            "blend_in and blend_out to 0, or name other layers."
        )
