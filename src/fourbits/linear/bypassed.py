"""Linear layers whose weight other code reads without calling them, so that converting them has no effect.

PyTorch's and mamba_ssm's fused kernels are known by name. Other code is analysed: if a class reads a layer's
weight, through variables, loops and functions, and does nothing else with the layer, it multiplies by that
weight itself, unless the module's attributes rule the code out. The audit after the first training step finds
the rest.
"""

import ast
import functools
import importlib.util
from collections.abc import Iterator, Sequence

from torch import nn

from fourbits.linear.branches import decided
from fourbits.linear.handles import Path
from fourbits.linear.source import computing_nodes
from fourbits.linear.uses import Uses, reached, uses_of
from fourbits.linear.weights import is_linear

#: packages whose mixers call mamba_ssm's kernels; the second holds remote code loaded with a checkpoint
_MAMBA_PACKAGES = ("transformers", "transformers_modules", "mamba_ssm")
#: layer that diffusers' fuse_qkv_projections creates -> the layers whose weights it copies, which remain
_FUSED = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_kv": ("to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "to_added_kv": ("add_k_proj", "add_v_proj"),
}


def bypassed_layers(modules: Sequence[tuple[str, nn.Module]]) -> dict[str, str]:
    """Linear layers whose weight is read without calling the module: name -> reason."""
    kernels = importlib.util.find_spec("mamba_ssm") is not None
    kernels = kernels or any(getattr(module, "use_kernels", False) is True for _, module in modules)
    names = {id(module): name for name, module in modules}
    found: dict[str, str] = {}
    for name, module in modules:
        kind = type(module).__name__
        for layer in _only_read(module):
            if id(layer) in names:
                found[names[id(layer)]] = f"{kind} reads this weight and never calls the layer"
        for child in _read_by_kernels(module, kernels):
            found[f"{name}.{child}".lstrip(".")] = f"a fused kernel of {kind} reads this weight directly"
        for child, other in _replaced(module).items():
            found[f"{name}.{child}".lstrip(".")] = f"{kind} calls {other} instead"
    return found


def _only_read(module: nn.Module) -> list[nn.Module]:
    """Linear layers below a module whose weight the module's class reads without any other use."""
    if not _layers_read(module, uses_of(type(module))):
        return []
    uses = uses_of(type(module), decided(module))
    layers = _layers_read(module, uses)
    used = {id(inner) for path in uses.used for each in _called(module, path) for inner in each.modules()}
    return [layer for layer in layers if id(layer) not in used]


def _layers_read(module: nn.Module, uses: Uses) -> list[nn.Module]:
    return [each for path in uses.read for each in reached(module, path) if is_linear(each)]


def _called(module: nn.Module, path: Path) -> Iterator[nn.Module]:
    """The modules that code which uses a path may call: those at its end, or the owner of its last name."""
    ends = [each for each in reached(module, path) if isinstance(each, nn.Module)]
    if not ends and len(path) > 1:  # self.layer.forward
        ends = [each for each in reached(module, path[:-1]) if isinstance(each, nn.Module)]
    yield from ends


def _read_by_kernels(module: nn.Module, mamba_kernels: bool) -> Sequence[str]:
    """Names of the children whose weights a module's fused kernels read without calling their forward."""
    if isinstance(module, nn.MultiheadAttention):
        return ("out_proj",)
    package = type(module).__module__.partition(".")[0]
    if package not in _MAMBA_PACKAGES or not hasattr(module, "conv1d"):
        return ()
    # A Mamba-1 mixer always reads dt_proj's weight directly; the one in mamba_ssm also reads in_proj's.
    if package == "mamba_ssm":
        return ("x_proj", "dt_proj", "out_proj") + (("in_proj",) if hasattr(module, "x_proj") else ())
    return ("x_proj", "dt_proj", "out_proj") if mamba_kernels else ("dt_proj",)


def _replaced(module: nn.Module) -> dict[str, str]:
    """The children that a module of diffusers keeps but does not call: name -> what it calls instead.

    After it fuses its projections, these are the parts; after its old processor is restored, the fused
    layers.
    """
    children = vars(module)["_modules"]
    if getattr(module, "fused_projections", False) is not True:
        return {}
    fused = {name: parts for name, parts in _FUSED.items() if name in children}
    if _calls_fused_layers(type(getattr(module, "processor", None))):
        return {part: name for name, parts in fused.items() for part in parts if part in children}
    return {name: ", ".join(parts) for name, parts in fused.items()}


@functools.cache
def _calls_fused_layers(processor: type) -> bool:
    """Whether an attention processor calls layers of fused projections, or asks whether there are any."""
    names = {*_FUSED, "fused_projections"}
    nodes = computing_nodes(processor, with_functions=True)
    return any(isinstance(node, ast.Attribute) and node.attr in names for node in nodes)
