"""The files of a transformers model: config.json, and weights in one file or several with an index."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fourbits.data.whole_file import read_json
from fourbits.exchange.replace import interrupted
from fourbits.exchange.shown import shown

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
SHARD = "model-{}-of-{}.safetensors"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json. Raises ValueError if there is none, or if it is not a JSON object."""
    path = folder / CONFIG
    if not path.is_file():
        why = ": an export into it was interrupted. Rerun it" if interrupted(folder, CONFIG) else ""
        raise ValueError(f"{folder}: not a transformers model (no {CONFIG}){why}.")
    return read_json(path, "Download or export the model again.")


class WeightFiles(Mapping[str, Tensor]):
    """The tensors of a folder's safetensors files by name, each read on access.

    described: the same names with tensors on the meta device, for which only headers are read. Raises
    ValueError for files that are missing, damaged or contradict each other.
    """

    def __init__(self, folder: Path) -> None:
        if (folder / INDEX).exists() and (folder / WEIGHTS).exists():
            raise ValueError(
                f"{folder}: must have either {WEIGHTS} or {INDEX}, got both, which may be of two models. "
                "Remove the older one."
            )
        self._file: dict[str, tuple[Path, Any]] = {}
        if (folder / INDEX).is_file():
            self._open_indexed(folder)
        else:
            path = folder / WEIGHTS
            opened = _opened(path)
            self._file = dict.fromkeys(opened.keys(), (path, opened))
        self.described = {name: self._describe(name) for name in self._file}

    def _open_indexed(self, folder: Path) -> None:
        where = _weight_map(folder / INDEX)
        files = {name: _opened(folder / name) for name in sorted(set(where.values()))}
        held = {name: set(opened.keys()) for name, opened in files.items()}
        for tensor, file in where.items():
            if tensor not in held[file]:
                raise ValueError(
                    f"{folder / INDEX}: maps {shown(tensor)} to {file}, which does not hold it. Download or "
                    "export the model again."
                )
            self._file[tensor] = folder / file, files[file]

    def _describe(self, name: str) -> Tensor:
        described = self._file[name][1].get_slice(name)
        # A type that weights may not have is described as one that `require_fit` refuses.
        dtype = _DTYPES.get(described.get_dtype(), torch.uint8)
        return torch.empty(described.get_shape(), dtype=dtype, device="meta")

    def __getitem__(self, name: str) -> Tensor:
        path, opened = self._file[name]
        try:
            return opened.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{path}: {name!r} is not readable: {error}.") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: not a readable safetensors file: {error}.") from error


def _weight_map(path: Path) -> dict[str, str]:
    where = read_json(path, "Download or export the model again.").get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise ValueError(f"{path}: must map tensors to files in 'weight_map', got {shown(where)}.")
    for file in sorted(set(where.values())):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(
                f"{path}: 'weight_map' must name .safetensors files of its folder, got {shown(file)}."
            )
    return where
