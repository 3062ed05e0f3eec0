"""Change the class of a layer, and change it back: the layer, its parameters and its hooks stay the same."""

import functools
from typing import Any

from torch import nn

from fourbits.linear.grouped import QuantizedGroup
from fourbits.linear.layer_state import LayerState
from fourbits.linear.lookalikes import rebind
from fourbits.linear.module import QuantizedLinear
from fourbits.linear.stacked.experts import QuantizedExperts
from fourbits.linear.stacked.find import has_experts_interface
from fourbits.linear.stacked.intercepted import QuantizedStack, viewed
from fourbits.linear.stacked.layer import StackedLayer, StackedLayers, stacked_layers
from fourbits.linear.transposed import QuantizedConv1D
from fourbits.linear.weights import Kind

_BASES: dict[Kind, type[nn.Module]] = {
    "linear": QuantizedLinear,
    "transposed": QuantizedConv1D,
    "group": QuantizedGroup,
}
_CONVERTED = (*_BASES.values(), QuantizedExperts, QuantizedStack)
_adoptions = [0]


def conversions() -> int:
    """How many layers this process has converted or restored; a cache filled at another count is stale."""
    return _adoptions[0]


def count_change() -> None:
    """Invalidate caches, as a conversion does."""
    _adoptions[0] += 1


def adopt(layer: Any, kind: Kind, state: LayerState) -> None:
    """Give a layer a table. Its original class stays one of its bases, for isinstance checks."""
    _adoptions[0] += 1
    original, base = type(layer), _BASES[kind]
    replaces = original is nn.Linear or getattr(original, "casts_weight", False)
    layer.__class__ = base if replaces else _joined(base, original)
    layer.quantization = state
    rebind(layer, original.forward, type(layer).forward)


def adopt_stacked(module: Any, parameter: str, transposed: bool, state: LayerState) -> None:
    """Give the stacked weights of one parameter of a module a table."""
    _adoptions[0] += 1
    stacked = stacked_layers(module)
    if stacked is None:
        original = type(module)
        base = QuantizedExperts if has_experts_interface(module) else QuantizedStack
        names = () if base is QuantizedExperts else tuple(module._parameters)
        module.__class__ = _joined(base, original, names)
        stacked = module.quantization = StackedLayers(original)
        rebind(module, original.forward, type(module).forward)
    state.original = stacked.original
    stacked.layers[parameter] = StackedLayer(module, parameter, state, transposed)


def restore(name: str, layer: Any) -> None:
    """Restore a converted layer's original class. Raises ValueError if it has been wrapped since."""
    converted: type[nn.Module] = type(layer)
    if not issubclass(converted, _CONVERTED):
        return
    if converted not in _BASES.values() and "_joins" not in vars(converted):
        raise ValueError(
            f"convert: {name!r} was wrapped after its conversion and is now {converted.__name__}, whose "
            "class cannot be changed. Apply fully_shard and similar wrappers to blocks, not to single layers."
        )
    _adoptions[0] += 1
    original = layer.quantization.original
    del layer.quantization
    layer.__class__ = original
    rebind(layer, converted.forward, original.forward)


@functools.cache
def _joined(base: type[nn.Module], original: type[nn.Module], views: tuple[str, ...] = ()) -> type[nn.Module]:
    """A class that computes as `base` and is also an `original`, for isinstance checks.

    views: parameters that the module's own forward reads as StackedView.
    """

    def reduced(self: Any, protocol: int) -> tuple[Any, ...]:
        return _new, (base, original, views), self.__getstate__()

    fields = {"_joins": original, "__reduce_ex__": reduced, "__module__": __name__}
    fields |= {name: viewed(name) for name in views}
    return type(f"{base.__name__}Of{original.__name__}", (base, original), fields)


def _new(base: type[nn.Module], original: type[nn.Module], views: tuple[str, ...] = ()) -> nn.Module:
    """An empty layer, for copy and pickle, which cannot import a class created at run time."""
    return nn.Module.__new__(_joined(base, original, views))
