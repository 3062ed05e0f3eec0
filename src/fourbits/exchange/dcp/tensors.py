"""The tensors of a DCP folder: `.metadata` records where each piece lies in the `.distcp` files.

Both hold pickles, which `inert_pickle` reads as data. A piece is a tensor as torch.save writes it: an
uncompressed zip archive with a pickle of dtype, shape and strides, and the values, which are read from their
place in the file.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourbits.exchange.dcp.inert_pickle import Record, read_inert
from fourbits.exchange.dcp.pieces import DTYPES, Stored, stored_at
from fourbits.exchange.shown import shown

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
#: the names that a .metadata file may use: DCP's records, dtypes, and Megatron-LM's additions
EXPECTED = {
    *(f"{_DCP}.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *(f"{_DCP}.metadata.{name}StorageMetadata" for name in ("Tensor", "Bytes", "Chunk")),
    *(f"{_DCP}.metadata._MEM_FORMAT_ENCODING", f"{_SHARDED}.MEM_FORMAT_ENCODING"),
    *(f"{_SHARDED}.TensorProperties", f"{_DCP}.filesystem._StorageInfo"),
    *(f"{_DCP}.planner.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    *(f"{_MEGATRON}.MCoreMetadata", f"{_MEGATRON}.MCoreSavePlan"),
    *("torch.Size", "torch.serialization._get_layout", "collections.OrderedDict"),
    *(f"{module}.{kind}Path" for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
    *(str(dtype) for dtype in DTYPES),
}
_DTYPES = {str(dtype): dtype for dtype in DTYPES}


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor: where it begins in the tensor, its size, and its place in a file."""

    begins: tuple[int, ...]
    size: tuple[int, ...]
    path: Path
    offset: int
    length: int

    def stored(self, dtype: torch.dtype) -> Stored:
        """The piece's values in the file. Raises ValueError if the shape or dtype there differs."""
        found = stored_at(self.path, self.offset, self.length)
        if (found.dtype, found.size) != (dtype, self.size):
            raise ValueError(
                f"{self.path}: damaged: a piece has the shape {list(found.size)} and dtype {found.dtype}, "
                f"and {METADATA} says {list(self.size)} and {dtype}."
            )
        return found


class DcpTensors(Mapping[str, Tensor]):
    """The tensors of a DCP folder by name, each read on access.

    described: the same names with tensors on the meta device. Objects other than tensors are skipped and
    never read. Raises ValueError for a damaged folder, and for a .metadata file with an unexpected name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / METADATA
        found = read_inert(path.read_bytes(), EXPECTED, path)
        try:
            self.described, self._pieces = _parsed(found.state, folder)
        except (AttributeError, KeyError, TypeError, IndexError, RuntimeError) as error:
            raise ValueError(f"{path}: damaged: not the metadata of a DCP checkpoint.") from error

    def __getitem__(self, name: str) -> Tensor:
        return self._filled(name, None)

    def at(self, name: str, index: int) -> Tensor:
        """A tensor's element along its first dimension; no more than that is read."""
        return self._filled(name, index)

    def _filled(self, name: str, index: int | None) -> Tensor:
        like = self.described[name]
        shape = list(like.shape if index is None else like.shape[1:])
        # elements that no piece fills stay NaN, which an import refuses
        empty = math.nan if like.dtype.is_floating_point else 0
        whole = torch.full(shape, empty, dtype=like.dtype, device="cpu")
        for piece in self._pieces[name]:
            if index is None:
                box, rows = _slices(piece.begins, piece.size), None
            elif piece.begins[0] <= index < piece.begins[0] + piece.size[0]:
                box, rows = _slices(piece.begins[1:], piece.size[1:]), index - piece.begins[0]
            else:
                continue
            whole[box] = piece.stored(like.dtype).values(rows)
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self.described)

    def __len__(self) -> int:
        return len(self.described)


def _slices(begins: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + count) for begin, count in zip(begins, size, strict=True))


def _parsed(metadata: Mapping[str, Any], folder: Path) -> tuple[dict[str, Tensor], dict[str, list[Piece]]]:
    """The tensors that a Metadata record describes, and their pieces."""
    places = {
        (key.state["fqn"], _ints(key.state.get("offset"))): info.state
        for key, info in metadata["storage_data"].items()
    }
    described: dict[str, Tensor] = {}
    pieces: dict[str, list[Piece]] = {}
    for name, entry in metadata["state_dict_metadata"].items():
        if not entry.name.endswith(".TensorStorageMetadata"):
            continue
        dtype = entry.state["properties"].state[0].label
        described[name] = torch.empty(_ints(entry.state["size"]), dtype=_DTYPES[dtype], device="meta")
        boxes = [(_ints(box.state["offsets"]), _ints(box.state["sizes"])) for box in entry.state["chunks"]]
        pieces[name] = [_piece(folder, begins, size, places[name, begins]) for begins, size in boxes]
        for piece in pieces[name]:
            ends = [begin + count for begin, count in zip(piece.begins, piece.size, strict=True)]
            if len(ends) != described[name].dim() or any(
                end > most for end, most in zip(ends, described[name].shape, strict=True)
            ):
                raise ValueError(f"{folder / METADATA}: damaged: a piece of {shown(name)} is outside of it.")
    return described, pieces


def _piece(folder: Path, begins: tuple[int, ...], size: tuple[int, ...], place: Mapping[str, Any]) -> Piece:
    file = place["relative_path"]
    if not isinstance(file, str) or Path(file).name != file:
        raise ValueError(
            f"{folder / METADATA}: must name files of its folder, got {shown(file)}. Save the checkpoint "
            "again."
        )
    if place.get("transform_descriptors"):
        raise ValueError(
            f"{folder / METADATA}: tensors must be stored as they are, got "
            f"{shown(place['transform_descriptors'])}. Save the checkpoint without compression."
        )
    return Piece(begins, size, folder / file, int(place["offset"]), int(place["length"]))


def _ints(size: Record | None) -> tuple[int, ...]:
    """The numbers of a torch.Size; () for a missing one."""
    found = () if size is None or not size.args else tuple(size.args[0])
    if not all(type(number) is int and number >= 0 for number in found):
        raise TypeError("not a size")
    return found
