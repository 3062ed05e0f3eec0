"""Parameters [E, N, K] or [E, K, N] that hold the weights of E linear layers: the experts of a mixture.

Modules of transformers' experts interface declare what they compute. The source of others is read: such
parameters are those that a batched or grouped GEMM multiplies by, and those that methods read and multiply by
in a module named after experts. The audit reports whether they did.
"""

import ast
import functools
import re
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fourbits.linear.source import computing_nodes, own_attribute

#: names of classes and modules that hold experts
_EXPERTS = re.compile(r"expert|moe(?![a-z])|grouped", re.IGNORECASE)
_GROUPED = ("_grouped_mm", "grouped_mm")
_PRODUCTS = (*_GROUPED, "bmm", "matmul", "mm", "linear", "einsum")


def stacked_parameters(name: str, module: nn.Module) -> dict[str, bool]:
    """Parameters of a module that hold stacked weights -> whether they are [E, in, out], not [E, out, in].

    For a module whose products are found as they run, the order is not known yet: False.
    """
    if has_experts_interface(module):
        layer: Any = module
        names = ("gate_up_proj" if layer.has_gate else "up_proj", "down_proj")
        return dict.fromkeys(names, layer.is_transposed)
    found = [key for key, parameter in module.named_parameters(recurse=False) if _is_stack(parameter)]
    if not found or type(module).__module__.partition(".")[0] == "torch":
        return {}
    read, products, factors, elsewhere = _reads_and_products(type(module))
    named_after_experts = bool(_EXPERTS.search(type(module).__name__) or _EXPERTS.search(name))

    def is_factor(key: str) -> bool:
        named = named_after_experts or bool(products & set(_GROUPED)) or bool(_EXPERTS.search(key))
        return key in factors or (key in read - elsewhere and bool(products) and named)

    return {key: False for key in found if is_factor(key)}


def has_experts_interface(module: nn.Module) -> bool:
    """Whether a module follows transformers' experts interface (`use_experts_implementation`)."""
    own, parameters = vars(module), vars(module).get("_parameters", {})
    flags = [own.get(name) for name in ("has_gate", "has_bias", "is_transposed")]
    if not all(isinstance(flag, bool) for flag in flags):
        return False
    names = ("gate_up_proj" if own["has_gate"] else "up_proj", "down_proj")
    computes = hasattr(module, "_apply_gate") if own["has_gate"] else hasattr(module, "act_fn")
    return computes and all(_is_stack(parameters.get(name)) for name in names)


def _is_stack(parameter: torch.Tensor | None) -> bool:
    return (
        parameter is not None
        and not is_lazy(parameter)
        and parameter.dim() == 3
        and min(parameter.shape[1:]) > 1
        and parameter.is_floating_point()
    )


@functools.cache
def _reads_and_products(cls: type[nn.Module]) -> tuple[frozenset[str], ...]:
    """Attributes that a class's methods read; products that they or functions beside them call; attributes
    that are the second factor of a product of stacks; attributes in einsums that are no such product.
    """
    read, called, factors, elsewhere = set[str](), set[str](), set[str](), set[str]()
    for base in cls.__mro__:
        if base.__module__.startswith(("torch.", "builtins", "fourbits.linear.")):
            continue
        for node in computing_nodes(base, with_functions=True):
            read.add(own_attribute(node) or "")
            if isinstance(node, ast.Attribute | ast.Name):
                called.add(_last_name(node))
            elif isinstance(node, ast.MatMult):
                called.add("matmul")
            elif isinstance(node, ast.Call) and _multiplies_stacks(node):
                factors |= {own_attribute(inner) or "" for inner in ast.walk(node.args[-1])}
            elif isinstance(node, ast.Call) and _is_plain_einsum(node):
                elsewhere |= {own_attribute(inner) or "" for inner in ast.walk(node)}
    products = frozenset(called & set(_PRODUCTS))
    return frozenset(read), products, frozenset(factors), frozenset(elsewhere)


def _multiplies_stacks(call: ast.Call) -> bool:
    """Whether a call multiplies stacks of matrices, of which the second is its last argument."""
    name = _last_name(call.func)
    if name == "einsum" and len(call.args) == 3 and isinstance(call.args[0], ast.Constant):
        return order_of_einsum(call.args[0].value) is not None
    return name in (*_GROUPED, "bmm") and len(call.args) == 2


def _is_plain_einsum(call: ast.Call) -> bool:
    """Whether a call is an einsum with a constant equation."""
    return _last_name(call.func) == "einsum" and bool(call.args) and isinstance(call.args[0], ast.Constant)


def order_of_einsum(equation: object) -> bool | None:
    """Whether `ecd,edh->ech`, in any letters, has its second factor as [E, in, out]; None if it is no such
    product.
    """
    if not isinstance(equation, str):
        return None
    inputs, _, output = equation.replace(" ", "").partition("->")
    of_x, _, of_weight = inputs.partition(",")
    if len(of_x) != 3 or len(of_weight) != 3 or of_x[0] != of_weight[0]:
        return None
    experts, rows, inner = of_x
    inner_first = of_weight[1] == inner
    outer = of_weight[2] if inner_first else of_weight[1]
    whole = len({experts, rows, inner, outer}) == 4 and inner in of_weight[1:]
    return inner_first if whole and output == experts + rows + outer else None


def _last_name(node: ast.AST) -> str:
    """NAME of `NAME` and of `anything.NAME`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
