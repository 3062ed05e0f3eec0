"""The storage of torch.distributed.checkpoint in safetensors files, written tensor by tensor.

PyTorch's writer builds each file in memory, in one call that blocks all other threads for seconds per GiB.
Names, content and metadata of the files are the same.
"""

import json
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fourbits.exchange.tensor_files import write_tensors
from fourbits.exchange.tensor_pieces import OFFSETS, SHARDING

#: version of the written file format
_VERSION = {"DCP_VERSION": "1.0"}


class ShardWriter(HuggingFaceStorageWriter):
    """Writes each rank's tensors into one file of a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder = folder

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part of the plan. Raises OSError, e.g. for a full disk."""
        written: Future[list[WriteResult]] = Future()
        written.set_result([_result(item) for item in plan.items])
        if plan.items:
            number = plan.storage_data["shard_index"]
            tensors = {item.index.fqn: _tensor(planner, item) for item in plan.items}
            described = {name: tensor.to("meta") for name, tensor in tensors.items()}
            path = self._folder / f"shard-{number:05d}-model-00001-of-00001.safetensors"
            offsets = {item.index.fqn: {OFFSETS: _offsets(item)} for item in plan.items}
            write_tensors(path, described, tensors.items(), {SHARDING: json.dumps(offsets), **_VERSION})
        return written


def shard_files(folder: Path, rank: int) -> list[Path]:
    """The files that a rank has written."""
    return sorted(folder.glob(f"shard-{rank + 1:05d}-*.safetensors"))


def _tensor(planner: SavePlanner, item: WriteItem) -> Tensor:
    found = planner.resolve_data(item)
    assert isinstance(found, Tensor)
    return found.detach()


def _offsets(item: WriteItem) -> list[int]:
    """Where the rank's piece begins in the whole tensor."""
    assert item.tensor_data is not None
    return list(item.tensor_data.chunk.offsets)


def _result(item: WriteItem) -> WriteResult:
    assert item.tensor_data is not None
    size = item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
    index = MetadataIndex(item.index.fqn, item.index.offset, item.index.index)
    return WriteResult(index=index, size_in_bytes=size, storage_data=None)
