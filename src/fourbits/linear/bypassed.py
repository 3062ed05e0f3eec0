"""Linear layers whose weight other code reads without calling them, so that converting them has no effect.

PyTorch's and mamba_ssm's fused kernels are known by name; other code is read: a class that mentions
`self.child.weight` and the child for nothing else multiplies by that weight itself. What neither shows, the
audit after the first training step does.
"""

import ast
import functools
import importlib.util
from collections.abc import Sequence

from torch import nn

from fourbits.linear.products import FACTS
from fourbits.linear.source import computing_nodes, own_attribute
from fourbits.linear.weights import is_linear

#: packages whose mixers call mamba_ssm's kernels; the second holds remote code loaded with a checkpoint
_HOMES_OF_MAMBA = ("transformers", "transformers_modules", "mamba_ssm")


def bypassed_layers(modules: Sequence[tuple[str, nn.Module]]) -> dict[str, str]:
    """Linear layers whose weight is read without calling the module: name -> reason."""
    kernels = importlib.util.find_spec("mamba_ssm") is not None
    kernels = kernels or any(getattr(module, "use_kernels", False) is True for _, module in modules)
    found: dict[str, str] = {}
    for name, module in modules:
        kind = type(module).__name__
        for child in _read_in_source(type(module)):
            if is_linear(getattr(module, child, None)):
                found[f"{name}.{child}".lstrip(".")] = f"{kind} reads this weight and never calls the layer"
        for child in _read_by_kernels(module, kernels):
            found[f"{name}.{child}".lstrip(".")] = f"a fused kernel of {kind} reads this weight directly"
    return found


def _read_by_kernels(module: nn.Module, mamba_kernels: bool) -> Sequence[str]:
    """Names of the children whose weights a module's fused kernels read without calling their forward."""
    if isinstance(module, nn.MultiheadAttention):
        return ("out_proj",)
    if isinstance(module, nn.TransformerEncoderLayer):
        return ("linear1", "linear2")
    home = type(module).__module__.partition(".")[0]
    if home not in _HOMES_OF_MAMBA or not hasattr(module, "conv1d"):
        return ()
    # A Mamba-1 mixer always reads dt_proj's weight directly; the one in mamba_ssm also reads in_proj's.
    if home == "mamba_ssm":
        return ("x_proj", "dt_proj", "out_proj") + (("in_proj",) if hasattr(module, "x_proj") else ())
    return ("x_proj", "dt_proj", "out_proj") if mamba_kernels else ("dt_proj",)


@functools.cache
def _read_in_source(cls: type[nn.Module]) -> frozenset[str]:
    """Children whose weight the class's methods read, and which they mention for nothing else."""
    read, used = set[str](), set[str]()
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins", "fourbits"):
            continue
        parents = {child: node for node in computing_nodes(base) for child in ast.iter_child_nodes(node)}
        for node, parent in parents.items():
            child = own_attribute(node)
            if child is None:
                continue
            about = parent.attr if isinstance(parent, ast.Attribute) else ""
            if about not in ("weight", "bias"):
                used.add(child)
            elif about == "weight" and not _is_fact(parents.get(parent)):
                read.add(child)
    return frozenset(read - used)


def _is_fact(node: ast.AST | None) -> bool:
    """Whether a node reads something of a tensor that is no matrix, as .dtype."""
    return isinstance(node, ast.Attribute) and node.attr in FACTS
