"""The source of a module's class, where its structure does not show what it computes."""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from types import FunctionType

#: methods that read weights without multiplying by them
_NOT_COMPUTING = ("__init__", "reset_parameters", "init_weights", "_init_weights", "extra_repr")


def computing_nodes(cls: type, *, with_functions: bool = False) -> Iterator[ast.AST]:
    """The syntax of a class's methods that may compute; nothing without a source.

    with_functions: also that of the functions of the class's module that they name.
    """
    named = set[str]()
    for method in getattr(_parsed(cls), "body", []):
        if isinstance(method, ast.FunctionDef) and method.name not in _NOT_COMPUTING:
            names = [node for node in ast.walk(method) if isinstance(node, ast.Name)]
            for node in names:
                if method.args.args and node.id == method.args.args[0].arg:
                    node.id = "self"
            named |= {node.id for node in names}
            yield from ast.walk(method)
    if with_functions:
        beside = vars(sys.modules.get(cls.__module__, sys))
        for name in sorted(named):
            function = inspect.unwrap(beside[name]) if callable(beside.get(name)) else None
            if isinstance(function, FunctionType):
                yield from ast.walk(_parsed(function) or ast.Pass())


def own_attribute(node: ast.AST) -> str | None:
    """NAME of `self.NAME`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return node.attr
    return None


def _parsed(thing: type | FunctionType) -> ast.stmt | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
