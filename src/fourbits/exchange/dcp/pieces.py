"""Reads one tensor that torch.save wrote into a larger file: its description, and its values by rows."""

import io
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fourbits.exchange.dcp.inert_pickle import Record, read_inert

#: dtype -> the class of its storage in a pickle
DTYPES = {
    torch.float64: "torch.DoubleStorage",
    torch.float32: "torch.FloatStorage",
    torch.float16: "torch.HalfStorage",
    torch.bfloat16: "torch.BFloat16Storage",
    torch.int64: "torch.LongStorage",
    torch.int32: "torch.IntStorage",
    torch.int16: "torch.ShortStorage",
    torch.int8: "torch.CharStorage",
    torch.uint8: "torch.ByteStorage",
    torch.bool: "torch.BoolStorage",
}
_STORAGES = {name: dtype for dtype, name in DTYPES.items()}
_REBUILD = "torch._utils._rebuild_tensor_v2"
EXPECTED = {_REBUILD, "collections.OrderedDict", *_STORAGES}
#: bytes of a zip archive's local header before the name, and the offset of the lengths of name and extra
_HEADER, _LENGTHS = 30, 26


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file. begins: first byte of its storage; first, stride: in elements of the storage."""

    path: Path
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    begins: int
    elements: int

    def values(self, row: int | None = None) -> Tensor:
        """The tensor, or one of its rows; nothing else is read."""
        size, stride, first = self.size, self.stride, self.first
        if row is not None:
            size, stride, first = size[1:], stride[1:], first + row * stride[0]
        if 0 in size:
            return torch.empty(size, dtype=self.dtype, device="cpu")
        count = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        with self.path.open("rb") as file:
            file.seek(self.begins + first * self.dtype.itemsize)
            content = bytearray(file.read(count * self.dtype.itemsize))
        if len(content) != count * self.dtype.itemsize:
            raise ValueError(f"{self.path}: damaged: it ends within a tensor.")
        return torch.frombuffer(content, dtype=self.dtype).as_strided(size, stride)


def stored_at(path: Path, offset: int, length: int) -> Stored:
    """The tensor in a part of a file. Raises ValueError naming the file if it does not hold a tensor."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(_Part(file, offset, length)) as archive:
            return _described(path, archive, offset, file)
    except (OSError, EOFError, zipfile.BadZipFile, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: not readable as a tensor that torch.distributed.checkpoint wrote: {error}. Save the "
            "checkpoint in its default format, torch.save."
        ) from error


def _described(path: Path, archive: zipfile.ZipFile, offset: int, file: BinaryIO) -> Stored:
    names = archive.namelist()
    root = next((name.removesuffix("data.pkl") for name in names if name.endswith("/data.pkl")), "")
    if f"{root}byteorder" in names and archive.read(f"{root}byteorder") != b"little":
        raise ValueError(
            f"{path}: must have the byte order little, got another. Save the checkpoint on such a machine."
        )
    made = read_inert(archive.read(f"{root}data.pkl"), EXPECTED, path, persistent=lambda pid: pid)
    if not isinstance(made, Record) or made.name != _REBUILD:
        raise ValueError(
            f"{path}: must hold a tensor (an object of {_REBUILD}), got another "
            "object. Save the checkpoint again."
        )
    (_, storage, key, _, elements), first, size, stride, *_ = made.args
    dtype = _STORAGES[storage.label]
    entry = archive.getinfo(f"{root}data/{key}")
    last = first + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    in_bounds = min(first, elements, *size, *stride) >= 0 and (not math.prod(size) or last < elements)
    if entry.compress_type or entry.file_size != elements * dtype.itemsize or not in_bounds:
        raise ValueError(f"{path}: damaged: a tensor does not fit into its storage.")
    start = offset + entry.header_offset
    file.seek(start + _LENGTHS)
    lengths = file.read(4)
    begins = start + _HEADER + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    return Stored(path, dtype, tuple(size), tuple(stride), first, begins, elements)


class _Part(io.RawIOBase):
    """A part of a file that can be read like a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        self._file.seek(self._offset + self._at)
        content = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)
