"""The state of a recipe between steps, for checkpoints: what its amax policies have seen.

It is no part of a model's state_dict, whose keys stay those of nn.Linear. docs/nvfp4.md, section 16.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from fourbits.recipe.amax import (
    ALL_BLOCKS,
    ALL_SATURATED,
    BLOCKS,
    COUNT,
    HISTORY,
    IN_USE,
    PENDING,
    SATURATED,
    AmaxBook,
    Reduce,
    in_use,
    policies_of,
    reduced,
)
from fourbits.recipe.linear import LinearState, QuantizedLinear
from fourbits.recipe.recipe import table_from_text


def recipe_state(model: nn.Module, reduce: Reduce | None = None) -> dict[str, Tensor]:
    """What a checkpoint must hold beside masters and optimizer; empty where no operand has an amax policy.

    Keys: "step", and NAME.FIELD for each layer with a policy, of its six operands in the order of their
    streams: history fp32 [6, L] newest first, count int64 [6], pending fp32 [6], saturated and blocks int64
    [6]. reduce: as for set_step; on several ranks all call this, and all get the same.
    """
    return _collected(model, lambda book: reduced(book.amaxes, book.counters, reduce))


def load_recipe_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Put a saved state into a converted model. Raises ValueError where it is of another recipe or model."""
    own = _collected(model, lambda book: (book.amaxes, book.counters))
    expected, given = ({key: x.shape for key, x in tree.items()} for tree in (own, state))
    if given != expected:
        differing = sorted(key for key in {*given, *expected} if given.get(key) != expected.get(key))
        raise ValueError(
            f"load_recipe_state: the state does not fit the model's amax policies; {len(differing)} entries "
            f"differ, first {differing[0]!r}. Convert the model by the recipe the state was saved under."
        )
    for book in books_of(model):
        amaxes, counters = book.amaxes.cpu().clone(), torch.zeros_like(book.counters, device="cpu")
        for name, layer in _states(model):
            if layer.book is book:
                amax, counter = amaxes[layer.slot], counters[layer.slot]
                amax[:, HISTORY:], amax[:, PENDING] = state[f"{name}.history"], state[f"{name}.pending"]
                counter[:, COUNT] = state[f"{name}.count"]
                counter[:, ALL_SATURATED] = state[f"{name}.saturated"]
                counter[:, ALL_BLOCKS] = state[f"{name}.blocks"]
        step = int(state["step"])
        book.step = None if step < 0 else step
        amaxes[..., IN_USE] = in_use(amaxes, book.policy.cpu(), max(step, 0))
        book.amaxes, book.counters = amaxes.to(book.amaxes.device), counters.to(book.counters.device)


def _collected(model: nn.Module, parts: Callable[[AmaxBook], tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The state of all layers on the CPU, from the (amaxes, counters) of each book."""
    found: dict[str, Tensor] = {}
    for book in books_of(model):
        amaxes, counters = (part.cpu() for part in parts(book))
        found["step"] = torch.tensor(-1 if book.step is None else book.step)
        for name, state in _states(model):
            if state.book is book:
                amax, counter = amaxes[state.slot], counters[state.slot]
                found[f"{name}.history"] = amax[:, HISTORY:].clone()
                found[f"{name}.pending"] = amax[:, PENDING].clone()
                found[f"{name}.count"] = counter[:, COUNT].clone()
                found[f"{name}.saturated"] = counter[:, SATURATED] + counter[:, ALL_SATURATED]
                found[f"{name}.blocks"] = counter[:, BLOCKS] + counter[:, ALL_BLOCKS]
    return found


def open_books(model: nn.Module) -> None:
    """Give the layers whose tables have amax policies a new, empty book."""
    states = [(state, table_from_text(state.table)) for _, state in _states(model)]
    states = [(state, table) for state, table in states if policies_of(table)]
    if states:
        book = AmaxBook([table for _, table in states])
        for slot, (state, _) in enumerate(states):
            state.book, state.slot = book, slot


def books_of(model: nn.Module) -> list[AmaxBook]:
    """The books of a model: one, unless parts of it were converted apart."""
    found = {id(state.book): state.book for _, state in _states(model) if state.book is not None}
    return list(found.values())


def _states(model: nn.Module) -> Iterator[tuple[str, LinearState]]:
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            yield name, module.quantization
