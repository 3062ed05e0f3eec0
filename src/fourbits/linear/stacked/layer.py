"""The linear layers whose weights are one parameter of a module; each such parameter has its own state.

To code that walks over a model's converted layers, such as set_step and audit, a StackedLayer is a layer: it
has a state and a weight. It is not a module, so that a model's modules and state_dict keys stay as they were.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from fourbits.linear.layer_state import LayerState, converted_state


class StackedLayer:
    """E linear layers in one parameter [E, N, K], or [E, K, N] if transposed."""

    def __init__(self, module: nn.Module, parameter: str, state: LayerState, transposed: bool) -> None:
        self.module, self.parameter = module, parameter
        self.quantization = state
        self.transposed = transposed

    @property
    def weight(self) -> Tensor:
        """The parameter, which wrappers such as FSDP2 may replace."""
        return vars(self.module)["_parameters"][self.parameter]

    def experts_here(self) -> tuple[Tensor, int]:
        """The weights that this process multiplies by, and the place of the first of them among all experts.

        Raises ValueError for a DTensor that is sharded by anything but experts.
        """
        return local_experts(self.weight, self.parameter)

    def parameters(self) -> Iterator[Tensor]:
        """The parameter, as nn.Module.parameters has it."""
        yield self.weight


class StackedLayers:
    """The state of a converted module with stacked weights: its original class, its layers by parameter."""

    def __init__(self, original: type[nn.Module]) -> None:
        self.original: Any = original
        self.layers: dict[str, StackedLayer] = {}
        #: whether the module's forward runs, in which its parameters multiply by their tables
        self.active = False

    def runs_original(self, training: bool) -> bool:
        """Whether the module's own forward runs as it is: none of its layers is quantized in this call."""
        return all(layer.quantization.runs_original(training) for layer in self.layers.values())

    def quantized_now(self, parameter: str) -> StackedLayer | None:
        """The layer of a parameter that the current phase quantizes; None for any other parameter."""
        layer = self.layers.get(parameter)
        return None if layer is None or layer.quantization.plain else layer


def local_experts(weight: Any, name: str) -> tuple[Tensor, int]:
    """Weights or biases of the experts of this process, and the place of the first of them among all experts.

    A DTensor of expert parallelism is sharded by experts, its first dimension; any other tensor has all of
    them. Raises ValueError for a DTensor that is sharded in another way.
    """
    if type(weight) in (Tensor, nn.Parameter) or not hasattr(weight, "placements"):
        return weight, 0
    first, count = 0, len(weight)
    for axis, placement in enumerate(weight.placements):
        if placement.is_replicate():
            continue
        if type(placement).__name__ != "Shard" or placement.dim != 0:
            raise ValueError(
                f"experts: a DTensor must be sharded by experts, Shard(0), or replicated, got {placement} "
                f"for {name} {list(weight.shape)}. Shard it by experts, or name the layer in exclude."
            )
        most = -(-count // weight.device_mesh.size(axis))
        start = min(most * weight.device_mesh.get_local_rank(axis), count)
        first, count = first + start, min(most, count - start)
    return weight.to_local(), first


def stacked_layers(module: nn.Module) -> StackedLayers | None:
    """The stacked layers of a converted module; None for any other."""
    found = vars(module).get("quantization")
    return found if isinstance(found, StackedLayers) else None


def converted_layers(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Any]]:
    """Names and converted layers: linear layers and groups among modules, and stacked layers in them."""
    for name, module in modules:
        if converted_state(module) is not None:
            yield name, module
        elif (stacked := stacked_layers(module)) is not None:
            for parameter, layer in stacked.layers.items():
                yield f"{name}.{parameter}".lstrip("."), layer
