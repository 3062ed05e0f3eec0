"""Tensors split into pieces over several safetensors files, as torch.distributed.checkpoint writes them.

A file holds pieces under the tensor's name, and records in its metadata where each piece begins.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.exchange.tensor_files import TensorFile

#: the key of the metadata, and the fields that it has for each piece
SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


class _Piece(NamedTuple):
    file: TensorFile
    offsets: tuple[int, ...]
    shape: torch.Size


class TensorPieces(Mapping[str, Tensor]):
    """The tensors of several files by name, each assembled on access.

    described: the same names with tensors on the meta device. Raises ValueError naming the file if one is
    damaged, or if pieces are missing or overlap.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._pieces: dict[str, list[_Piece]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for path in paths:
            file = TensorFile(path)
            offsets = _offsets(file)
            for name, piece in file.described.items():
                begin = offsets.get(name, (0,) * piece.dim())
                self._pieces.setdefault(name, []).append(_Piece(file, begin, piece.shape))
                dtypes[name] = piece.dtype
        self.described = {
            name: torch.empty(_whole(name, pieces), dtype=dtypes[name], device="meta")
            for name, pieces in self._pieces.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        pieces = self._pieces[name]
        if len(pieces) == 1:
            return pieces[0].file[name]
        like = self.described[name]
        whole = torch.empty(like.shape, dtype=like.dtype, device="cpu")
        for piece in pieces:
            place = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.shape, strict=True))
            whole[place] = piece.file[name]
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


def _offsets(file: TensorFile) -> dict[str, tuple[int, ...]]:
    """The offsets of the pieces in a file."""
    text = file.metadata.get(SHARDING)
    try:
        found = json.loads(text) if text else {}
        return {name: tuple(map(int, entry[OFFSETS])) for name, entry in found.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file.path}: damaged: its {SHARDING} is not readable.") from error


def _whole(name: str, pieces: Sequence[_Piece]) -> list[int]:
    """The shape of a tensor whose pieces are ranges of rows, with all columns or ranges of columns.

    Raises ValueError if they do not fill it.
    """
    path, dims = pieces[0].file.path, len(pieces[0].shape)
    if any(len(piece.shape) != dims or len(piece.offsets) != dims for piece in pieces):
        raise ValueError(f"{path.parent}: damaged: pieces of {name!r} have different dimensions.")
    shape = [max(piece.offsets[d] + piece.shape[d] for piece in pieces) for d in range(dims)]
    rows: dict[_Run, list[_Run]] = {}
    for piece in pieces:
        begins, sizes = (*piece.offsets, 0, 0), (*piece.shape, 1, 1)  # a scalar is one row of one column
        rows.setdefault((begins[1], sizes[1]), []).append((begins[0], sizes[0]))
    fills = _end(rows) == [*shape, 1, 1][1] and all(_end(runs) == [*shape, 1][0] for runs in rows.values())
    if not fills or any([*piece.shape[2:]] != shape[2:] for piece in pieces):
        raise ValueError(f"{path.parent}: damaged: a piece of {name!r} is missing or there twice.")
    return shape


#: offset and size
_Run = tuple[int, int]


def _end(runs: Iterable[_Run]) -> int | None:
    """The end of consecutive ranges that begin at 0; None if there is a gap or a duplicate."""
    end = 0
    for begin, size in sorted(runs):
        if begin != end:
            return None
        end += size
    return end
