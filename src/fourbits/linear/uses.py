"""How a module's class uses its submodules and parameters: calls them, reads weights, multiplies by them.

Functions, methods and autograd functions that a method passes modules or parameters to are read, too, where
their source is known. Elsewhere what is passed on counts as called.
"""

import ast
import fnmatch
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from fourbits.linear.branches import NO_DECISIONS, Decisions, without_dead_branches
from fourbits.linear.handles import NOTHING, Path, Paths, Scope
from fourbits.linear.products import factors
from fourbits.linear.source import Source, computing_methods, source_of

#: calls within calls that are followed
_DEEPEST = 3
#: functions that inspect their argument without computing with it
_INSPECTS = frozenset(
    ("isinstance", "hasattr", "getattr", "setattr", "len", "type", "id", "print", "str")
    + ("repr", "enumerate", "zip", "list", "tuple", "reversed", "iter", "sorted", "cast")
    + ("callable", "issubclass", "range")
)
#: the classes of `self`, whose path is empty, and of modules below it, where they are known
_Classes = Mapping[Path, type[nn.Module]]
#: attributes of a layer that are no tensors, or none that a product reads
_PLAIN = frozenset(["bias", "in_features", "out_features", "training", "weight_dtype", "nf"])


class Uses(NamedTuple):
    """Paths below a module, as its class treats them."""

    #: modules whose weight is read other than by calling them
    read: Paths = NOTHING
    #: paths that are called, or passed to code that may call them; the empty path is the module itself
    used: Paths = NOTHING
    #: factors of matrix multiplications, and what they are computed from
    factors: Paths = NOTHING

    def joined(self, other: "Uses") -> "Uses":
        """The paths of both."""
        return Uses(*(mine | others for mine, others in zip(self, other, strict=True)))


@functools.cache
def uses_of(
    cls: type[nn.Module],
    decisions: Decisions = NO_DECISIONS,
    children: frozenset[tuple[str, type[nn.Module]]] = frozenset(),
) -> Uses:
    """How the methods of a class use its submodules and parameters; nothing without a source.

    decisions: those of `branches.decided`, to skip the branches that a module never takes. children: (name,
    class) of its submodules, to follow what it passes to them.
    """
    classes = {(): cls, **{(name,): child for name, child in children}}
    found = Uses()
    for method in computing_methods(cls):
        method = method._replace(syntax=without_dead_branches(method.syntax, decisions))
        found = found.joined(_uses(method, {"self": frozenset({()})}, classes, 0))
    return found


def reached(module: Any, path: Path) -> Iterator[Any]:
    """The modules and parameters that a path leads to; a path ends at a parameter."""
    if not path or not isinstance(module, nn.Module):
        yield module
        return
    held = vars(module)
    key, inside = path[0], {**held["_modules"], **held["_parameters"]}
    if "parametrizations" in inside:
        inside = {**vars(inside["parametrizations"])["_modules"], **inside}
    chosen = [each for name, each in inside.items() if fnmatch.fnmatchcase(name, key)]
    for each in chosen:
        if each is not None:
            yield from reached(each, path[1:])
    if not chosen:  # behind a wrapper, or not in the module
        for name in ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"):
            if name in inside:
                yield from reached(inside[name], path)


def multiplied_parameters(modules: Iterable[tuple[str, nn.Module]]) -> dict[int, str]:
    """id() of each parameter that a class multiplies by, in it or in a module below -> the class's name."""
    found: dict[int, str] = {}
    for _, module in modules:
        for path in uses_of(type(module), children=_children(module)).factors - {()}:
            for end in reached(module, path):
                for parameter in _held(end):
                    found.setdefault(id(parameter), type(module).__name__)
    return found


def _children(module: nn.Module) -> frozenset[tuple[str, type[nn.Module]]]:
    """The submodules to which a module that has parameters may pass them: (name, class)."""
    held = vars(module)
    inside = held["_modules"].items() if any(p is not None for p in held["_parameters"].values()) else ()
    return frozenset((name, type(each)) for name, each in inside if each is not None)


def _held(end: Any) -> Iterable[nn.Parameter]:
    """A parameter, or those of a list, a dict or a parametrization."""
    if isinstance(end, nn.Parameter):
        return (end,)
    several = isinstance(end, nn.ParameterList | nn.ParameterDict | ParametrizationList)
    return end.parameters(recurse=False) if several else ()


def _uses(source: Source, bound: Mapping[str, Paths], classes: _Classes, depth: int) -> Uses:
    """The uses in a function whose variables `bound` stand for objects below self."""
    scope = Scope(source.syntax, bound)
    nodes = [*ast.walk(source.syntax)]
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    multiplied = NOTHING.union(*(scope.derived(factor) for node in nodes for factor in factors(node)))
    found, followed = Uses(NOTHING, NOTHING, multiplied), set[ast.AST]()
    for node in nodes:
        if isinstance(node, ast.Call) and depth < _DEEPEST:
            inner, passed = _passed_on(node, source, scope, classes)
            if inner is not None and passed:
                followed |= {*node.args, *(keyword.value for keyword in node.keywords)}
                found = found.joined(_uses(inner, passed, classes, depth + 1))
    read, used = set[Path](), set[Path]()
    for node, parent in parents.items():
        if () in scope.paths(node) and node not in followed and _is_passed(node, parent):
            used.add(())  # to code that may call anything below, such as diffusers' attention processors
        paths = scope.paths(node) - {()}
        if not paths or node in followed or _continues(node, parent, scope) or _is_only_named(node, parents):
            continue
        for path in paths:
            if "weight" in path[1:]:
                read.add(path[: path.index("weight", 1)])
            elif path[-1] not in _PLAIN:
                used.add(path)
    return found.joined(Uses(frozenset(read), frozenset(used)))


def _continues(node: ast.AST, parent: ast.AST, scope: Scope) -> bool:
    """Whether the parent refers to the same object or to one inside it, and is examined instead."""
    if isinstance(parent, ast.Attribute | ast.Subscript):
        return True
    return isinstance(parent, ast.Call | ast.IfExp | ast.BoolOp) and bool(scope.paths(parent))


def _is_only_named(node: Any, parents: Mapping[ast.AST, ast.AST]) -> bool:
    """Whether an expression is assigned to a variable, iterated, inspected or replaced, not computed with."""
    parent = parents.get(node)
    if not isinstance(getattr(node, "ctx", None), ast.Load | None):
        return True
    if isinstance(parent, ast.Call):
        if node is parent.func:
            iterated = isinstance(parents.get(parent), ast.For | ast.comprehension)
            return iterated and getattr(node, "attr", "") in ("items", "named_children")
        return getattr(parent.func, "id", "") in _INSPECTS or _initializes(parent.func)
    if isinstance(parent, ast.Assign):
        return all(isinstance(target, ast.Name | ast.Tuple) for target in parent.targets)
    if isinstance(parent, ast.For | ast.comprehension):
        return node is parent.iter
    if isinstance(parent, ast.Tuple | ast.List):  # a, b = self.a, self.b; for m in (self.a, self.b)
        return _is_only_named(parent, parents)
    return isinstance(parent, ast.AnnAssign | ast.NamedExpr | ast.Compare | ast.If | ast.Expr)


def _is_passed(node: ast.AST, parent: ast.AST) -> bool:
    """Whether an expression is an argument of a function that may compute with it."""
    if isinstance(parent, ast.Call):
        return node is not parent.func and getattr(parent.func, "id", "") not in {"super", *_INSPECTS}
    return isinstance(parent, ast.keyword)


def _initializes(function: ast.AST) -> bool:
    """Whether a function is one of torch.nn.init."""
    return isinstance(function, ast.Attribute) and ast.unparse(function.value).split(".")[-1] == "init"


def _passed_on(
    call: ast.Call, source: Source, scope: Scope, classes: _Classes
) -> tuple[Source | None, dict[str, Paths]]:
    """The function that a call runs, if its source is known, and what is below self among its arguments."""
    given = [(scope.paths(arg) or scope.derived(arg)) for arg in call.args]
    named = {k.arg: scope.paths(k.value) or scope.derived(k.value) for k in call.keywords if k.arg}
    if not any((*given, *named.values())):
        return None, {}
    inner, bound = _callee(call.func, source, scope, classes)
    if inner is None:
        return None, {}
    arguments = inner.syntax.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)][len(bound) :]
    passed = {**bound, **dict(zip(names, given, strict=False)), **named}
    fits = len(given) <= len(names) and not any(isinstance(arg, ast.Starred) for arg in call.args)
    return (inner, {name: paths for name, paths in passed.items() if paths}) if fits else (None, {})


def _callee(
    function: ast.AST, source: Source, scope: Scope, classes: _Classes
) -> tuple[Source | None, dict[str, Paths]]:
    """The function behind a call, and its first arguments that the call does not name."""
    if isinstance(function, ast.Name):
        for node in ast.walk(source.syntax):
            if isinstance(node, ast.FunctionDef) and node.name == function.id and node is not source.syntax:
                return Source(node, source.names), {}
        return source_of(source.names.get(function.id)), {}
    if not isinstance(function, ast.Attribute):
        return None, {}
    for path in sorted(scope.paths(function.value)):
        cls, child = classes.get(path), (*path, function.attr)
        if child in classes:
            return _method_of(classes[child], "forward", child)
        if cls is not None and hasattr(cls, function.attr):
            return _method_of(cls, function.attr, path)
    named: Any = source.names.get(getattr(function.value, "id", ""))
    if function.attr == "apply":  # of an autograd function
        inner = source_of(getattr(named, "forward", None))
        return inner, dict.fromkeys(["ctx"] if inner and inner.syntax.args.args else [], NOTHING)
    return source_of(getattr(named, function.attr, None) if named is not None else None), {}


def _method_of(cls: type[nn.Module], name: str, path: Path) -> tuple[Source | None, dict[str, Paths]]:
    """The method of the module at a path, and its first argument, which stands for that module."""
    inner = source_of(getattr(cls, name, None))
    if inner is None or isinstance(vars(cls).get(name), staticmethod) or not inner.syntax.args.args:
        return inner, {}
    return inner, {inner.syntax.args.args[0].arg: frozenset({path})}
