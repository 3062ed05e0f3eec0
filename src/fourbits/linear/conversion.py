"""The record of a conversion: recipe, choice of layers, seed, and a hash of what its layers compute."""

import hashlib
from typing import NamedTuple

from torch import nn

from fourbits.linear.layer_state import LayerState, converted_state
from fourbits.linear.roles import plain_name
from fourbits.linear.selection import Selection
from fourbits.recipe.recipe import Recipe, table_digest
from fourbits.settings import to_dict

#: `convert` sets it on the parts of a model, even if it quantizes nothing; copies keep it
_MARK = "_fourbits_converted"


def mark_converted(model: nn.Module) -> None:
    """Record that `convert` was called on a model."""
    vars(model)[_MARK] = True


def was_converted(model: nn.Module) -> bool:
    """Whether `convert` was called on a model, or on a module inside it."""
    return any(_MARK in vars(module) for module in model.modules())


class Conversion(NamedTuple):
    """The arguments of a call of `convert`."""

    #: with the caller's numbers of first and last blocks in BF16
    recipe: Recipe
    selection: Selection
    seed: int


def conversions_of(model: nn.Module) -> list[Conversion]:
    """The calls of `convert` that a model's quantized layers come from: several if its parts were."""
    found = {id(state.numbering): state.numbering for _, state in _states(model)}
    return [Conversion(each.recipe, each.selection, each.seed) for each in found.values() if each is not None]


def conversion_of(model: nn.Module, caller: str) -> Conversion:
    """The one call of `convert` that a model's layers come from. Raises ValueError for none or several."""
    found = conversions_of(model)
    if len(found) != 1:
        raise ValueError(
            f"{caller}: the model must be converted by one call of fourbits.convert, got {len(found)}. Call "
            "fourbits.convert(model, recipe) on the whole model, with a recipe that quantizes."
        )
    return found[0]


def layers_digest(model: nn.Module) -> str:
    """Hash of the names, seeds and tables of a model's quantized layers, which a resumed run compares.

    It ignores what wrappers add to a name, and settings that do not affect results bitwise. It does not
    depend on which phase of a schedule is active.
    """
    rows = [f"{plain_name(name)} {state.seed} {_digest(state)}" for name, state in _states(model)]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]


def _digest(state: LayerState) -> str:
    table = table_digest(state.base_table.to_text())
    if state.phases is None:
        return table
    phases = [{**to_dict(phase), "name": "", "layers": ""} for phase, _ in state.phases.phases.values()]
    return f"{table} {phases}"


def _states(model: nn.Module) -> list[tuple[str, LayerState]]:
    found = ((name, converted_state(module)) for name, module in model.named_modules())
    return [(name, state) for name, state in found if state is not None]
