"""The files of a transformers model: config.json, and weights in one file or several with an index."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fourbits.data.whole_file import read_json
from fourbits.exchange.replace import interrupted
from fourbits.exchange.shown import shown
from fourbits.exchange.tensor_files import TensorFile

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
HF_QUANT = "hf_quant_config.json"
SHARD = "model-{}-of-{}.safetensors"


def model_folder(call: str, folder: object) -> Path:
    """The path of a folder. Raises ValueError with the call's name for anything but a path."""
    if not isinstance(folder, str | os.PathLike):
        raise ValueError(
            f"{call}: folder must be a path (str or Path), got {shown(folder)}. Pass the path of a folder "
            "with config.json."
        )
    return Path(folder)


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
        self._file: dict[str, TensorFile] = {}
        if (folder / INDEX).is_file():
            self._open_indexed(folder)
        else:
            opened = TensorFile(folder / WEIGHTS)
            self._file = dict.fromkeys(opened, opened)
        self.described = {name: file.described[name] for name, file in self._file.items()}

    def _open_indexed(self, folder: Path) -> None:
        where = _weight_map(folder / INDEX)
        files = {name: TensorFile(folder / name) for name in sorted(set(where.values()))}
        for tensor, file in where.items():
            if tensor not in files[file]:
                raise ValueError(
                    f"{folder / INDEX}: maps {shown(tensor)} to {file}, which does not hold it. Download or "
                    "export the model again."
                )
            self._file[tensor] = files[file]

    def __getitem__(self, name: str) -> Tensor:
        return self._file[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)


def _weight_map(path: Path) -> dict[str, str]:
    where = read_json(path, "Download or export the model again.").get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise ValueError(
            f"{path}: must map tensors to files in 'weight_map', got {shown(where)}. Download or export the "
            "model again."
        )
    for file in sorted(set(where.values())):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(
                f"{path}: 'weight_map' must name .safetensors files of its folder, got {shown(file)}. "
                "Download or export the model again."
            )
    return where
