"""Branches that a module never takes: its class tests an attribute, such as `if self.fused:`, which is set
when the module is created.
"""

import ast
import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from fourbits.linear.source import computing_methods

Decisions = frozenset[tuple[str, bool]]
NO_DECISIONS: Decisions = frozenset()
_PLAIN = bool | int | float | str | None
#: the value is not known
_UNKNOWN = object()


def decided(module: nn.Module) -> Decisions:
    """The conditions in the methods of a module's class that its attributes decide: (source, truth)."""
    truths = ((text, _truth(test, module)) for text, test in _conditions(type(module)))
    return frozenset((text, truth) for text, truth in truths if truth is not None)


def without_dead_branches(method: ast.FunctionDef, decisions: Decisions) -> ast.FunctionDef:
    """A method without the branches that decided conditions rule out, and without code after a return."""
    if not decisions:
        return method
    method = copy.deepcopy(method)
    method.body = _living(method.body, dict(decisions))
    return method


def _living(body: Sequence[ast.stmt], decisions: Mapping[str, bool]) -> list[ast.stmt]:
    living: list[ast.stmt] = []
    for statement in body:
        truth = decisions.get(ast.unparse(statement.test)) if isinstance(statement, ast.If) else None
        if isinstance(statement, ast.If) and truth is not None:
            living += _living(statement.body if truth else statement.orelse, decisions)
        else:
            for field in ("body", "orelse", "finalbody"):
                if inner := getattr(statement, field, None):
                    setattr(statement, field, _living(inner, decisions) or [ast.Pass()])
            living.append(statement)
        if living and isinstance(living[-1], ast.Return | ast.Raise):
            break
    return living


@functools.cache
def _conditions(cls: type[nn.Module]) -> tuple[tuple[str, ast.expr], ...]:
    """Conditions of a class's methods on attributes that none of them assigns: (source, syntax)."""
    nodes = [node for method in computing_methods(cls) for node in ast.walk(method.syntax)]
    assigned = {node.attr for node in nodes if isinstance(node, ast.Attribute) and _is_stored(node)}
    tests = {ast.unparse(node.test): node.test for node in nodes if isinstance(node, ast.If)}
    return tuple(
        (text, test) for text, test in tests.items() if not {"training", *assigned} & {*_attributes(test)}
    )


def _is_stored(node: ast.Attribute) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _attributes(test: ast.expr) -> Iterator[str]:
    return (node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute))


def _truth(test: ast.expr, module: nn.Module) -> bool | None:
    """Whether a condition is true for a module; None if its attributes do not decide it."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _truth(test.operand, module)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        truths = [_truth(each, module) for each in test.values]
        enough = isinstance(test.op, ast.Or)
        return enough if enough in truths else None if None in truths else not enough
    if isinstance(test, ast.Compare):
        return _compared(test, module)
    value = _value(test, module)
    return bool(value) if isinstance(value, _PLAIN) else None


def _compared(test: ast.Compare, module: nn.Module) -> bool | None:
    left, *others = (_value(each, module) for each in (test.left, *test.comparators))
    operator, right = test.ops[0], others[0]
    if len(others) > 1 or left is _UNKNOWN or right is _UNKNOWN:
        return None
    if isinstance(operator, ast.Is | ast.IsNot):
        return (left is right) == isinstance(operator, ast.Is) if right is None else None
    if isinstance(operator, ast.Eq | ast.NotEq) and isinstance(left, _PLAIN) and isinstance(right, _PLAIN):
        return (left == right) == isinstance(operator, ast.Eq)
    return None


def _value(node: ast.expr, module: nn.Module) -> Any:
    """A constant, or the value of `self.NAME` or `self.config.NAME`; _UNKNOWN for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id == "self":
        return module
    if not isinstance(node, ast.Attribute):
        return _UNKNOWN
    held = getattr(_value(node.value, module), "__dict__", {})
    inside = [held, *(held.get(kind, {}) for kind in ("_parameters", "_buffers", "_modules"))]
    return next((each[node.attr] for each in inside if node.attr in each), _UNKNOWN)
