"""set_recipe: change the recipe of a converted model between two steps, and keep what it has tracked."""

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from fourbits.linear.arguments import model_parts
from fourbits.linear.checkpoint_state import recipe_states_of
from fourbits.linear.convert import converted
from fourbits.linear.feature_shard import sharded
from fourbits.linear.kept_state import keep_tracked
from fourbits.linear.layer_phases import phases_of
from fourbits.linear.layer_state import LayerState
from fourbits.linear.native_gemms import with_native_gemms
from fourbits.linear.placement import table_for
from fourbits.linear.selection import Selection
from fourbits.linear.stacked.layer import converted_layers
from fourbits.linear.step import last_step, share_counters
from fourbits.linear.summary import ConversionSummary
from fourbits.linear.weight_source import check_table, set_weight_source
from fourbits.linear.weights import named_modules
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import GemmTable, Recipe, table_from_text
from fourbits.recipe.schedule import check_steps


def set_recipe(
    model: nn.Module | Sequence[nn.Module],
    recipe: str | Recipe,
    backend: Literal["emulated", "native"] = "emulated",
) -> ConversionSummary:
    """Change a converted model's recipe, in place; call it between two steps, before `set_step`.

    model: what `convert` was given. Unlike `convert`, it keeps the seed, the counters, the caller's choice of
    layers, the sources of weights and the shards, and what layers that stay quantized have tracked: an
    operand's amax history where amax_policy, source, transform and correction are unchanged (its newest
    entries, if it gets shorter), its layout where adaptive is unchanged. The rest is dropped. A checkpoint
    written afterwards is loaded after `convert` to the new recipe. Returns the precision of each layer.

    Raises ValueError, and changes nothing, for a model without converted layers, an unknown recipe, and one
    that does not support the model's shards or sources of weights.
    """
    parts = model_parts(model, "set_recipe")
    before = {name: module.quantization for name, module in _layers(parts)}
    chosen = get_recipe(recipe)
    seed, step = _one_seed(before), _one_step(parts)
    selection = _one_selection(before)
    check_steps(chosen.schedule)
    for name, layer in _layers(parts):
        table, _ = table_for(chosen, name)
        table = with_native_gemms(table) if backend == "native" else table
        _check(before[name], table, bool(chosen.schedule))
        phases_of(chosen, name, table, backend == "native", layer.weight.dim() > 2)
    summary = converted(parts, chosen, selection, seed, backend, last_step(parts[0]))
    for name, module in _layers(parts):
        if (old := before.get(name)) is not None:
            _keep(old, module)
    for part in parts:
        for tracked in recipe_states_of(part):
            tracked.begin(step)
        share_counters(part)
    return summary


def _layers(parts: Sequence[nn.Module]) -> list[tuple[str, Any]]:
    return list(converted_layers(named_modules(parts)))


def _one_seed(states: dict[str, LayerState]) -> int:
    """The seed of all layers. Raises ValueError without layers, and for several seeds."""
    seeds = sorted({state.seed for state in states.values()})
    if len(seeds) != 1:
        problem = "has no converted layer" if not seeds else f"was converted with several seeds, {seeds}"
        raise ValueError(f"set_recipe: the model {problem}. Call convert, which starts from the beginning.")
    return seeds[0]


def _one_selection(states: dict[str, LayerState]) -> Selection:
    """The choice of layers that the model was converted with. Raises ValueError for several."""
    chosen = {state.numbering.selection for state in states.values() if state.numbering is not None}
    if len(chosen) > 1:
        raise ValueError(
            "set_recipe: parts of the model were converted with different choices of layers. Call it on each "
            "part, or convert, which starts from the beginning."
        )
    return chosen.pop() if chosen else Selection()


def _one_step(parts: Sequence[nn.Module]) -> int | None:
    """The step of the model's recipe state. Raises ValueError where parts of it are at different steps."""
    steps = {tracked.step for part in parts for tracked in recipe_states_of(part)}
    if len(steps) > 1:
        raise ValueError(
            f"set_recipe: parts of the model are at different steps, {steps}. Call set_step on the whole "
            "model first."
        )
    return steps.pop() if steps else None


def _check(state: LayerState, table: GemmTable, schedule: bool) -> None:
    """Raises ValueError for a table that does not support a layer's shard or weight source."""
    if state.shard is not None:
        sharded(table, table_from_text(state.table).amax_reduction, state.shard)
    if state.weight_source is not None:
        check_table(table)
        if schedule:
            raise ValueError(
                "set_recipe: a layer whose weight arrives quantized cannot follow a schedule. Remove the "
                "recipe's schedule, or the layer's weight source."
            )


def _keep(old: LayerState, layer: Any) -> None:
    """Give a layer the parts of its former state that still apply."""
    new: LayerState = layer.quantization
    new.counter, new.own_counter = old.counter, old.own_counter
    old_table, table = table_from_text(old.table), table_from_text(new.table)
    if old.shard is not None:
        new.shard_as(old.shard, sharded(table, old_table.amax_reduction, old.shard))
    if old.weight_source is not None:
        source, returns, values = old.weight_source, old.weight_returns, old.weight_values
        set_weight_source(layer, source, returns=returns, values=values)
    if old.recipe_state is not None and new.recipe_state is not None:
        new.recipe_state.to(old.recipe_state.amaxes.device)
        keep_tracked(old.recipe_state, old.slot, new.recipe_state, new.slot)
