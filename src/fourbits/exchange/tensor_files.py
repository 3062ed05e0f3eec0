"""safetensors files, one tensor at a time, so that memory does not grow with the file.

The safetensors library reads. Its writer needs all tensors of a file at once, so files are written here: the
length of the header, the header (JSON), and the tensors' bytes, the widest types first, so that every tensor
is aligned.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fourbits.data.whole_file import open_synced, write

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a file by name, each read on access and freed with the last reference to it.

    described: the same names with tensors on the meta device, from the header alone; a type unknown to torch
    is described as uint8. metadata: the header's, text by name. Raises ValueError naming the file if it is
    damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        opened = self._opened()
        self.described = {name: _described(opened.get_slice(name)) for name in opened.keys()}  # noqa: SIM118
        self.metadata: dict[str, str] = opened.metadata() or {}

    def _opened(self) -> Any:
        try:
            return safe_open(self.path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self.path}: not a readable safetensors file: {error}.") from error

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.described:
            raise KeyError(name)
        try:
            # Opened for each tensor, because pages of a file that stays mapped count as memory of this
            # process.
            return self._opened().get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{self.path}: {name!r} is not readable: {error}.") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self.described)

    def __len__(self) -> int:
        return len(self.described)


def write_tensors(
    path: Path,
    described: Mapping[str, Tensor],
    parts: Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write a safetensors file from parts, and flush it to disk.

    described: dtype and shape of every tensor (on the meta device); parts: (name, the next rows of that
    tensor), in any order of names; metadata: added to the header, besides the format. Raises OSError, e.g.
    for a full disk. Releases the GIL while writing.
    """
    names = sorted(described, key=lambda name: (-described[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    place: dict[str, int] = {}
    for name in names:
        tensor, start = described[name], end
        end += tensor.numel() * tensor.dtype.itemsize
        place[name] = start
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open_synced(path) as file:
        write(file, len(text).to_bytes(8, "little") + text)
        for name, part in parts:
            assert part.dtype == described[name].dtype, f"{name}: declared as {described[name].dtype}"
            file.seek(8 + len(text) + place[name])
            write(file, _bytes_of(part))
            place[name] += part.numel() * part.dtype.itemsize
        ends = [header[name]["data_offsets"][1] for name in names]
        assert [place[name] for name in names] == ends, f"{path}: parts do not fill their tensors"


def _described(stored: Any) -> Tensor:
    return torch.empty(stored.get_shape(), dtype=DTYPES.get(stored.get_dtype(), torch.uint8), device="meta")


def _bytes_of(part: Tensor) -> memoryview:
    """The tensor's bytes without a copy, which would hold the GIL."""
    return part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
