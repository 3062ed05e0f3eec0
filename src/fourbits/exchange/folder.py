"""A model folder of transformers, config.json and safetensors, written and read without transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fourbits.data.whole_file import write_json
from fourbits.exchange.config import from_hf_config, to_hf_config
from fourbits.exchange.weights import fill, hf_names, unfilled
from fourbits.model.config import ModelConfig
from fourbits.model.lm import LanguageModel

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARD = "model-{}-of-{}.safetensors"
SHARD_BYTES = 5 * 10**9


def save_hf(
    state: Mapping[str, Tensor],
    config: ModelConfig,
    folder: Path | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    end_token: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model for transformers' from_pretrained.

    state: a LanguageModel's state_dict; dtype: to which every tensor is rounded; end_token: the token that
    ends a generated text; shard_bytes: largest file size. Only one shard is in memory at a time. Raises
    ValueError for a model that no transformers class computes and for an end_token outside the vocabulary,
    and OSError for a full disk. An existing model in the folder is removed first and config.json is written
    last, so that no reader finds parts of two models.
    """
    folder = Path(folder)
    described = to_hf_config(config, dtype, end_token)
    names = hf_names(config)
    if described["tie_word_embeddings"]:
        del names["head.weight"]
    shards = _shards(state, names, dtype, shard_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / CONFIG, folder / INDEX, folder / WEIGHTS, *folder.glob(SHARD.format("*", "*"))):
        old.unlink(missing_ok=True)
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else SHARD.format(f"{number:05}", f"{len(shards):05}")
        tensors = {names[ours]: state[ours].detach().cpu().to(dtype).contiguous() for ours in shard}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        size = sum(state[ours].numel() for ours in names) * dtype.itemsize
        write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": where})
    write_json(folder / CONFIG, described)


def load_hf(
    folder: Path | str,
    *,
    compute_dtype: torch.dtype = torch.bfloat16,
    clamp_time_steps: bool = True,
) -> LanguageModel:
    """Read a model written by transformers or `save_hf`; its masters are FP32.

    clamp_time_steps: see from_hf_config. Raises ValueError for an unsupported model, and for tensors that are
    missing, unknown or of the wrong shape.
    """
    folder = Path(folder)
    config = from_hf_config(_read_json(folder / CONFIG), clamp_time_steps)
    model = unfilled(config, compute_dtype, torch.device("cpu"))
    fill(model, _tensors(folder))
    return model


class _Files(Mapping[str, Tensor]):
    """The tensors of several safetensors files, each read on access."""

    def __init__(self, files: list[Path]) -> None:
        self._open: dict[str, Any] = {}
        for file in files:
            try:
                opened = safe_open(file, framework="pt")
                self._open |= dict.fromkeys(opened.keys(), opened)
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{file}: not a readable safetensors file: {error}.") from error

    def __getitem__(self, name: str) -> Tensor:
        return self._open[name].get_tensor(name)

    def __iter__(self):
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)


def _tensors(folder: Path) -> Mapping[str, Tensor]:
    if (folder / INDEX).is_file():
        where = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(where, dict):
            raise ValueError(f"{folder / INDEX}: must map tensors to files in 'weight_map'.")
        return _Files([folder / file for file in sorted(set(where.values()))])
    return _Files([folder / WEIGHTS])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path.parent}: not a transformers model (no {path.name}).") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}.") from error


def _shards(
    state: Mapping[str, Tensor], names: Mapping[str, str], dtype: torch.dtype, limit: int
) -> list[list[str]]:
    """Our names, in order, in groups of at most `limit` bytes; a larger tensor is a separate group."""
    shards: list[list[str]] = [[]]
    size = 0
    for name in names:
        added = state[name].numel() * dtype.itemsize
        if shards[-1] and size + added > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += added
    return shards
