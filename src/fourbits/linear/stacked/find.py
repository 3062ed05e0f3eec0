"""Parameters [E, N, K] or [E, K, N] that hold the weights of E linear layers: the experts of a mixture.

Two kinds of modules are known. Those of transformers' experts interface say what they compute. Of others the
source is read: a module about experts whose methods multiply, or any whose methods call a grouped GEMM.
"""

import ast
import functools
import re
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fourbits.linear.source import computing_nodes, own_attribute

#: what names of classes and modules say of experts
_EXPERTS = re.compile(r"expert|moe(?![a-z])|grouped", re.IGNORECASE)
_GROUPED = ("_grouped_mm", "grouped_mm")
_PRODUCTS = (*_GROUPED, "bmm", "matmul", "mm", "linear", "einsum")


def stacked_parameters(name: str, module: nn.Module) -> dict[str, bool]:
    """Parameters of a module that hold stacked weights -> whether they are [E, in, out], not [E, out, in].

    For a module whose products are found as they run, the order is not known before: False.
    """
    if has_experts_interface(module):
        layer: Any = module
        names = ("gate_up_proj" if layer.has_gate else "up_proj", "down_proj")
        return dict.fromkeys(names, layer.is_transposed)
    found = [key for key, parameter in module.named_parameters(recurse=False) if _is_stack(parameter)]
    if not found or type(module).__module__.partition(".")[0] == "torch":
        return {}
    read, products = _reads_and_products(type(module))
    about_experts = bool(_EXPERTS.search(type(module).__name__) or _EXPERTS.search(name))
    if not products or not (about_experts or products & set(_GROUPED)):
        return {}
    return {key: False for key in found if key in read}


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
def _reads_and_products(cls: type[nn.Module]) -> tuple[frozenset[str], frozenset[str]]:
    """Attributes that the class's methods read, and products that they or functions beside them call."""
    read, called = set[str](), set[str]()
    for base in cls.__mro__:
        if base.__module__.startswith(("torch.", "builtins", "fourbits.linear.")):
            continue
        for node in computing_nodes(base, with_functions=True):
            read.add(own_attribute(node) or "")
            if isinstance(node, ast.Attribute | ast.Name):
                called.add(node.attr if isinstance(node, ast.Attribute) else node.id)
            elif isinstance(node, ast.MatMult):
                called.add("matmul")
    return frozenset(read), frozenset(called & set(_PRODUCTS))
