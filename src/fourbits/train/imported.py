"""A run that starts from a model of another program: its weights; steps count from 0.

A transformers folder also has the configuration and the tokenizer. A DCP checkpoint of torchtitan or
Megatron-LM has neither, so both come from CONFIG. Weights in NVFP4 or FP8 are decoded into the masters.
manifest.json records the folder and the hashes of its files, under "ancestry", and checkpoints/step_0 holds
the weights, so that the folder may be gone later.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fourbits.data.stream.dataset import PreparedData
from fourbits.data.tokenizer import Tokenizer
from fourbits.data.whole_file import file_sha256
from fourbits.exchange.dcp.llama import DcpModel, is_dcp
from fourbits.exchange.dcp.tensors import METADATA
from fourbits.exchange.files import CONFIG, INDEX
from fourbits.exchange.folder import OpenedModel, open_hf
from fourbits.exchange.tokenizer_files import TOKENIZER, TOKENIZER_CONFIG, load_tokenizer
from fourbits.model.config import ModelConfig
from fourbits.train.config import RunConfig
from fourbits.train.load_run import is_run
from fourbits.train.trainer import Trainer

#: parameters with a row for each token of the vocabulary
_ROWS = ("embed.weight", "head.weight")


def is_imported(path: Path) -> bool:
    """Whether a path is a transformers model or a DCP checkpoint, and not a run."""
    return ((path / CONFIG).is_file() or is_dcp(path)) and not is_run(path)


def has_configuration(path: Path) -> bool:
    """Whether an imported model has its own configuration, which replaces the model of CONFIG."""
    return (path / CONFIG).is_file()


@dataclass(frozen=True, slots=True)
class Imported:
    """A model to start from. tokenizer: None if its folder has none."""

    opened: OpenedModel | DcpModel
    tokenizer: Tokenizer | None

    @classmethod
    def of(cls, folder: Path) -> "Imported":
        """Open a model; raises ValueError if names, shapes or dtypes of its tensors do not fit."""
        if not has_configuration(folder):
            return cls(DcpModel.of(folder), None)
        has_tokenizer = any((folder / name).is_file() for name in (TOKENIZER, TOKENIZER_CONFIG))
        return cls(open_hf(folder), load_tokenizer(folder) if has_tokenizer else None)

    @property
    def folder(self) -> Path:
        """The folder of the imported model."""
        return self.opened.folder

    @property
    def sha256(self) -> str:
        """Identifies the model: a hash over the hashes of its configuration and weight files."""
        if isinstance(self.opened, DcpModel):
            return self._hash_of({METADATA, *(file.name for file in self.folder.glob("*.distcp"))})
        names = {CONFIG, *(file.name for file in self.folder.glob("*.safetensors"))}
        names |= {INDEX} if (self.folder / INDEX).is_file() else set()
        return self._hash_of(names)

    def _hash_of(self, names: set[str]) -> str:
        hashes = [f"{name} {file_sha256(self.folder / name)}" for name in sorted(names)]
        return hashlib.sha256("\n".join(hashes).encode()).hexdigest()

    def adopted(self, config: RunConfig) -> RunConfig:
        """The settings with this model and, unless another is given, its tokenizer.

        Raises ValueError for a folder without a tokenizer if the settings name none.
        """
        data = config.data
        if data.tokenizer is None and self.tokenizer is None:
            raise ValueError(
                f"--from {self.folder}: has no tokenizer. Pass the one that the model was trained with: "
                "--data.tokenizer FILE."
            )
        if data.tokenizer is None and self.tokenizer is not None:
            end = data.end_token or self.tokenizer.end_token
            data = replace(data, tokenizer=str(self.folder.absolute()), end_token=end)
        data = replace(data, model_vocab_size=max(data.model_vocab_size, self._vocab_size))
        model = config.model if isinstance(self.opened, DcpModel) else self.opened.config
        self._weights(model)  # refuses another model before the text is prepared
        return replace(config, model=model, data=data)

    @property
    def _vocab_size(self) -> int:
        """The size of the model's vocabulary."""
        opened = self.opened
        return opened.vocab_size if isinstance(opened, DcpModel) else opened.config.vocab_size

    def _weights(self, model: ModelConfig) -> Callable[[str], Tensor]:
        """The weights by our names. model: the run's; a DCP checkpoint must fit it. Raises ValueError."""
        if isinstance(self.opened, DcpModel):
            return self.opened.fitted(model).__getitem__
        return self.opened.weight

    def check(self, config: RunConfig, data: PreparedData) -> None:
        """Raises ValueError if the text has tokens that mean something else to the model."""
        vocabulary = self._vocab_size
        if self.tokenizer is not None and not data.tokenizer.encodes_like(self.tokenizer):
            raise ValueError(
                f"--from {self.folder}: the text must have the model's tokenizer, got that of {data.folder}. "
                f"Prepare it with fourbits data prepare --tokenizer {self.folder}, or pass the text itself."
            )
        if data.tokenizer.size > vocabulary:
            raise ValueError(
                f"--from {self.folder}: the text's tokenizer has {data.tokenizer.size} tokens, more than the "
                f"model's vocabulary, {vocabulary}. Pass the tokenizer that the model was trained with."
            )

    @torch.no_grad()
    def load(self, trainer: Trainer) -> None:
        """Give a new trainer the model's weights; rows that pad the vocabulary are zero."""
        digest, ranks, model = hashlib.sha256(), trainer.ranks, trainer.config.model
        read = self._weights(model)
        for name, master in trainer.masters.items():
            whole = _padded(name, read(name).float(), model.vocab_size)
            digest.update(name.encode() + whole.contiguous().numpy().tobytes())
            master.copy_(ranks.own_part(name, whole))
        if not ranks.alone:
            ranks.initial_weights = digest.hexdigest()

    def ancestry(self) -> list[dict[str, Any]]:
        """The record in manifest.json."""
        return [
            {
                "model": str(self.folder.absolute()),
                "stored_as": self.opened.stored_as,
                "step": 0,
                "checkpoint": self.sha256,
            }
        ]


def _padded(name: str, weight: Tensor, vocabulary: int) -> Tensor:
    """Rows that pad the vocabulary are zero."""
    return F.pad(weight, (0, 0, 0, vocabulary - len(weight))) if name in _ROWS else weight
