"""Where each parameter's parts are: split over the ranks that share layers, then sharded by FSDP2.

A checkpoint holds whole tensors. Tensor parallelism splits rows, columns or segments (tensor_parallel.py),
and FSDP2 splits such a part into runs of rows, one per rank.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fourbits.train.parallel import MeshShape
from fourbits.train.ranks.splits import Split


class Meshes(NamedTuple):
    """The meshes of ranks: FSDP2's for blocks, FSDP2's for the rest of the model, and that of checkpoints.

    blocks, rest: copies x ranks that shard one; in the rest these include the ranks that share layers, each
    of which has different tokens there. layers: copies x ranks that share layers x ranks that shard a part.
    """

    blocks: DeviceMesh
    rest: DeviceMesh
    layers: DeviceMesh | None

    @classmethod
    def of(cls, shape: MeshShape, kind: str) -> "Meshes":
        """All ranks, on devices of a kind. Every rank must call it."""
        names = "replicate", "shard"
        if shape.tensor == 1:
            blocks = init_device_mesh(kind, (shape.replicate, shape.shard), mesh_dim_names=names)
            return cls(blocks, blocks, None)
        numbers = torch.arange(shape.data * shape.tensor, dtype=torch.int32, device="cpu").view(shape)
        layers = DeviceMesh(kind, numbers.transpose(1, 2), mesh_dim_names=("replicate", "tensor", "shard"))
        return cls(layers[names], DeviceMesh(kind, numbers.flatten(1), mesh_dim_names=names), layers)

    def like(self, others: "Meshes", mesh: DeviceMesh) -> DeviceMesh:
        """The mesh here that corresponds to one of `others`."""
        places = [own for own, other in zip(self, others, strict=True) if other == mesh]
        (found,) = places[:1]
        assert found is not None
        return found


class Sharding:
    """How the parameters of a model are split and sharded."""

    def __init__(
        self, meshes: Meshes, parameters: Mapping[str, DTensor], splits: Mapping[str, Split]
    ) -> None:
        """parameters: FSDP2's; splits: of the same names, empty where ranks do not share layers."""
        self._meshes, self._parameters, self._splits = meshes, parameters, splits

    def shape(self, name: str) -> torch.Size:
        """The shape of a whole parameter."""
        return self._splits[name].shape if self._splits else self._parameters[name].shape

    def split(self, name: str) -> Split:
        """How ranks share a parameter, where they share layers."""
        return self._splits[name]

    def in_parts(self, name: str) -> bool:
        """Whether no element of a parameter is on two ranks of a copy of the model."""
        return not self._shared(name) or self._splits[name].dim is not None

    def stored(self, name: str, shard: Tensor) -> DTensor:
        """A tensor that is split like a parameter, as a DTensor of the whole, of which each rank has a block.

        All ranks must call it: segments are exchanged for rows.
        """
        mesh = self._meshes.layers
        if mesh is None or not self._shared(name):
            like = self._parameters[name]
            return _dtensor(shard, like.device_mesh, like.placements, like.shape)
        split = self._splits[name]
        if split.segments:
            shard = _rows(self.whole(name, shard), mesh)
        over_layers = Replicate() if split.dim is None else Shard(split.dim)
        return _dtensor(shard, mesh, (Replicate(), over_layers, Shard(0)), split.shape)

    def own(self, name: str, stored: Tensor) -> Tensor:
        """This rank's part of a tensor, from the DTensor that `stored` returns. All ranks must call it."""
        assert isinstance(stored, DTensor)
        if not (self._shared(name) and self._splits[name].segments):
            return stored.to_local()
        return self.own_part(name, stored.full_tensor())

    def own_part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        if self._shared(name):
            mesh = self._meshes.layers
            assert mesh is not None
            whole = self._splits[name].part(whole, mesh.get_local_rank("tensor"), mesh.size(1))
        return _chunk(whole, self._parameters[name].device_mesh, -1)

    def whole(self, name: str, shard: Tensor) -> Tensor:
        """The whole of a tensor that is split like a parameter. All ranks must call it."""
        like = self._parameters[name]
        found = _dtensor(shard, like.device_mesh, like.placements, like.shape).full_tensor()
        if not self._shared(name) or self._splits[name].dim is None:
            return found
        mesh = self._meshes.layers
        assert mesh is not None
        parts = [torch.empty_like(found) for _ in range(mesh.size(1))]
        dist.all_gather(parts, found.contiguous(), group=mesh.get_group("tensor"))
        return self._splits[name].whole(parts)

    def _shared(self, name: str) -> bool:
        """Whether a parameter is in a block whose layers ranks share."""
        return bool(self._splits) and name.startswith("blocks.")


def _chunk(whole: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """This rank's run of rows over a dimension of a mesh, as FSDP2 splits them: equal but for the last."""
    ranks, own = mesh.size(dim), mesh.get_local_rank(dim % mesh.ndim)
    parts = whole.chunk(ranks) if ranks > 1 else (whole,)
    return parts[own] if own < len(parts) else whole[:0]


def _rows(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    return _chunk(_chunk(whole, mesh, 1), mesh, 2).clone()


def _dtensor(
    shard: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size
) -> DTensor:
    stride = torch.empty(shape, dtype=shard.dtype, device="meta").stride()
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride)
