"""The call of a layer that parallelize_module has sharded: each rank multiplies its parts of DTensors.

torch's parallel styles place the input before the call and the output after it, as around an nn.Linear. In
between a rank quantizes its part of each tensor with the amax of the whole and the whole layer's random bits,
so its operands are slices of those that one process would multiply. docs/nvfp4.md, sections 6 and 11.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fourbits.linear.layer_state import CallConfig, FeatureShard, LayerState
from fourbits.linear.ranks.features import group_reduction, shard_at, split_table
from fourbits.recipe.recipe import table_from_text

#: with the modules that the creator of a DTensor has imported, which takes half a second
_dist: Any = dist
#: the dimensions of the weight that the ranks split, and their names
_FEATURES = {0: "out_features", 1: "in_features"}


class Parts(NamedTuple):
    """This rank's parts of a call's tensors."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    mesh: Any
    #: that of the output
    placement: Any
    #: the table of the parts, as text, and where they begin in the whole layer; None where each rank has all
    table: str
    shard: FeatureShard | None

    def config(self, whole: CallConfig) -> CallConfig:
        """The configuration of the call. whole: that of the layer."""
        return whole._replace(table=self.table, shard=self.shard)

    def joined(self, y: Tensor) -> Tensor:
        """The output as a DTensor. y: this rank's part, [..., N of its weight]."""
        y = y if torch.compiler.is_compiling() else _Received.apply(y)
        return _dist.tensor.DTensor.from_local(y, self.mesh, (self.placement,), run_check=False)


def parts_of(layer: Any, weight: Any, input: Any, table: str) -> Parts:
    """This rank's parts of a converted layer's call. weight, table: the layer's; the table as text.

    An input that is placed in another way is redistributed, as torch does. Raises ValueError where ranks
    cannot share the layer.
    """
    bias = layer.bias
    if not isinstance(input, _dist.tensor.DTensor) or input.device_mesh != weight.device_mesh:
        _refuse_input(input, weight)
    if input.shape[-1:] != (layer.in_features,):
        raise ValueError(
            f"QuantizedLinear: the last dimension of the input must be in_features={layer.in_features}, got "
            f"shape {list(input.shape)}. Pass an input of that width."
        )
    mesh, sizes = weight.device_mesh, (layer.out_features, layer.in_features)
    dim = _split_dim(
        weight.placements, None if bias is None else getattr(bias, "placements", ()), sizes, mesh
    )
    x = _own_input(input, dim)
    own = weight.to_local()
    bias = None if bias is None else bias.to_local()
    if dim is None:
        return Parts(x, own, bias, mesh, _dist.tensor.Replicate(), table, None)
    placement = _dist.tensor.Shard(input.dim() - 1) if dim == 0 else _dist.tensor.Partial()
    if mesh.size() == 1:
        return Parts(x, own, bias, mesh, placement, table, None)
    if bias is not None and dim == 1:
        bias = _AddedOnce.apply(bias, mesh.get_local_rank() == 0)
    shard = shard_at(dim, mesh.get_local_rank() * own.shape[dim])
    return Parts(x, own, bias, mesh, placement, _split_text(table, dim, sizes[dim], mesh), shard)


def _own_input(input: Any, dim: int | None) -> Tensor:
    """This rank's part of X. Its gradient is a summand where output features are split."""
    placement = _dist.tensor.Shard(input.dim() - 1) if dim == 1 else _dist.tensor.Replicate()
    if tuple(input.placements) != (placement,):
        input = input.redistribute(placements=(placement,))
    x = input.to_local(grad_placements=(_dist.tensor.Partial() if dim == 0 else placement,))
    return _Received.apply(x) if _is_on_its_way(x) else x


def require_supported(state: LayerState) -> None:
    """Raises ValueError for what follows statistics of whole tensors, of which a rank has parts."""
    of_state = {
        "amax policies, adaptive layouts or shared amaxes": state.recipe_state,
        "a phase of its schedule that blends two precisions": state.blend,
        "a sample of its health": state.tap,
        "a weight that arrives quantized": state.weight_source,
        "features declared by shard_features": state.shard,
    }
    for what, found in of_state.items():
        if found is not None:
            raise ValueError(
                "QuantizedLinear: a layer whose weight is a DTensor supports nothing that needs a whole "
                f"tensor, got {what}. Choose a recipe or a call without that, or name the layer in exclude."
            )


class _Received(torch.autograd.Function):
    """Identity that waits for a message of torch's styles: X in the forward pass, dY in the backward pass.

    The wrapper of a tensor on its way would otherwise be traced, at the cost of a compiler's operators.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _received(x).view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _received(grad)


def _received(x: Any) -> Tensor:
    return x.wait() if _is_on_its_way(x) else x


def _is_on_its_way(x: Any) -> bool:
    return isinstance(x, _dist._functional_collectives.AsyncCollectiveTensor)


class _AddedOnce(torch.autograd.Function):
    """The bias of a sum over ranks: one rank adds it, so that it is not rounded; each has its gradient."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, adds: bool) -> Tensor:
        return bias.view_as(bias) if adds else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@torch.compiler.assume_constant_result
def _split_text(table: str, dim: int, size: int, mesh: Any) -> str:
    """The table of a layer whose weight is split along dim, with the reduction of its amaxes, as text."""
    reduction = group_reduction(mesh.get_group(), dim)
    try:
        return split_table(table_from_text(table), dim, size, mesh.size(), reduction).to_text()
    except ValueError as error:
        raise ValueError(
            f"QuantizedLinear: {mesh.size()} ranks cannot share {_FEATURES[dim]}={size} under this recipe: "
            f"{error} Use fewer ranks or another recipe, or name the layer in exclude."
        ) from error


def _split_dim(weight: Any, bias: Any, sizes: tuple[int, int], mesh: Any) -> int | None:
    """The dimension of the weight that the ranks split, None where each has all of it.

    weight, bias: their placements; () for a bias that is no DTensor, None for none. Raises ValueError for
    placements that are not those of ColwiseParallel, RowwiseParallel or a replicated layer.
    """
    rows, columns, whole = (_dist.tensor.Shard(0),), (_dist.tensor.Shard(1),), (_dist.tensor.Replicate(),)
    placed = tuple(weight)
    of_bias = rows if placed == rows else whole
    if placed not in (rows, columns, whole) or (bias is not None and tuple(bias) != of_bias):
        raise ValueError(
            "QuantizedLinear: a weight that ranks share must have one placement, Shard(0), Shard(1) or "
            f"Replicate(), and a bias that of the output features, got {placed} and {bias}. Shard the layer "
            "with ColwiseParallel or RowwiseParallel, or name it in exclude."
        )
    dim = None if placed == whole else placed[0].dim
    if dim is not None and sizes[dim] % mesh.size():
        raise ValueError(
            f"QuantizedLinear: {_FEATURES[dim]} must be a multiple of the {mesh.size()} ranks that share "
            f"them, got {sizes[dim]}. Use another number of ranks, or name the layer in exclude."
        )
    return dim


def _refuse_input(input: Any, weight: Any) -> None:
    placements, found = getattr(input, "placements", None), f"a plain tensor {list(input.shape)}"
    if placements is not None:
        found = f"one with placements {tuple(placements)} on {input.device_mesh}"
    raise ValueError(
        f"QuantizedLinear: the input of a layer whose weight is a DTensor on {weight.device_mesh} must be a "
        f"DTensor on the same mesh, got {found}. Shard the layer with ColwiseParallel or RowwiseParallel, "
        "which place the input, or name it in exclude."
    )
