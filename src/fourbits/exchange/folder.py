"""A model folder of transformers, written and read without transformers."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fourbits.data.tokenizer import Tokenizer
from fourbits.data.whole_file import library_error, write_json, write_whole
from fourbits.exchange.config import from_hf_config, to_hf_config
from fourbits.exchange.files import CONFIG, GENERATION, INDEX, SHARD, WEIGHTS, WeightFiles, read_config
from fourbits.exchange.replace import STAGING, replaced_together
from fourbits.exchange.state import require_state, rounded
from fourbits.exchange.tokenizer_files import tokenizer_files
from fourbits.exchange.weights import fill_matched, hf_names, matched, unfilled
from fourbits.model.config import ModelConfig
from fourbits.model.lm import LanguageModel

SHARD_BYTES = 5 * 10**9
SAVED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def save_hf(
    state: Mapping[str, Tensor],
    config: ModelConfig,
    folder: Path | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    tokenizer: Tokenizer | None = None,
    end_token: int | None = None,
    provenance: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model for transformers' from_pretrained, and its tokenizer for AutoTokenizer.

    state: a LanguageModel's state_dict; dtype: to which every tensor is rounded; tokenizer: writes its files,
    too, and drops the rows of the vocabulary that it has no token for; end_token: the token that ends a
    generated text, by default the tokenizer's; provenance: the `fourbits` entry of config.json, from
    `fourbits.recipe.provenance.provenance(recipe)`; shard_bytes: largest file size.

    Only one file's tensors are in memory at a time. A model in the folder is replaced when the new one is
    complete, and other files stay. Raises ValueError for a model that no transformers class computes, for a
    state that is not this configuration's, for values that are not finite, for an end_token outside the
    vocabulary and for a folder with files of these names that are no model's; and OSError, e.g. for a full
    disk. After an error, the folder is as it was.
    """
    folder = Path(folder)
    _require_options(dtype, shard_bytes)
    _require_models_folder(folder)
    require_state(state, config)
    config = _without_padding(config, tokenizer)
    end_token = _end_token(tokenizer, end_token)
    described = to_hf_config(config, dtype, end_token)
    if provenance is not None:
        described["fourbits"] = dict(provenance)
    names = hf_names(config)
    if described["tie_word_embeddings"]:
        del names["head.weight"]
    with replaced_together(folder, CONFIG, (GENERATION, INDEX, WEIGHTS, SHARD.format("*", "*"))) as new:
        _write_weights(new, state, names, config, dtype, shard_bytes)
        if tokenizer is not None:
            for name, content in tokenizer_files(tokenizer, config.max_seq_len).items():
                write_whole(new / name, content)
        if end_token is not None:
            padding = end_token if tokenizer is None else tokenizer.padding()[1]
            write_json(new / GENERATION, {"eos_token_id": end_token, "pad_token_id": padding})
        write_json(new / CONFIG, described)


def load_hf(
    folder: Path | str,
    *,
    compute_dtype: torch.dtype = torch.bfloat16,
    clamp_time_steps: bool = True,
) -> LanguageModel:
    """Read a model written by transformers or `save_hf`; its masters are FP32.

    clamp_time_steps: see from_hf_config. Raises ValueError for an unsupported model, and for tensors that are
    missing, unknown, of the wrong shape, not floating-point or not finite.
    """
    folder = Path(folder)
    with _naming(folder / CONFIG):
        config = from_hf_config(read_config(folder), clamp_time_steps)
    files = WeightFiles(folder)
    with _naming(folder):
        names = matched(config, files.described)  # before anything of the configuration's sizes is allocated
        model = unfilled(config, compute_dtype, torch.device("cpu"))
        fill_matched(model, files, names)
    return model


@contextmanager
def _naming(path: Path) -> Generator[None]:
    """Errors in the block name the path."""
    try:
        yield
    except ValueError as error:
        text = str(error).removeprefix("exchange: ")
        raise ValueError(text if text.startswith(str(path.parent)) else f"{path}: {text}") from error


def _require_models_folder(folder: Path) -> None:
    """Raises ValueError if an export would replace files of a folder that holds no model."""
    if (folder / STAGING).exists():  # an export was interrupted
        return
    if (folder / CONFIG).is_file():
        content = read_config(folder)
        found = None if "model_type" in content or "architectures" in content else CONFIG
    else:
        names = (GENERATION, "tokenizer.json", "tokenizer_config.json", WEIGHTS, INDEX)
        found = next((name for name in names if (folder / name).exists()), None)
    if found is not None:
        raise ValueError(
            f"{folder}: holds a {found} but no model, and an export would replace it. Export into an empty "
            "folder, or into one with a model."
        )


def _require_options(dtype: object, shard_bytes: object) -> None:
    if dtype not in SAVED_DTYPES:
        raise ValueError(f"save_hf: dtype must be one of {', '.join(map(str, SAVED_DTYPES))}, got {dtype!r}.")
    if type(shard_bytes) is not int or shard_bytes < 1:
        raise ValueError(f"save_hf: shard_bytes must be a whole number of at least 1, got {shard_bytes!r}.")


def _without_padding(config: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig:
    """The configuration with a row of the vocabulary for every token, and no more."""
    if tokenizer is None:
        return config
    if tokenizer.size > config.vocab_size:
        raise ValueError(
            f"save_hf: the tokenizer must have at most the model's {config.vocab_size} tokens, got "
            f"{tokenizer.size}. Pass the one that the model was trained with."
        )
    return replace(config, vocab_size=tokenizer.size, document_end=None)


def _end_token(tokenizer: Tokenizer | None, end_token: int | None) -> int | None:
    if tokenizer is None:
        return end_token
    if end_token not in (None, tokenizer.end_id):
        raise ValueError(
            f"save_hf: end_token must be the tokenizer's, {tokenizer.end_id}, got {end_token}. Leave it out."
        )
    return tokenizer.end_id


def _write_weights(
    folder: Path,
    state: Mapping[str, Tensor],
    names: Mapping[str, str],
    config: ModelConfig,
    dtype: torch.dtype,
    shard_bytes: int,
) -> None:
    """One file, or several with an index."""
    rows: dict[str, int] = dict.fromkeys(("embed.weight", "head.weight"), config.vocab_size)
    sizes = {name: state[name][: rows.get(name)].numel() * dtype.itemsize for name in names}
    shards = _shards(sizes, shard_bytes)
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else SHARD.format(f"{number:05}", f"{len(shards):05}")
        tensors = {names[ours]: rounded(ours, state[ours][: rows.get(ours)], dtype) for ours in shard}
        _save(tensors, folder / file)
        where |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where})


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    path.touch()
    mode = path.stat().st_mode  # by the user's umask; the library makes files that others cannot read
    try:
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(mode)
    except SafetensorError as error:  # which is how the library reports a full disk
        raise library_error(error, path) from error


def _shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """The names, in order, in groups of at most `limit` bytes; a larger tensor is a separate group."""
    shards: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if shards[-1] and total + size > limit:
            shards.append([])
            total = 0
        shards[-1].append(name)
        total += size
    return shards
