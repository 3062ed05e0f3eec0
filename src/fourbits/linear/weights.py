"""Every parameter of a model that a matrix multiplication reads, whether or not it can be quantized.

Linear layers are known by their class. Other parameters are listed, with the reason for which they stay in
high precision, if the source of a class multiplies by them, or if their shape and name are those of a
matrix. All that is left is in `other_parameters`: embedding tables, norms, depthwise convolutions, and what
seems to be added or looked up. So a parameter of two or more dimensions is in one of the two in any case.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fourbits.linear.stacked.find import stacked_parameters
from fourbits.linear.uses import multiplied_parameters

Kind = Literal["linear", "transposed", "group", "stacked", "other"]
#: smallest last side of a raw parameter of three dimensions that is listed; taps of convolutions are smaller
SMALLEST_SIDE = 8
#: names of parameters that are looked up, added or multiplied elementwise, unless the source says otherwise
_NOT_MULTIPLIED = re.compile(
    r"(?:^|_|(?<=[a-z])(?=[A-Z]))(?:(?<!seg_)embed|token|pos(?:_|$|ition|embed)|bias|table$|quer(?:y|ies)$|latent"
    r"|codebook|mask|scale|decay|A_log)"
)
_LOOKED_UP = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A linear layer, a group of them, or another parameter that a matrix multiplication reads."""

    #: the module's name for layers, the parameter's for stacked weights and others
    name: str
    module: Any
    kind: Kind
    #: (out_features, in_features), with out_features summed over the layers of a group
    shape: tuple[int, int]
    #: for others: why it is not quantized; for linear layers: what else multiplies by the weight
    why: str = ""
    #: the name of the weight in its module
    parameter: str = "weight"
    #: for stacked weights: whether they are known to be [E, in, out]
    transposed: bool = False

    @property
    def weight(self) -> Any:
        """The parameter, for all but others."""
        return getattr(self.module, self.parameter)

    @property
    def covered(self) -> list[nn.Parameter]:
        """The parameters that its row covers."""
        held = self.module._parameters
        own = [held.get(self.parameter), *([] if self.kind in ("other", "stacked") else [held.get("bias")])]
        parametrized = self.module._modules.get("parametrizations")
        if parametrized is not None and self.parameter in parametrized:
            own += parametrized[self.parameter].parameters()
        if self.kind == "linear" and self.parameter in vars(self.module):  # by a hook: prune, old weight_norm
            own += [each for key, each in held.items() if key.startswith(f"{self.parameter}_")]
        return [parameter for parameter in own if parameter is not None]

    @property
    def layers(self) -> int:
        """The number of linear layers that it holds; each has its own number."""
        return 0 if self.kind == "other" else len(self.weight) if self.holds_several else 1

    @property
    def holds_several(self) -> bool:
        """Whether the weight is that of several linear layers, [E, ...]."""
        return self.kind in ("group", "stacked")

    @property
    def size_of_one(self) -> tuple[int, int]:
        """(out_features, in_features) of one layer."""
        return self.shape[0] // max(self.layers, 1), self.shape[1]


def is_group(module: object) -> bool:
    """Whether a module is a group: its class sets `groups_linears`, as model.experts.GroupedLinear does."""
    return getattr(type(module), "groups_linears", False) is True


def is_transposed(module: object) -> bool:
    """Whether a module is a linear layer with the weight [in, out]: Conv1D of transformers."""
    names = {(cls.__module__.partition(".")[0], cls.__name__) for cls in type(module).__mro__}
    return ("transformers", "Conv1D") in names


def is_linear(module: object) -> bool:
    """Whether a module is a linear layer or a group of them."""
    return isinstance(module, nn.Linear) or is_group(module) or is_transposed(module)


def named_modules(parts: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """The modules of a model, or of the parts of one, whose names then start with the part's index."""
    if len(parts) == 1:
        return list(parts[0].named_modules())
    seen: set[nn.Module] = set()
    return [
        (f"{index}.{name}" if name else str(index), module)
        for index, part in enumerate(parts)
        for name, module in part.named_modules(seen)
    ]


def multiplied_weights(modules: Sequence[tuple[str, nn.Module]]) -> list[Weight]:
    """The weights of matrix multiplications, in the order of the modules; each other parameter once."""
    multiplied, seen = multiplied_parameters(modules), set[int]()
    layers = {
        name: [_with_readers(each, multiplied) for each in _layers(name, module)] for name, module in modules
    }
    for weight in (weight for found in layers.values() for weight in found):
        seen |= {id(parameter) for parameter in weight.covered}
    weights: list[Weight] = []
    for name, module in modules:
        weights += layers[name]
        for weight in _others(name, module, multiplied):
            ids = {id(parameter) for parameter in weight.covered}
            if not ids or not ids <= seen:
                seen |= ids
                weights.append(weight)
    return weights


def _with_readers(layer: Weight, multiplied: Mapping[int, str]) -> Weight:
    """The layer, with the class that also multiplies by its weight, such as a tied decoder."""
    by = multiplied.get(id(vars(layer.module)["_parameters"].get("weight")), "")
    if layer.kind not in ("linear", "transposed") or not by:
        return layer
    return replace(layer, why=f"{by} also multiplies by this weight, in high precision")


def linear_layers(modules: Sequence[tuple[str, nn.Module]]) -> list[Weight]:
    """Weights that can be quantized, in the order of the modules: linear layers, groups, stacked ones."""
    return [weight for name, module in modules for weight in _layers(name, module)]


def widths(module: nn.Module) -> tuple[tuple[int, int], ...]:
    """The shapes of the linear layers in a module, in their order."""
    return tuple(weight.shape for weight in linear_layers([*module.named_modules()]))


def other_parameters(
    modules: Sequence[tuple[str, nn.Module]], weights: Sequence[Weight]
) -> list[tuple[str, nn.Parameter, str]]:
    """Parameters of two or more dimensions that are in no weight: (name, parameter, what it seems to be)."""
    seen = {id(parameter) for weight in weights for parameter in weight.covered}
    found: list[tuple[str, nn.Parameter, str]] = []
    for name, module in modules:
        for own, parameter in module.named_parameters(recurse=False):
            if _is_matrix(parameter) and id(parameter) not in seen:
                seen.add(id(parameter))
                found.append((_label(name, own)[0], parameter, _what(module, own)))
    return found


def _layers(name: str, module: nn.Module) -> Iterator[Weight]:
    layer: Any = module
    if is_group(module):
        yield Weight(name, layer, "group", (len(layer.weight) * layer.out_features, layer.in_features))
    elif isinstance(module, nn.Linear):
        yield Weight(name, layer, "linear", (layer.out_features, layer.in_features))
    elif is_transposed(module):
        yield Weight(name, layer, "transposed", (layer.weight.shape[1], layer.weight.shape[0]))
    else:
        yield from _stacked(name, module, stacked_parameters(name, module))


def _stacked(name: str, module: nn.Module, found: Mapping[str, bool]) -> Iterator[Weight]:
    """Parameters that hold the weights of several linear layers."""
    for own, transposed in found.items():
        count, *sides = getattr(module, own).shape
        rows, columns = reversed(sides) if transposed else sides
        where = f"{name}.{own}".lstrip(".")
        yield Weight(where, module, "stacked", (count * rows, columns), "", own, transposed)


def _others(name: str, module: nn.Module, multiplied: Mapping[int, str]) -> Iterator[Weight]:
    """Parameters of a module that products read, or seem to. multiplied: see `multiplied_parameters`."""
    if isinstance(module, _CONVOLUTIONS + _TRANSPOSED):
        weight: Any = module.weight
        if not _is_depthwise(module) and not is_lazy(weight):
            shape = (weight.shape[0], weight[0].numel())
            yield Weight(f"{name}.weight".lstrip("."), module, "other", shape, "convolution")
    for own, parameter in module.named_parameters(recurse=False):
        convolves = own == "weight" and isinstance(module, _CONVOLUTIONS + _TRANSPOSED)
        if convolves or is_lazy(parameter) or not parameter.is_floating_point() or parameter.dim() < 2:
            continue
        where, label = _label(name, own)
        sides = [size for size in parameter.shape if size != 1]
        taps = parameter.dim() > 2 and parameter.shape[-1] < SMALLEST_SIDE
        per_channel = parameter.dim() > 2 and parameter.shape[1] == 1  # a kernel for each channel
        by = "" if per_channel else multiplied.get(id(parameter), "")
        known = taps or (own == "weight" and isinstance(module, _LOOKED_UP + _NORMS))
        if by or (len(sides) > 1 and not known and not _NOT_MULTIPLIED.search(label)):
            shape = torch.Size(sides[:-1]).numel(), [1, *sides][-1]
            yield Weight(where, module, "other", shape, _why(module, own, 2 if taps else len(sides), by), own)


def _label(name: str, own: str) -> tuple[str, str]:
    """A parameter's name in the model, and in its module: for a parametrized one that of the result."""
    owner, parametrizations, label = f".{name}".rpartition(".parametrizations.")
    label = label if parametrizations else own
    return f"{owner if parametrizations else name}.{label}".strip("."), label


def _is_depthwise(module: Any) -> bool:
    return module.groups > 1 and module.groups == module.in_channels


def _is_matrix(parameter: torch.Tensor) -> bool:
    """Whether a parameter has two sides or more."""
    whole = not is_lazy(parameter) and parameter.is_floating_point()
    return whole and sum(size != 1 for size in parameter.shape) > 1


def _what(module: nn.Module, own: str) -> str:
    """The apparent kind of a parameter that no product is known to read."""
    if isinstance(module, _LOOKED_UP):
        return "embedding table"
    if isinstance(module, _NORMS):
        return "norm"
    if isinstance(module, _CONVOLUTIONS + _TRANSPOSED):
        return "depthwise convolution"
    return "bias" if "bias" in own else "no product by it was found in the source"


def _why(module: nn.Module, own: str, dims: int, by: str) -> str:
    """Why a parameter is not quantized. by: the class that multiplies by it, if its source shows one."""
    kind = type(module).__name__
    if isinstance(module, _LOOKED_UP) and own == "weight":
        return f"embedding that {by} also multiplies by"
    if isinstance(module, nn.ParameterList | nn.ParameterDict) and by:
        return f"parameter of {by}, which is not a linear layer"
    if isinstance(module, nn.Linear):
        return f"further parameter of {kind}"
    if isinstance(module, nn.MultiheadAttention):
        return f"a fused kernel of {kind} reads this weight directly"
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return f"recurrent weight of {kind}"
    if "Router" in kind or "Gate" in kind:
        return "router"
    if dims == 3 and type(module).__module__.partition(".")[0] != "torch":
        return f"stacked weights of {kind}, not a known group of linear layers"
    return f"parameter of {kind}, which is not a linear layer"
