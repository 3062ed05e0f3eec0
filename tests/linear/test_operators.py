"""Operators keep their contract with the compiler: schema, fake outputs, aliases; all recipes, odd shapes."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fourbits.linear import sr_counter
from fourbits.linear.step import set_step
from fourbits.quant.operand import OperandSpec
from fourbits.recipe.recipe import GemmSpec, GemmTable
from support.tables import TABLES, converted

#: (tokens, in_features, out_features): multiples of nothing, and of 16 but not of an FP8 block
SHAPES = [(45, 50, 33), (130, 144, 48)]
_DELAYED = OperandSpec(amax_policy="delayed")
_SPECS = GemmSpec(lhs=_DELAYED, rhs=_DELAYED)
DELAYED = GemmTable(fprop=_SPECS, dgrad=_SPECS, wgrad=_SPECS)
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


def calls_of(table: GemmTable, shape: tuple[int, int, int], counts_itself: bool = False) -> Recorded:
    """The operators of a training step of one layer, and their arguments."""
    tokens, width, out = shape
    torch.manual_seed(0)
    layer = converted(nn.Sequential(nn.Linear(width, out)), table)
    if not counts_itself:
        set_step(layer, 1)
    x = torch.randn(tokens, width, requires_grad=True)
    with Recorded() as recorded:
        layer(x).sum().backward()
    return recorded


def check(recorded: Recorded) -> set[str]:
    """Raises for a call that breaks its contract; the names of those that were called."""
    for operator, args in recorded.calls:
        given = tensors(args)
        # test_schema compares the arguments before and after, which torch cannot where they are FP8
        has_fp8 = any(t.dtype.is_floating_point and t.dtype.itemsize == 1 for t in given)
        opcheck(operator, args, test_utils=("test_faketensor", "test_schema")[: 2 - has_fp8])
        made = [t.untyped_storage().data_ptr() for t in tensors(operator(*args))]
        assert len(set(made)) == len(made), operator
        assert not {t.untyped_storage().data_ptr() for t in given} & set(made), operator
    return {operator._opname for operator, _ in recorded.calls}


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("table", TABLES)
def test_the_compiler_knows_what_operators_return(table, shape):
    assert check(calls_of(TABLES[table], shape)) >= {"linear_forward", "linear_backward"}


#: without nvfp4-double, which has no kernel
OF_KERNELS = [table for table in TABLES if table != "tetrajet2"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("table", OF_KERNELS)
def test_the_compiler_knows_what_kernels_write(table, shape, launches):
    """Their launches do nothing here: what they allocate is compared, not what they write."""
    for operator, args in calls_of(TABLES[table], shape).calls:
        opcheck(operator, args, test_utils=("test_faketensor",))
    assert launches


def test_every_operator_of_a_layer_is_checked(monkeypatch):
    monkeypatch.setattr(sr_counter, "_warned", [True])
    found = check(calls_of(TABLES["nvfp4"], SHAPES[0], counts_itself=True))
    found |= check(calls_of(DELAYED, SHAPES[0], counts_itself=True))
    assert found == OPERATORS
