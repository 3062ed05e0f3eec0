"""What the source of a module's class multiplies by: its own parameters, and tables of embeddings in it."""

import ast
import functools
from collections.abc import Iterator

from torch import nn

from fourbits.linear.source import computing_nodes

#: functions and methods that multiply matrices
_PRODUCTS = frozenset(
    ("linear", "matmul", "mm", "mv", "bmm", "addmm", "addbmm", "baddbmm", "einsum", "tensordot", "bilinear")
    + ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
)
#: attributes of a tensor that are no matrix
FACTS = frozenset(
    ("dtype", "device", "shape", "size", "ndim", "dim", "numel", "requires_grad", "is_meta", "grad")
)


@functools.cache
def multiplied_paths(cls: type[nn.Module]) -> frozenset[str]:
    """Names such as `proj` and `wte.weight` after `self.` that the class's methods use as a factor of a
    product, directly or through a local variable.
    """
    found, names = set[str](), set[str]()
    known: dict[str, set[str]] = {}
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins", "fourbits"):
            continue
        for node in computing_nodes(base):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        known.setdefault(target.id, set()).update(_paths(node.value))
            for factor in _factors(node):
                found |= _paths(factor)
                names |= {inner.id for inner in ast.walk(factor) if isinstance(inner, ast.Name)}
    return frozenset(found.union(*(known.get(name, ()) for name in names)))


def path_of(node: ast.AST) -> str | None:
    """NAME.OTHER of `self.NAME.OTHER`."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed(parts)) if parts and isinstance(node, ast.Name) and node.id == "self" else None


def _factors(node: ast.AST) -> Iterator[ast.AST]:
    """The factors of the product that a node is, if it is one."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        yield from (node.left, node.right)
    elif isinstance(node, ast.Call):
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name in _PRODUCTS:
            yield from node.args
            yield from (keyword.value for keyword in node.keywords if keyword.arg != "bias")
            if isinstance(function, ast.Attribute):  # x.matmul(w)
                yield function.value


def _paths(node: ast.AST) -> set[str]:
    """The longest paths after `self.` in an expression, without what is read of a tensor's facts or called
    on it: `self.w.t()` is `w`.
    """
    inner = {child.value for child in ast.walk(node) if isinstance(child, ast.Attribute)}
    whole = [
        (child, path)
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute) and child not in inner and (path := path_of(child)) is not None
    ]
    return {shorter for child, path in whole if child.attr not in FACTS for shorter in _shorter(path)}


def _shorter(path: str) -> Iterator[str]:
    """A path and what it begins with, of which one is the parameter."""
    parts = path.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))
