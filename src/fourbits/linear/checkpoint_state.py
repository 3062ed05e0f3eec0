"""Recipe state, for checkpoints: the amax history and layouts that a recipe keeps between steps.

It is not part of a model's state_dict, whose keys stay those of nn.Linear. docs/nvfp4.md, sections 16 and 17.
Random bits have no state: `set_step` with the step of the checkpoint restores them (sr_counter.py).
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fourbits.linear.amax_history import RecipeState, depends_on_past_steps
from fourbits.linear.amax_policy import (
    ALL_BLOCKS,
    ALL_SATURATED,
    BLOCKS,
    COUNT,
    HISTORY,
    LAYOUT,
    LAYOUT_ALL,
    PENDING,
    SATURATED,
    Reduce,
    reduced,
)
from fourbits.linear.error_feedback import restore_coefficients, span_of
from fourbits.linear.layer_state import LayerState
from fourbits.linear.roles import plain_name
from fourbits.linear.stacked.layer import converted_layers
from fourbits.quant.feedback_coefficients import span_within
from fourbits.recipe.recipe import GemmTable, table_from_text


def recipe_state(model: nn.Module, reduce: Reduce | None = None) -> dict[str, Tensor]:
    """The state to save besides master weights and optimizer; empty if no operand depends on past steps.

    Keys: "step", and NAME.FIELD for each layer with an amax policy or an adaptive layout. Fields, for the six
    operands in the order of their streams: history fp32 [6, L], newest first; count, pending (fp32),
    saturated, blocks and layout, int64 [6]; layout_counts int64 [6, 2]. NAME.coefficients, int8 [K, span],
    for each layer with error feedback. reduce: as for set_step; all ranks must call this, and all get the
    same state.
    """
    return _collected(model, lambda tracked: reduced(tracked.amaxes, tracked.counters, reduce))


def saturated_and_all(model: nn.Module) -> Tensor | None:
    """Saturated blocks and all blocks of the current step: int64 [2], summed over layers.

    On the device of the layers, before any reduction over ranks; None if no operand depends on past steps.
    docs/nvfp4.md, section 16, defines the counts.
    """
    all_tracked = recipe_states_of(model)
    if not all_tracked:
        return None
    counts = [tracked.counters[..., SATURATED : BLOCKS + 1].sum((0, 1)) for tracked in all_tracked]
    return torch.stack(counts).sum(0)


@contextmanager
def kept_recipe_state(model: nn.Module) -> Generator[None]:
    """Discard the observations of passes inside the block, in which `set_step` must not be called."""
    before = [(each, each.amaxes.clone(), each.counters.clone()) for each in recipe_states_of(model)]
    try:
        yield
    finally:
        for each, amaxes, counters in before:
            each.amaxes, each.counters = amaxes, counters


@torch.inference_mode(mode=False)
def load_recipe_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load a saved state into a converted model. Raises ValueError for a state of another recipe or model."""
    own = _collected(model, lambda tracked: (tracked.amaxes, tracked.counters))
    expected, given = ({key: x.shape for key, x in tree.items()} for tree in (own, state))
    if given != expected:
        differing = sorted(key for key in {*given, *expected} if given.get(key) != expected.get(key))
        raise ValueError(
            f"load_recipe_state: the state does not fit the model's recipe: {len(differing)} entries differ, "
            f"first {differing[0]!r}. Convert the model with the recipe that the state was saved under."
        )
    for name, layer in converted_layers(model.named_modules()):
        if (saved := state.get(f"{name}.coefficients")) is not None:
            restore_coefficients(layer, saved)
    for tracked in recipe_states_of(model):
        amaxes, counters = tracked.amaxes.cpu().clone(), torch.zeros_like(tracked.counters, device="cpu")
        for name, layer in _states(model):
            if layer.recipe_state is tracked:
                amax, counter = amaxes[layer.slot], counters[layer.slot]
                amax[:, HISTORY:], amax[:, PENDING] = state[f"{name}.history"], state[f"{name}.pending"]
                counter[:, COUNT], counter[:, LAYOUT] = state[f"{name}.count"], state[f"{name}.layout"]
                counter[:, ALL_SATURATED] = state[f"{name}.saturated"]
                counter[:, ALL_BLOCKS] = state[f"{name}.blocks"]
                counter[:, LAYOUT_ALL:] = state[f"{name}.layout_counts"]
        device = tracked.amaxes.device
        tracked.amaxes, tracked.counters = amaxes.to(device), counters.to(device)
        step = int(state["step"])
        tracked.begin(step if step >= 0 else None)


def _collected(model: nn.Module, parts: Callable[[RecipeState], tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The state of all layers on the CPU, from the (amaxes, counters) of each recipe state."""
    found: dict[str, Tensor] = {}
    for tracked in recipe_states_of(model):
        amaxes, counters = (part.cpu() for part in parts(tracked))
        step = -1 if tracked.step is None else tracked.step
        found["step"] = torch.tensor(step, dtype=torch.int64, device="cpu")
        for name, state in _states(model):
            if state.recipe_state is tracked:
                amax, counter = amaxes[state.slot], counters[state.slot]
                found[f"{name}.history"] = amax[:, HISTORY:].clone()
                found[f"{name}.pending"] = amax[:, PENDING].clone()
                found[f"{name}.count"] = counter[:, COUNT].clone()
                found[f"{name}.saturated"] = counter[:, SATURATED] + counter[:, ALL_SATURATED]
                found[f"{name}.blocks"] = counter[:, BLOCKS] + counter[:, ALL_BLOCKS]
                found[f"{name}.layout"] = counter[:, LAYOUT].clone()
                found[f"{name}.layout_counts"] = counter[:, LAYOUT_ALL:].clone()
    return found | _coefficients(model)


def _coefficients(model: nn.Module) -> dict[str, Tensor]:
    """The coefficients of error feedback on the CPU; zeros where none were computed yet."""
    found: dict[str, Tensor] = {}
    for name, layer in converted_layers(model.named_modules()):
        state: LayerState = layer.quantization
        if span := span_of(state):
            columns, known = layer.weight.shape[1], state.feedback.coefficients
            shape = columns, span_within(span, columns)
            saved = torch.zeros(shape, dtype=torch.int8, device="cpu")
            found[f"{name}.coefficients"] = saved if known is None else saved.copy_(known)
    return found


def new_recipe_states(model: nn.Module) -> None:
    """Give the layers whose tables depend on past steps a new, empty recipe state."""
    new_recipe_states_of(list(_states(model)))


def new_recipe_states_of(states: Sequence[tuple[str, LayerState]]) -> None:
    """As `new_recipe_states`, for the states of a model's layers by name."""
    found = [(name, state, table_from_text(state.table)) for name, state in states]
    found = [(name, state, table) for name, state, table in found if depends_on_past_steps(table)]
    if found:
        tracked = RecipeState([table for *_, table in found], _sharing(found))
        for slot, (_, state, _) in enumerate(found):
            state.recipe_state, state.slot = tracked, slot


def _sharing(found: Sequence[tuple[str, LayerState, GemmTable]]) -> list[list[int]]:
    """The slots of layers whose weights share an amax: a group of the recipe's in one module."""
    groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for slot, (name, state, table) in enumerate(found):
        parent, _, own = plain_name(name).rpartition(".")
        for group in () if state.numbering is None else state.numbering.recipe.shared_weight_amax:
            if own in group and table.fprop.rhs.tensor_scaled:
                groups.setdefault((parent, group), []).append(slot)
    return [slots for slots in groups.values() if len(slots) > 1]


def recipe_states_of(model: nn.Module) -> list[RecipeState]:
    """The recipe states of a model: one, unless parts of it were converted separately."""
    of_layers = (state.recipe_state for _, state in _states(model))
    return list({id(tracked): tracked for tracked in of_layers if tracked is not None}.values())


def _states(model: nn.Module) -> Iterator[tuple[str, LayerState]]:
    for name, layer in converted_layers(model.named_modules()):
        yield name, layer.quantization
