"""Operators keep their contract with the compiler: schema, fake outputs, aliases; all recipes, odd shapes."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from fourbits.linear import sr_counter
from fourbits.linear.step import set_step
from support.tables import TABLES, converted

#: (tokens, in_features, out_features): multiples of nothing, of 16 only, and more than one FP8 block
SHAPES = [(45, 50, 33), (16, 144, 48), (130, 130, 260)]
OPERATORS = {"linear_inputs", "linear_forward", "linear_backward", "tick", "observe", "commit"}


class Recorded(TorchDispatchMode):
    """Calls of our operators, which something traces."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fourbits":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def calls_of(table: str, shape: tuple[int, int, int], counts_itself: bool) -> Recorded:
    """The operators of a training step of one layer, and their arguments."""
    tokens, width, out = shape
    torch.manual_seed(0)
    layer = converted(nn.Sequential(nn.Linear(width, out)), TABLES[table])
    if not counts_itself:
        set_step(layer, 1)
    x = torch.randn(tokens, width, requires_grad=True)
    with Recorded() as recorded:
        layer(x).sum().backward()
    return recorded


def check(recorded: Recorded) -> set[str]:
    """Raises for a call that breaks its contract; the names of those that were called."""
    for operator, args in recorded.calls:
        opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))
    return {operator._opname for operator, _ in recorded.calls}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("table", TABLES)
def test_the_compiler_is_told_what_operators_return(table, shape):
    assert check(calls_of(table, shape, counts_itself=False)) >= {"linear_forward", "linear_backward"}


def test_every_operator_of_a_layer_is_checked(monkeypatch):
    monkeypatch.setattr(sr_counter, "_warned", [True])
    past = [name for name, table in TABLES.items() if table.fprop.lhs.amax_policy != "current"]
    found = check(calls_of("nvfp4", SHAPES[0], counts_itself=True))
    found |= check(calls_of(past[0], SHAPES[0], counts_itself=True))
    assert found == OPERATORS
