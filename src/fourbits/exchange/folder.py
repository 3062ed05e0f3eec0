"""Writes and reads model folders of transformers without using transformers."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourbits.data.tokenizer import Tokenizer
from fourbits.data.whole_file import read_json, write_json, write_whole
from fourbits.exchange.compare import Compared, compare
from fourbits.exchange.config import from_hf_config, to_hf_config
from fourbits.exchange.families import family_of
from fourbits.exchange.files import (
    CONFIG,
    GENERATION,
    HF_QUANT,
    INDEX,
    SHARD,
    WEIGHTS,
    WeightFiles,
    model_folder,
    read_config,
)
from fourbits.exchange.model_card import CARD, may_write_card
from fourbits.exchange.nvfp4_checkpoints import MODELOPT, PackedWeight, hf_quant_config, quantization_config
from fourbits.exchange.outgoing import Outgoing, Quantization
from fourbits.exchange.quantized_files import DecodedFiles, scheme_of
from fourbits.exchange.replace import STAGING, replaced_together
from fourbits.exchange.state import require_state
from fourbits.exchange.tensor_files import write_tensors
from fourbits.exchange.tokenizer_files import tokenizer_files
from fourbits.exchange.weights import (
    fill_matched,
    hf_names,
    matched,
    require_finite,
    require_tied,
    unfilled,
)
from fourbits.model.config import ModelConfig
from fourbits.model.lm import LanguageModel

SHARD_BYTES = 5 * 10**9
#: files of an older model in the folder, which the new model may not have
STALE = (GENERATION, INDEX, WEIGHTS, SHARD.format("*", "*"), HF_QUANT)
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
    quantization: Quantization | None = None,
    card: str | None = None,
    verify: bool = False,
) -> Compared | None:
    """Write a model for transformers' from_pretrained, and its tokenizer for AutoTokenizer.

    state: a LanguageModel's state_dict; dtype: the type to which tensors are rounded; tokenizer: its files
    are written, too, and rows of the vocabulary without a token are dropped; end_token: the token that ends a
    generated text, by default the tokenizer's; provenance: the `fourbits` entry of config.json, from
    `fourbits.recipe.provenance.provenance(recipe)`; shard_bytes: largest file size; quantization: the weights
    to write as NVFP4; card: the text of README.md, written unless the folder has a README of other origin;
    verify: read the new files and compare every tensor with state before they replace older files, and return
    the number of tensors.

    Only a few rows, or one quantized layer, are in memory at a time. A model in the folder is replaced when
    the new one is complete, and other files stay. Raises ValueError for a model that no transformers class
    implements, a state of another configuration, values that are not finite, an end_token outside the
    vocabulary, and a folder with files of these names that do not belong to a model; and OSError, e.g. for a
    full disk. After an error, the folder is unchanged.
    """
    folder = model_folder("save_hf", folder)
    _require_options(dtype, shard_bytes)
    _require_models_folder(folder)
    outgoing = outgoing_of(state, config, dtype, tokenizer, quantization)
    config = outgoing.config
    end_token = _end_token(tokenizer, end_token)
    described = to_hf_config(config, dtype, end_token)
    if provenance is not None:
        described["fourbits"] = dict(provenance)
    with replaced_together(folder, CONFIG, STALE) as new:
        if quantization is not None:
            described["quantization_config"] = _write_quantization(new, quantization, outgoing.kept())
        _write_weights(new, outgoing, shard_bytes)
        _write_tokens(new, tokenizer, end_token, config.max_seq_len)
        if card is not None and may_write_card(folder):
            write_whole(new / CARD, card.encode())
        write_json(new / CONFIG, described)
        return compare(new, outgoing) if verify else None


def outgoing_of(
    state: Mapping[str, Tensor],
    config: ModelConfig,
    dtype: torch.dtype,
    tokenizer: Tokenizer | None,
    quantization: Quantization | None,
) -> Outgoing:
    """The content of an export of a state; arguments and errors as of `save_hf`."""
    require_state(state, config)
    config = _without_padding(config, tokenizer)
    names = hf_names(config)
    if config.tie_embeddings and family_of(config).ties:
        del names["head.weight"]
    return Outgoing(state, names, config, dtype, quantization)


def load_hf(
    folder: Path | str,
    *,
    compute_dtype: torch.dtype = torch.bfloat16,
    clamp_time_steps: bool = True,
) -> LanguageModel:
    """Read a model written by transformers or `save_hf`; its masters are FP32.

    Quantized weights are decoded: NVFP4 as compressed-tensors and modelopt store it, and E4M3 in blocks
    with FP32 scales (DeepSeek-V3's). clamp_time_steps: see from_hf_config. Raises ValueError for an
    unsupported model, and for tensors that are missing, unknown, of the wrong shape or type, or not finite.
    """
    opened = open_hf(folder, clamp_time_steps=clamp_time_steps)
    with _naming(opened.folder):
        model = unfilled(opened.config, compute_dtype, torch.device("cpu"))
        fill_matched(model, opened.files, opened.names)
    return model


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A transformers model on disk. files: its tensors, decoded on access; names: ours -> theirs."""

    folder: Path
    config: ModelConfig
    files: WeightFiles | DecodedFiles
    names: dict[str, str]

    @property
    def stored_as(self) -> str:
        """How the weights are stored: compressed-tensors, modelopt, fp8, or floating-point."""
        return self.files.kind if isinstance(self.files, DecodedFiles) else "floating-point"

    def weight(self, name: str) -> Tensor:
        """A parameter by our name. Raises ValueError for values that are not finite, and an untied head."""
        theirs, head = self.names[name], self.names["head.weight"]
        if self.config.tie_embeddings and name == "embed.weight" and head in self.files:
            require_tied(self.files, head, theirs)
        found = self.files[theirs]
        require_finite(theirs, found)
        return found

    def packed(self) -> dict[str, tuple[PackedWeight, Tensor | None]]:
        """The weights stored as NVFP4 by our names, with the scales of their inputs if the files have any."""
        if not isinstance(self.files, DecodedFiles):
            return {}
        found = {ours: self.files.packed(theirs) for ours, theirs in self.names.items()}
        return {ours: packed for ours, packed in found.items() if packed is not None}


def open_hf(folder: Path | str, *, clamp_time_steps: bool = True) -> OpenedModel:
    """Open a folder as `load_hf` does, without reading the weights; checks their names, shapes and types."""
    folder = model_folder("load_hf", folder)
    described = read_config(folder)
    with _naming(folder / CONFIG):
        scheme = scheme_of(described.pop("quantization_config", None) or _hf_quant_config(folder))
        config = from_hf_config(described, clamp_time_steps)
    files: WeightFiles | DecodedFiles = WeightFiles(folder)
    with _naming(folder):
        if scheme is not None:
            files = DecodedFiles(files, scheme)
        # before allocating anything by the configuration's sizes
        return OpenedModel(folder, config, files, matched(config, files.described))


@contextmanager
def _naming(path: Path) -> Generator[None]:
    """Add the path to errors in the block."""
    try:
        yield
    except ValueError as error:
        text = str(error).removeprefix("exchange: ")
        raise ValueError(text if text.startswith(str(path.parent)) else f"{path}: {text}") from error


def _hf_quant_config(folder: Path) -> dict[str, Any] | None:
    """modelopt's separate file in the form of config.json's entry; None if there is none."""
    if not (folder / HF_QUANT).is_file():
        return None
    found = read_json(folder / HF_QUANT, "Download or export the model again.").get("quantization")
    return {"quant_method": "modelopt", **(found if isinstance(found, dict) else {})}


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
        raise ValueError(
            f"save_hf: dtype must be one of {', '.join(map(str, SAVED_DTYPES))}, got {dtype!r}. Pass "
            "torch.bfloat16 to halve the files."
        )
    if type(shard_bytes) is not int or shard_bytes < 1:
        raise ValueError(
            f"save_hf: shard_bytes must be a whole number of at least 1, got {shard_bytes!r}. Omit it for "
            "its default."
        )


def _without_padding(config: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig:
    """The configuration with exactly one row of the vocabulary per token of the tokenizer."""
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
            f"save_hf: end_token must be the tokenizer's, {tokenizer.end_id}, got {end_token}. Remove it."
        )
    return tokenizer.end_id


def _write_quantization(folder: Path, quantization: Quantization, kept: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json, and modelopt's file. kept: the layers in BF16."""
    if quantization.format is MODELOPT:
        write_json(folder / HF_QUANT, hf_quant_config(kept, quantization.with_input))
    return quantization_config(quantization.format, kept, quantization.with_input)


def _write_tokens(folder: Path, tokenizer: Tokenizer | None, end_token: int | None, length: int) -> None:
    """The tokenizer's files, and the tokens that end and pad a text. length: that of the longest text."""
    if tokenizer is not None:
        for name, content in tokenizer_files(tokenizer, length).items():
            write_whole(folder / name, content)
    if end_token is not None:
        padding = end_token if tokenizer is None else tokenizer.padding()[1]
        write_json(folder / GENERATION, {"eos_token_id": end_token, "pad_token_id": padding})


def _write_weights(folder: Path, outgoing: Outgoing, shard_bytes: int) -> None:
    """One file, or several with an index."""
    described = {name: outgoing.described(name) for name in outgoing.names}
    sizes = {name: sum(map(_bytes, tensors.values())) for name, tensors in described.items()}
    shards = _shards(sizes, shard_bytes)
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else SHARD.format(f"{number:05}", f"{len(shards):05}")
        tensors = {theirs: tensor for ours in shard for theirs, tensor in described[ours].items()}
        write_tensors(folder / file, tensors, (part for ours in shard for part in outgoing.parts(ours)))
        where |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where})


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


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
