"""Every parameter of a model that a matrix multiplication reads, whether or not it can be quantized.

Linear layers are known by their class. Other parameters are listed, with the reason for which they stay in
high precision, if the source of their module multiplies by them, or if their shape and name are those of a
matrix: embedding tables, norms, depthwise convolutions and what is added or looked up are none.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter, is_lazy

from fourbits.linear.products import multiplied_paths
from fourbits.linear.stacked.find import stacked_parameters

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
    #: for others: why it is not quantized
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
    def layers(self) -> int:
        """How many linear layers it holds, each with a number of its own."""
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


def multiplied_weights(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[Weight]:
    """What matrix multiplications read, in the order of the modules."""
    tables = set[int]()
    for name, module in modules:
        layer: Any = module
        if is_group(module):
            rows = len(layer.weight) * layer.out_features
            yield Weight(name, layer, "group", (rows, layer.in_features))
        elif isinstance(module, nn.Linear):
            yield Weight(name, layer, "linear", (layer.out_features, layer.in_features))
            yield from _others(name, module, ("weight", "bias"))
        elif is_transposed(module):
            yield Weight(name, layer, "transposed", (layer.weight.shape[1], layer.weight.shape[0]))
        else:
            stacked = stacked_parameters(name, module)
            yield from _stacked(name, module, stacked)
            yield from _others(name, module, stacked)
            yield from _tables(name, module, tables)


def _stacked(name: str, module: nn.Module, found: Mapping[str, bool]) -> Iterator[Weight]:
    """Parameters that hold the weights of several linear layers."""
    for own, transposed in found.items():
        count, *sides = getattr(module, own).shape
        rows, columns = reversed(sides) if transposed else sides
        where = f"{name}.{own}".lstrip(".")
        yield Weight(where, module, "stacked", (count * rows, columns), "", own, transposed)


def _others(name: str, module: nn.Module, known: Collection[str] = ()) -> Iterator[Weight]:
    """Parameters of a module without the known ones."""
    if "parametrizations" in name.split("."):
        return
    multiplied = multiplied_paths(type(module))
    if isinstance(module, _LOOKED_UP + _NORMS):
        table = isinstance(module, nn.Embedding) and "weight" in multiplied
        known = (*known, "bias") if table else (*known, "weight", "bias")
    if isinstance(module, _CONVOLUTIONS + _TRANSPOSED):
        weight: Any = module.weight
        depthwise = module.groups > 1 and module.groups == module.in_channels
        if not depthwise and not is_lazy(weight):
            shape = (weight.shape[0], weight[0].numel())
            yield Weight(f"{name}.weight".lstrip("."), module, "other", shape, "convolution")
        known = (*known, "weight", "bias")
    for own, parameter in module.named_parameters(recurse=False):
        if own in known or isinstance(parameter, UninitializedParameter):
            continue
        shape = [size for size in parameter.shape if size != 1]
        taps = parameter.dim() > 2 and parameter.shape[-1] < SMALLEST_SIDE
        looks_like_one = not taps and not _NOT_MULTIPLIED.search(own)
        depthwise = parameter.dim() > 2 and parameter.shape[1] == 1
        if len(shape) > 1 and ((own in multiplied and not depthwise) or looks_like_one):
            rows = torch.Size(shape[:-1]).numel()
            where, why = f"{name}.{own}".lstrip("."), _why(module, own, 2 if taps else len(shape))
            yield Weight(where, module, "other", (rows, shape[-1]), why)


def _tables(name: str, module: nn.Module, seen: set[int]) -> Iterator[Weight]:
    """Tables of embeddings that the module's source also multiplies by, as output heads do; each once."""
    for path in sorted(multiplied_paths(type(module))):
        owner, _, own = path.rpartition(".")
        table: Any = _submodule(module, owner) if own == "weight" and owner else None
        if isinstance(table, nn.Embedding) and id(table) not in seen:
            seen.add(id(table))
            why = f"embedding that {type(module).__name__} also multiplies by"
            shape = (table.num_embeddings, table.embedding_dim)
            yield Weight(f"{name}.{path}".lstrip("."), table, "other", shape, why)


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, nn.Module) else None


def _why(module: nn.Module, own: str, dims: int) -> str:
    kind = type(module).__name__
    if isinstance(module, nn.Embedding) and own == "weight":
        return f"embedding that {kind} also multiplies by"
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
