"""The stage of a model's precision schedule: which phases are active, and how layers enter the next one."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from fourbits.linear.adopt import count_change
from fourbits.linear.audit import watch_layers
from fourbits.linear.blend import Blend, BlendWeight
from fourbits.linear.checkpoint_state import new_recipe_states_of
from fourbits.linear.feature_shard import sharded
from fourbits.linear.kept_state import keep_tracked
from fourbits.linear.layer_state import LayerState
from fourbits.linear.numbering import Numbering
from fourbits.recipe.recipe import table_from_text
from fourbits.recipe.schedule import stage_at
from fourbits.recipe.schedules import is_plain

Layers = Sequence[tuple[str, Any]]


def numberings_with_schedule(layers: Layers) -> tuple[Numbering, ...]:
    """The conversions of a model whose recipes have a schedule."""
    found = {id(n): n for _, layer in layers if (n := layer.quantization.numbering) is not None}
    return tuple(numbering for numbering in found.values() if numbering.recipe.schedule)


def changes_at(numberings: Sequence[Numbering], step: int) -> bool:
    """Whether a step's stage differs from the one the layers are in. Also sets the weights of blends."""
    changed = False
    for numbering in numberings:
        stage = stage_at(numbering.recipe.schedule, step)
        changed |= stage != numbering.stage
        if stage.blending:
            weight = numbering.recipe.schedule[stage.blending[0]].weight_at(step)
            for blend in numbering.blends.values():
                blend.set(weight)
    return changed


def enter_stage(layers: Layers, step: int) -> None:
    """Give every layer the table of a step's stage, and keep the amax histories that still apply."""
    states: list[LayerState] = [layer.quantization for _, layer in layers]
    before = [(state.recipe_state, state.slot) for state in states]
    steps = {tracked.step for tracked, _ in before if tracked is not None}
    plain = [pair for pair in layers if pair[1].quantization.plain]
    for numbering in numberings_with_schedule(layers):
        numbering.stage = stage_at(numbering.recipe.schedule, step)
    for _, layer in layers:
        _enter(layer, layer.quantization)
    new_recipe_states_of([(name, layer.quantization) for name, layer in layers])
    for state, (tracked, slot) in zip(states, before, strict=True):
        if tracked is not None and state.recipe_state is not None:
            state.recipe_state.to(tracked.amaxes.device)
            keep_tracked(tracked, slot, state.recipe_state, state.slot)
    known = None if None in steps else max((each for each in steps if each is not None), default=None)
    new = [state.recipe_state for state in states if state.recipe_state is not None]
    for tracked in {id(each): each for each in new}.values():
        tracked.begin(known)
    watch_layers([pair for pair in plain if not pair[1].quantization.plain])
    count_change()


def _enter(layer: Any, state: LayerState) -> None:
    """Give one layer the table of its conversion's stage."""
    if state.phases is None or state.numbering is None:
        return
    table, mixed = state.phases.tables(state.numbering.stage)
    other, of_phase = None if mixed == table else mixed, True
    if other is not None and is_plain(table):  # the quantized one of the two runs as the layer's own
        table, other, of_phase = other, table, False
    blend = None
    if other is not None:
        device = layer.weight.device
        weight = state.numbering.blends.setdefault(device, BlendWeight(device))
        blend = Blend(None if is_plain(other) else other.to_text(), weight, of_phase)
    if state.shard is not None:
        table = sharded(table, table_from_text(state.table).amax_reduction, state.shard)
    if table.to_text() != state.table:
        state.enter(table, is_plain(table))
    state.blend = blend


def blend_weights(numberings: Iterable[Numbering]) -> list[Tensor]:
    """The weights of blends in use, which a captured graph reads."""
    return [
        blend.tensor
        for numbering in numberings
        if numbering.stage.blending
        for blend in numbering.blends.values()
    ]
