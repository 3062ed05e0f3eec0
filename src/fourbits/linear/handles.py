"""The objects that a method's expressions refer to: modules and parameters below `self`, by paths.

A path is what follows `self.`, with `*` for what is not known: ("layers", "*", "weight"). Variables,
loops over containers, constant and computed indices, `getattr`, and views or casts of tensors are followed.
The order of statements is not: a variable stands for everything that is ever assigned to it.
"""

import ast
from collections.abc import Iterable, Mapping, Sequence

Path = tuple[str, ...]
Paths = frozenset[Path]

NOTHING: Paths = frozenset()
#: attributes of a tensor that are not matrices
TENSOR_PROPERTIES = frozenset(
    ("dtype", "device", "shape", "size", "ndim", "dim", "numel", "requires_grad", "is_meta", "grad")
)
#: methods of a tensor whose result is computed from it alone, or from it and what scales or masks it
_OF_TENSORS = frozenset(
    ("t", "to", "view", "reshape", "transpose", "permute", "contiguous", "expand")
    + ("expand_as", "repeat", "clone", "detach", "float", "half", "bfloat16", "type", "type_as")
    + ("cuda", "squeeze", "unsqueeze", "flatten", "unflatten", "unbind", "chunk", "split")
    + ("narrow", "select", "index_select", "mul", "add", "sub", "div", "masked_fill", "clamp")
    + ("sigmoid", "softmax", "tanh", "exp", "softplus", "relu", "sum", "mean", "view_as")
    + ("reshape_as", "swapaxes", "movedim")
)
#: functions that return the entries of their argument, or the argument itself
_SAME_ENTRIES = ("list", "tuple", "reversed", "iter", "sorted", "cast")
#: rounds of assignments, which resolve variables assigned from variables
_ROUNDS = 3
#: longest path, because one through a variable that is assigned from itself would grow without end
_LONGEST = 8


class Scope:
    """The variables of a function that refer to objects below `self`."""

    def __init__(self, function: ast.AST, bound: Mapping[str, Paths]) -> None:
        self.names = dict(bound)
        #: variables that hold a tensor computed from parameters alone
        self.tensors: dict[str, Paths] = {}
        self._constants: dict[str, tuple[str, ...]] = {}
        nodes = [*ast.walk(function)]
        for _ in range(_ROUNDS):
            for node in nodes:
                self._follow(node)

    def paths(self, node: ast.AST | None) -> Paths:
        """The paths of an expression: of a module, a parameter, or an attribute of one."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, NOTHING)
        if isinstance(node, ast.Attribute):
            return NOTHING if node.attr in TENSOR_PROPERTIES else _below(self.paths(node.value), (node.attr,))
        if isinstance(node, ast.Subscript):
            if isinstance(node.slice, ast.Slice):
                return self.paths(node.value)
            return _below(self.paths(node.value), self._keys(node.slice))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "getattr" and len(node.args) > 1:
                return _below(self.paths(node.args[0]), self._keys(node.args[1]))
            if node.func.id in _SAME_ENTRIES and node.args:
                return self.paths(node.args[-1])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
            return self.paths(node.func.value) if node.func.attr in ("values", "children") else NOTHING
        if isinstance(node, ast.IfExp):
            return self.paths(node.body) | self.paths(node.orelse)
        if isinstance(node, ast.BoolOp):
            return _union(self.paths(value) for value in node.values)
        return NOTHING

    def derived(self, node: ast.AST | None) -> Paths:
        """The parameters that a tensor expression is computed from alone: views, casts and sums of them."""
        if found := self.paths(node):
            return found
        if isinstance(node, ast.Name):
            return self.tensors.get(node.id, NOTHING)
        if isinstance(node, ast.Call):
            return self._derived_by_call(node)
        if isinstance(node, ast.Subscript | ast.Attribute | ast.Starred):
            return NOTHING if getattr(node, "attr", "") in TENSOR_PROPERTIES else self.derived(node.value)
        if isinstance(node, ast.UnaryOp):
            return self.derived(node.operand)
        if isinstance(node, ast.List | ast.Tuple):
            return self._all_derived(node.elts)
        if isinstance(node, ast.BinOp):
            return self._all_derived([side for side in (node.left, node.right) if not _is_number(side)])
        return NOTHING

    def _derived_by_call(self, call: ast.Call) -> Paths:
        """`derived` for a method of a tensor or a function of one; other calls compute from more than it."""
        if isinstance(call.func, ast.Attribute) and (owner := self.derived(call.func.value)):
            return owner if call.func.attr in _OF_TENSORS else NOTHING
        return self.derived(call.args[0]) if call.args and not self.paths(call.func) else NOTHING

    def _all_derived(self, nodes: Sequence[ast.AST]) -> Paths:
        found = [self.derived(node) for node in nodes]
        return _union(found) if all(found) else NOTHING

    def _follow(self, node: ast.AST) -> None:
        """Record the variables that a statement assigns."""
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            self._assign(node.target, node.value)
        elif isinstance(node, ast.For | ast.comprehension):
            self._iterate(node.target, node.iter)

    def _assign(self, target: ast.AST, value: ast.AST) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
                for inner, part in zip(target.elts, value.elts, strict=True):
                    self._assign(inner, part)
            else:  # a, b = self.weights, or self.w.chunk(2)
                for inner in target.elts:
                    self._bind(inner, _below(self.paths(value), ("*",)), self.derived(value))
        elif isinstance(target, ast.Name):
            self._bind(target, self.paths(value), self.derived(value))
            if texts := _texts(value):
                self._constants[target.id] = texts

    def _iterate(self, target: ast.AST, over: ast.AST) -> None:
        """Bind the target of a loop to the entries of what it runs over."""
        name, arguments = _called(over)
        parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        if name == "enumerate" and arguments and len(parts) == 2:
            self._iterate(parts[1], arguments[0])
        elif name == "zip" and len(parts) == len(arguments):
            for part, argument in zip(parts, arguments, strict=True):
                self._iterate(part, argument)
        elif name in ("items", "named_children") and len(parts) == 2 and isinstance(over, ast.Call):
            self._bind(parts[1], _below(self._owner(over), ("*",)))
        elif isinstance(over, ast.Tuple | ast.List):
            self._bind(target, _union(self.paths(entry) for entry in over.elts))
            if isinstance(target, ast.Name) and (texts := _texts(over)):
                self._constants[target.id] = texts
        elif isinstance(over, ast.Name) and isinstance(target, ast.Name) and over.id in self._constants:
            self._constants[target.id] = self._constants[over.id]
        else:
            self._bind(target, _below(self.paths(over), ("*",)))

    def _owner(self, call: ast.Call) -> Paths:
        return self.paths(call.func.value) if isinstance(call.func, ast.Attribute) else NOTHING

    def _bind(self, target: ast.AST, paths: Paths, tensors: Paths = NOTHING) -> None:
        if isinstance(target, ast.Name):
            for known, found in ((self.names, paths), (self.tensors, tensors)):
                if found:
                    known[target.id] = known.get(target.id, NOTHING) | found

    def _keys(self, index: ast.AST) -> tuple[str, ...]:
        """The possible values of an index or of an attribute name, as patterns."""
        if isinstance(index, ast.Constant) and isinstance(index.value, str | int):
            return (str(index.value),)
        if isinstance(index, ast.Name):
            return self._constants.get(index.id, ("*",))
        if isinstance(index, ast.JoinedStr):  # f"layer{i}"
            return ("".join(self._keys(part)[0] for part in index.values),)
        if isinstance(index, ast.BinOp) and isinstance(index.op, ast.Add):  # "layer" + str(i)
            return (self._keys(index.left)[0] + self._keys(index.right)[0],)
        return ("*",)


def _below(paths: Paths, keys: Iterable[str]) -> Paths:
    return frozenset((*path, key) for path in paths for key in keys if len(path) < _LONGEST)


def _union(paths: Iterable[Paths]) -> Paths:
    return NOTHING.union(*paths)


def _texts(node: ast.AST) -> tuple[str, ...]:
    """The constant texts that an expression is, or is a list of."""
    nodes = node.elts if isinstance(node, ast.Tuple | ast.List) else [node]
    values = [each.value for each in nodes if isinstance(each, ast.Constant)]
    texts = tuple(value for value in values if isinstance(value, str))
    return texts if len(texts) == len(nodes) else ()


def _called(node: ast.AST) -> tuple[str, list[ast.expr]]:
    """The name of a called function or method, and its arguments."""
    if not isinstance(node, ast.Call):
        return "", []
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", ""), node.args


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)
    )
