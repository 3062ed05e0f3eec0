"""The source of a module's class, where its structure does not show what it computes."""

import ast
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any, NamedTuple

#: names of methods that read weights without multiplying by them
_NOT_COMPUTING = re.compile(r"init|reset|tie_|repr|state_dict|^_?load|^_?save|__setstate__|__getstate__")
#: modules whose classes, some of them large, load, save and drive models, and compute nothing with layers
_DRIVES_MODELS = (
    ("torch", "builtins", "fourbits", "lightning", "pytorch_lightning")
    + ("transformers.modeling_utils", "transformers.generation", "transformers.integrations")
    + ("transformers.utils",)
)


class Source(NamedTuple):
    """The syntax of a function, and the objects that its free names refer to."""

    syntax: ast.FunctionDef
    names: Mapping[str, Any]


def computing_methods(cls: type) -> Iterator[Source]:
    """The methods of a class that may compute, with those that they override where they call `super`;
    nothing without a source. Their first argument is called self.
    """
    overridden = set[str]()
    for base in cls.__mro__:
        if f"{base.__module__}.".startswith(tuple(f"{name}." for name in _DRIVES_MODELS)):
            continue
        hidden = set[str]()
        for method in getattr(_parsed(base), "body", []):
            if not isinstance(method, ast.FunctionDef) or method.name in overridden:
                continue
            if not any(isinstance(node, ast.Name) and node.id == "super" for node in ast.walk(method)):
                hidden.add(method.name)
            if not _NOT_COMPUTING.search(method.name):
                yield Source(_with_self(method), _names_in(vars(base).get(method.name)))
        overridden |= hidden


def source_of(function: Any) -> Source | None:
    """The syntax of a function of Python code outside of PyTorch; None for anything else."""
    function = inspect.unwrap(function) if callable(function) else function
    if not isinstance(function, FunctionType) or _is_torchs(function):
        return None
    syntax = _parsed(function)
    return Source(syntax, _names_in(function)) if isinstance(syntax, ast.FunctionDef) else None


def computing_nodes(cls: type, *, with_functions: bool = False) -> Iterator[ast.AST]:
    """The syntax of a class's own methods that may compute; nothing without a source.

    with_functions: also that of the functions of the class's module that they name.
    """
    named = set[str]()
    for method in getattr(_parsed(cls), "body", []):
        if isinstance(method, ast.FunctionDef) and not _NOT_COMPUTING.search(method.name):
            named |= {node.id for node in ast.walk(_with_self(method)) if isinstance(node, ast.Name)}
            yield from ast.walk(method)
    if with_functions:
        beside = vars(sys.modules.get(cls.__module__, sys))
        for name in sorted(named):
            function = inspect.unwrap(beside[name]) if callable(beside.get(name)) else None
            if isinstance(function, FunctionType):
                yield from ast.walk(_parsed(function) or ast.Pass())


def own_attribute(node: ast.AST) -> str | None:
    """The NAME in an expression `self.NAME`; None for another."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return node.attr
    return None


def _with_self(method: ast.FunctionDef) -> ast.FunctionDef:
    """The method with its first argument renamed to self."""
    for node in ast.walk(method) if method.args.args else ():
        if isinstance(node, ast.Name) and node.id == method.args.args[0].arg:
            node.id = "self"
    return method


def _names_in(member: Any) -> Mapping[str, Any]:
    """The globals of a function, method or property, and what it closes over."""
    function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    function = inspect.unwrap(function) if callable(function) else function
    if not isinstance(function, FunctionType):
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    inner: dict[str, Any] = {}
    for name, cell in cells:
        try:
            inner[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return {**function.__globals__, **inner}


def _is_torchs(function: FunctionType) -> bool:
    return function.__module__.partition(".")[0] == "torch"


@functools.cache
def _parsed(thing: type | FunctionType) -> ast.stmt | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
