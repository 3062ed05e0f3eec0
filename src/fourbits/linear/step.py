"""set_step: the position of a micro-batch in a run, which determines all random bits and amax policies."""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from fourbits.linear.adopt import conversions
from fourbits.linear.amax_history import RecipeState
from fourbits.linear.amax_policy import Reduce
from fourbits.linear.arguments import model_parts
from fourbits.linear.checkpoint_state import recipe_states_of
from fourbits.linear.conversion import was_converted
from fourbits.linear.error_feedback import layers_with_feedback, update_coefficients
from fourbits.linear.numbering import Numbering, make_distinct
from fourbits.linear.precision import blend_weights, changes_at, enter_stage, numberings_with_schedule
from fourbits.linear.sr_counter import SrCounter
from fourbits.linear.stacked.layer import converted_layers
from fourbits.linear.weights import named_modules
from fourbits.recipe.recipe import GemmTable, table_from_text
from fourbits.recipe.schedule import Stage


class _Found(NamedTuple):
    """The state that a model's layers share, collected by one walk over its modules."""

    #: how often modules were registered or converted before the walk
    changes: int
    counters: tuple[SrCounter, ...]
    recipe_states: tuple[RecipeState, ...]
    position: "_Position"
    #: numberings of the conversions whose recipes have a schedule
    scheduled: tuple[Numbering, ...] = ()
    #: layers whose input has error feedback
    feedback: tuple[Any, ...] = ()


class _Position:
    """Where the last micro-batch began: its step, its first token, and that token's place among blocks."""

    __slots__ = ("first_token", "place", "step")

    def __init__(self) -> None:
        self.step, self.first_token, self.place = -1, 0, 0

    def aligned(self, step: int, first_token: int) -> int:
        """The place of a micro-batch's first token, a multiple of 16: first_token itself if it is one, and if
        all micro-batches before it in this step had multiples of 16.
        """
        place, since = _rounded_up(first_token), first_token - self.first_token
        if step == self.step and since > 0:
            place = max(place, self.place + _rounded_up(since))
        self.step, self.first_token, self.place = step, first_token, place
        return place


#: how often a module was registered in another module, in this process
_registrations = [0]
#: cached per model, so that a step does not walk over its modules
_found: "weakref.WeakKeyDictionary[nn.Module, _Found]" = weakref.WeakKeyDictionary()


def set_step(
    model: nn.Module | Sequence[nn.Module],
    step: int,
    first_token: int = 0,
    reduce: Reduce | None = None,
    same_weights: bool = False,
) -> None:
    """Advance the stochastic-rounding RNG and the amax policies; call before each micro-batch.

    model: what `convert` was given, a model or its parts. step: the optimizer step; first_token: index of the
    micro-batch's first token among all tokens of this step (over ranks and micro-batches). Random bits are
    then a function of (seed, step, token), whatever the number of ranks and micro-batches, and a run resumed
    between steps repeats them. A first_token that is not a multiple of 16 (one block) is rounded up, past all
    blocks of the micro-batches before it in this process, so that no noise repeats; several ranks, and a
    resume within a step, need multiples of 16. reduce: for amax policies on several ranks; (tensor, "max" or
    "sum") -> its all-reduced value. same_weights: promises that no weight was written since the last
    set_step, so that layers may reuse their quantized weights. A recipe with a schedule enters the phase of
    the step. If you capture your own CUDA graph, copy the new `counters_of(model)` values into the captured
    tensors before each replay, and capture it again whenever `stage_of(model)` changes. Does nothing to a
    model without converted layers, such as one restored with recipe "bf16". Raises ValueError for values out
    of range, and for anything but a model that was passed to `convert`.
    """
    for name, number in (("step", step), ("first_token", first_token)):
        if isinstance(number, bool) or not isinstance(number, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"set_step: {name} must be an int, got {number!r}. Pass a whole number.")
    if not 0 <= step < 1 << 32:
        raise ValueError(f"set_step: step must be in [0, 2**32), got {step}. Count optimizer steps from 0.")
    if not 0 <= first_token < 1 << 62:
        raise ValueError(
            f"set_step: first_token must be in [0, 2**62), got {first_token}. "
            "Count the tokens of a step from 0."
        )
    parts = [model] if isinstance(model, nn.Module) else model_parts(model, "set_step")
    in_phase = _in_phase(parts, step)
    if not any(found.counters for found in in_phase):
        _require_converted(parts)
    for found in in_phase:
        first = found.position.aligned(step, first_token)
        for tracked in found.recipe_states:
            tracked.advance(step, reduce)
        for counter in found.counters:
            counter.advance(step, first, same_weights)
        update_coefficients(found.feedback, step)


def _require_converted(parts: Sequence[nn.Module]) -> None:
    """Raises ValueError if `convert` was called neither on a part nor on a module inside one."""
    if not any(was_converted(part) for part in parts):
        raise ValueError(
            f"set_step: model must have been converted, got a {type(parts[0]).__name__} that convert was not "
            'called on. Call fourbits.convert(model, recipe) first; recipe "bf16" leaves it as it is.'
        )


def enter_phase(model: nn.Module, step: int) -> None:
    """Give the layers the precision of a step, before state saved after that step is loaded."""
    _in_phase([model], step)


def _found_in(model: nn.Module) -> _Found:
    """The result of the last walk over a model, or of a new one."""
    found = _found.get(model)
    if found is None or found.changes != _changes():
        found = _found[model] = _walk(model, _Position() if found is None else found.position)
    return found


def _in_phase(parts: Sequence[nn.Module], step: int) -> list[_Found]:
    """The state of a model's parts, whose layers enter the phases of a step."""
    found = [_found_in(part) for part in parts]
    if any(bool(each.scheduled) and changes_at(each.scheduled, step) for each in found):
        enter_stage(list(converted_layers(named_modules(parts))), step)
        for place, (part, each) in enumerate(zip(parts, found, strict=True)):
            changes_at(each.scheduled, step)  # the weights of blends that begin here
            found[place] = _found[part] = _walk(part, each.position)
    return found


def share_counters(model: nn.Module) -> None:
    """Give layers that were converted after `set_step` the model's counter, without waiting for the next."""
    if any(layer.quantization.counter is not None for layer in _layers(model)):
        found = _found.get(model)
        _found[model] = _walk(model, _Position() if found is None else found.position)


def stage_of(model: nn.Module | Sequence[nn.Module]) -> tuple[Stage, ...]:
    """The active phases, as indices of the recipe's schedule, for each conversion with one.

    model: what `set_step` was given.
    """
    (first, *_) = [model] if isinstance(model, nn.Module) else model_parts(model, "stage_of")
    found = _found.get(first)
    return () if found is None else tuple(numbering.stage for numbering in found.scheduled)


def last_step(model: nn.Module) -> int:
    """The step of the last `set_step` of this model; 0 before the first."""
    found = _found.get(model)
    return 0 if found is None else max(found.position.step, 0)


def counters_of(model: nn.Module) -> list[Tensor]:
    """The counters that determine the layers' random bits, int64 [9] each; one tensor after `set_step`.

    While a phase of the recipe's schedule blends, its weight follows, fp32 scalar.
    """
    tensors: dict[int, Tensor] = {}
    for layer in _layers(model):
        state = layer.quantization
        tensor = state.own_counter if state.counter is None else state.counter.tensor
        tensors[id(tensor)] = tensor
    found = _found.get(model)
    return [*tensors.values(), *([] if found is None else blend_weights(found.scheduled))]


def tables_of(model: nn.Module) -> set[GemmTable]:
    """The tables of the quantized layers."""
    return {table_from_text(text) for text in {layer.quantization.table for layer in _layers(model)}}


def _rounded_up(tokens: int) -> int:
    return -(-tokens // 16) * 16


def _walk(model: nn.Module, position: _Position) -> _Found:
    """Give every layer without a counter that of its seed and device, and collect the model's state."""
    counters: dict[tuple[int, torch.device], SrCounter] = {}
    layers = _layers(model)
    make_distinct(layer.quantization for layer in layers)
    for layer in layers:
        if layer.quantization.counter is not None:
            counters.setdefault(_key(layer), layer.quantization.counter)
    for layer in layers:
        state, key = layer.quantization, _key(layer)
        if state.counter is None:
            state.counter = counters.setdefault(key, SrCounter(*key))
        state.weight.found(layer.weight)
    unique = {id(layer.quantization.counter): layer.quantization.counter for layer in layers}
    scheduled = numberings_with_schedule([("", layer) for layer in layers])
    states = tuple(recipe_states_of(model))
    feedback = layers_with_feedback(layers)
    return _Found(_changes(), tuple(unique.values()), states, position, scheduled, feedback)


def _changes() -> int:
    """A number that grows whenever a model may have layers that the last walk did not find."""
    return conversions() + _registrations[0]


def _count_registration(*_: object) -> None:
    # A traced forward that slices a ModuleList registers modules; a count would be guarded, and recompile
    # the graph at every call.
    if not torch.compiler.is_compiling():
        _registrations[0] += 1


register_module_module_registration_hook(_count_registration)


def _key(layer: Any) -> tuple[int, torch.device]:
    return layer.quantization.seed, torch.device("cpu") if layer.weight.is_meta else layer.weight.device


def _layers(model: nn.Module) -> list[Any]:
    return [layer for _, layer in converted_layers(model.named_modules())]
