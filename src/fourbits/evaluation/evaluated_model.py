"""The model to evaluate: a run's checkpoint, or a transformers model in a folder."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from fourbits.data.config import STDLIB, DataConfig, open_data
from fourbits.data.stream.dataset import PreparedData
from fourbits.data.stream.manifest import is_prepared
from fourbits.data.tokenizer import Tokenizer
from fourbits.evaluate import HeldOut
from fourbits.exchange.files import CONFIG
from fourbits.exchange.folder import OpenedModel, load_hf, open_hf
from fourbits.exchange.tokenizer_files import load_tokenizer
from fourbits.generate.held import HeldLayer, recipe_layers, stored_layer
from fourbits.linear.convert import convert
from fourbits.model.lm import LanguageModel
from fourbits.train.calibration import run_text
from fourbits.train.load_run import StoredModel, is_run, open_trained

#: tokens of a sample of text for an imported model, which has no run's seq_len
SEQ_LEN = 2048
#: names the recipe that a run was trained with, which is also how the paper evaluates
TRAINED, BF16 = "trained", "bf16"


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """A model in BF16 with its tokenizer. source: its files; prefix: the tokens before every text."""

    model: LanguageModel
    tokenizer: Tokenizer
    source: StoredModel | OpenedModel
    prefix: tuple[int, ...]

    @property
    def run(self) -> StoredModel | None:
        """The run that the model comes from, if any."""
        return self.source if isinstance(self.source, StoredModel) else None

    def layers(self, recipe: str) -> list[HeldLayer]:
        """The layers that a recipe quantizes, with their weights; the model itself stays in BF16.

        recipe: a name, a file, or "trained". A checkpoint stored in NVFP4 uses its stored codes and scales
        for nvfp4. Raises ValueError for a recipe without quantized layers, and for those that `recipe_layers`
        refuses.
        """
        packed = self.source.packed() if isinstance(self.source, OpenedModel) else {}
        if packed and recipe == "nvfp4":
            return [stored_layer(self._linear(name), *weight) for name, weight in packed.items()]
        if recipe == TRAINED and self.run is None:
            raise ValueError(f"--recipe {TRAINED}: only a run has one. Name a recipe, such as nvfp4.")
        if recipe == TRAINED and self.run is not None:
            self.run.restore_recipe(self.model)
        else:
            convert(self.model, recipe)
        found = recipe_layers(self.model)
        convert(self.model, BF16)
        self.model.eval()
        if not found:
            raise ValueError(f"--recipe {recipe}: quantizes no layer of this model.")
        return found

    def _linear(self, parameter: str) -> nn.Linear:
        module = self.model.get_submodule(parameter.removesuffix(".weight"))
        assert isinstance(module, nn.Linear)
        return module

    def texts(self, paths: Sequence[str], seq_len: int | None, samples: int | None) -> dict[str, HeldOut]:
        """Held-out samples of each source. paths: text or a prepared folder; if empty, the run's own data.

        seq_len, samples: by default those of the run's validation; for other models 2,048 and 32. Raises
        ValueError for a folder that was prepared with another tokenizer.
        """
        if self.run is not None:
            train = self.run.config.train
            seq_len, samples = seq_len or train.seq_len, samples or train.validation_samples
        seq_len = seq_len or min(SEQ_LEN, self.model.config.max_seq_len)
        with self._prepared(paths) as data:
            found = data.validation_samples(seq_len, samples or 32)
            return {name: HeldOut.of(rows, self.tokenizer) for name, rows in found.items()}

    @contextmanager
    def _prepared(self, paths: Sequence[str]) -> Generator[PreparedData]:
        if self.run is not None and not paths:
            yield run_text(self.run.folder, self.run)
            return
        paths = tuple(paths) or (STDLIB,)
        if len(paths) == 1 and is_prepared(Path(paths[0])):
            data = PreparedData.open(paths[0])
            if not data.tokenizer.encodes_like(self.tokenizer):
                raise ValueError(
                    f"--data {paths[0]}: prepared with another tokenizer than the model's. Pass the text "
                    "itself, or prepare it with the model's tokenizer: fourbits data prepare --tokenizer."
                )
            yield data
            return
        with TemporaryDirectory() as folder:
            file = Path(folder) / "tokenizer.json"
            self.tokenizer.save(file)
            options = DataConfig(
                paths=paths, tokenizer=str(file), end_token=self.tokenizer.end_token, max_lost=1.0
            )
            yield open_data(options, folder)


def open_model(path: Path, device: torch.device, average: int = 1) -> EvaluatedModel:
    """Load a run (its newest good checkpoint), RUN/checkpoints/step_N, or a transformers folder.

    average: as for `fourbits.load_trained`. Raises ValueError for other folders, and for files that are
    missing or damaged.
    """
    if is_run(path):
        stored = open_trained(path, average)
        model = stored.converted("cpu").to(device)
        convert(model, BF16)
        return EvaluatedModel(model, stored.tokenizer, stored, (stored.tokenizer.end_id,))
    if average > 1:
        raise ValueError(f"--average: only a run has several checkpoints, got {path}. Remove the option.")
    if not (path / CONFIG).is_file():
        raise ValueError(
            f"{path}: neither a run (written by fourbits train) nor a transformers model (no {CONFIG}). "
            "Pass the folder of one."
        )
    opened = open_hf(path)
    tokenizer = load_tokenizer(path)
    if tokenizer.size > opened.config.vocab_size:
        raise ValueError(
            f"{path}: its tokenizer has {tokenizer.size} tokens, more than the model's vocabulary, "
            f"{opened.config.vocab_size}. Download or export the model again."
        )
    model = load_hf(path).to(device).eval()
    return EvaluatedModel(model, tokenizer, opened, tuple(tokenizer.opening()) or (tokenizer.end_id,))
