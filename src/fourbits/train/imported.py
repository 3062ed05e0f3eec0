"""A run that starts from a transformers model: its weights, configuration and tokenizer; steps count from 0.

Weights in NVFP4 or FP8 are decoded into the masters. manifest.json records the folder and the hashes of its
files, under "ancestry", and checkpoints/step_0 holds the weights, so that the folder may be gone later.
"""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fourbits.data.stream.dataset import PreparedData
from fourbits.data.tokenizer import Tokenizer
from fourbits.data.whole_file import file_sha256
from fourbits.exchange.files import CONFIG, INDEX
from fourbits.exchange.folder import OpenedModel, open_hf
from fourbits.exchange.tokenizer_files import TOKENIZER, TOKENIZER_CONFIG, load_tokenizer
from fourbits.train.config import RunConfig
from fourbits.train.load_run import is_run
from fourbits.train.trainer import Trainer

#: parameters with a row for each token of the vocabulary
_ROWS = ("embed.weight", "head.weight")


def is_imported(path: Path) -> bool:
    """Whether a path is a transformers model and not a run."""
    return (path / CONFIG).is_file() and not is_run(path)


@dataclass(frozen=True, slots=True)
class Imported:
    """A transformers model to start from. tokenizer: None if its folder has none."""

    opened: OpenedModel
    tokenizer: Tokenizer | None

    @classmethod
    def of(cls, folder: Path) -> "Imported":
        """Names, shapes and types of its tensors are checked. Raises ValueError."""
        has_tokenizer = any((folder / name).is_file() for name in (TOKENIZER, TOKENIZER_CONFIG))
        return cls(open_hf(folder), load_tokenizer(folder) if has_tokenizer else None)

    @property
    def folder(self) -> Path:
        """The folder of the imported model."""
        return self.opened.folder

    @property
    def sha256(self) -> str:
        """Identifies the model: the hash of those of its configuration and weight files."""
        names = {CONFIG, *(file.name for file in self.folder.glob("*.safetensors"))}
        names |= {INDEX} if (self.folder / INDEX).is_file() else set()
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
        data = replace(data, model_vocab_size=max(data.model_vocab_size, self.opened.config.vocab_size))
        return replace(config, model=self.opened.config, data=data)

    def check(self, config: RunConfig, data: PreparedData) -> None:
        """Raises ValueError if the text has tokens that mean something else to the model."""
        rows = self.opened.config.vocab_size
        if self.tokenizer is not None and not data.tokenizer.encodes_like(self.tokenizer):
            raise ValueError(
                f"--from {self.folder}: the text must have the model's tokenizer, got that of {data.folder}. "
                f"Prepare it with fourbits data prepare --tokenizer {self.folder}, or pass the text itself."
            )
        if data.tokenizer.size > rows:
            raise ValueError(
                f"--from {self.folder}: the text's tokenizer has {data.tokenizer.size} tokens, more than the "
                f"model's vocabulary, {rows}. Pass the tokenizer that the model was trained with."
            )

    @torch.no_grad()
    def load(self, trainer: Trainer) -> None:
        """Give a new trainer the model's weights; rows that pad the vocabulary are zero."""
        digest, ranks = hashlib.sha256(), trainer.ranks
        for name, master in trainer.masters.items():
            whole = self._weight(name, trainer.config.model.vocab_size)
            digest.update(name.encode() + whole.contiguous().numpy().tobytes())
            master.copy_(ranks.own_part(name, whole))
        if not ranks.alone:
            ranks.initial_weights = digest.hexdigest()

    def _weight(self, name: str, vocabulary: int) -> Tensor:
        weight = self.opened.weight(name).float()
        return F.pad(weight, (0, 0, 0, vocabulary - len(weight))) if name in _ROWS else weight

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
