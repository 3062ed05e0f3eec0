"""Load the trained model of a run: the masters of its newest good checkpoint, converted to its recipe."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourbits.data.tokenizer import Tokenizer
from fourbits.linear.checkpoint_state import load_recipe_state, recipe_state
from fourbits.linear.convert import convert
from fourbits.linear.step import enter_phase, set_step
from fourbits.model.lm import LanguageModel
from fourbits.recipe.recipe import Recipe
from fourbits.train.checkpoint import (
    Checkpoint,
    checkpoints,
    load_tensors,
    open_checkpoint,
    open_tensors,
    step_of,
)
from fourbits.train.config import RunConfig
from fourbits.train.masters import bf16_masters
from fourbits.train.precision import recipe_in_steps
from fourbits.train.run_folder import RunFolder, read_json


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained model, in evaluation mode. step: the number of steps it was trained for."""

    model: LanguageModel
    tokenizer: Tokenizer
    config: RunConfig
    step: int


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A trained model on disk. masters: by name, each read on access; manifest: the run's manifest.json."""

    folder: Path
    masters: Mapping[str, Tensor]
    tokenizer: Tokenizer
    config: RunConfig
    checkpoint: Checkpoint
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """The number of steps it was trained for."""
        return self.checkpoint.step

    @property
    def state(self) -> Mapping[str, Tensor]:
        """The model's state_dict, each tensor read on access: masters, and a tied head by its name, too."""
        return _TiedHead(self.masters) if self.config.model.tie_embeddings else self.masters

    @property
    def recipe(self) -> Recipe:
        """The run's recipe, with its schedule in steps."""
        phases, per_step = self.manifest["data"]["plan"]["phases"], self.config.train.samples_per_step
        firsts = [phase["first_sample"] for phase in phases[1:]]
        return recipe_in_steps(self.config, tuple(-(-first // per_step) for first in firsts))

    def converted(self, device: torch.device | str) -> LanguageModel:
        """The model, converted to its recipe; on the meta device without its masters."""
        device = torch.device(device)
        with device:
            model = LanguageModel(self.config.model, seed=self.config.train.seed)
        if self.config.optim.masters != "fp32":
            bf16_masters(model)
        self.restore_recipe(model)
        if device.type != "meta":
            with torch.no_grad():
                for name, master in model.named_parameters():
                    master.copy_(self.masters[name])
        return model.eval()

    def restore_recipe(self, model: LanguageModel) -> None:
        """Convert a model to the run's recipe, with the state that the recipe had at the checkpoint."""
        convert(model, self.recipe, seed=self.config.train.seed)
        enter_phase(model, max(self.step - 1, 0))
        if state := recipe_state(model):
            load_recipe_state(model, load_tensors(self.checkpoint, "recipe", state))
        set_step(model, self.step)


class _MeanMasters(Mapping[str, Tensor]):
    """Masters averaged over checkpoints, each computed on access."""

    def __init__(self, checkpoints: Sequence[Mapping[str, Tensor]]) -> None:
        self._checkpoints = checkpoints

    def __getitem__(self, name: str) -> Tensor:
        masters = [masters[name] for masters in self._checkpoints]
        total = torch.zeros(masters[0].shape, dtype=torch.float64, device="cpu")
        for master in masters:
            total += master
        return (total / len(masters)).to(masters[0].dtype)

    def __iter__(self) -> Iterator[str]:
        yield from self._checkpoints[0]

    def __len__(self) -> int:
        return len(self._checkpoints[0])


class _TiedHead(Mapping[str, Tensor]):
    """Masters and, under the name of the head, the embedding."""

    def __init__(self, masters: Mapping[str, Tensor]) -> None:
        self._masters = masters

    def __getitem__(self, name: str) -> Tensor:
        return self._masters["embed.weight" if name == "head.weight" else name]

    def __iter__(self) -> Iterator[str]:
        yield from (*self._masters, "head.weight")

    def __len__(self) -> int:
        return len(self._masters) + 1


def load_trained(path: Path | str, device: torch.device | str = "cpu", average: int = 1) -> Trained:
    """Load the newest checkpoint of a run; of a run that ended non-finite, the last good one.

    average: the number of checkpoints, that one and those before it, whose weights are averaged. Raises
    ValueError if there are not as many, or one is damaged.
    """
    stored = open_trained(path, average)
    model = stored.converted("cpu").to(device)
    return Trained(model, stored.tokenizer, stored.config, stored.step)


def is_run(path: Path) -> bool:
    """Whether a path is a run, or RUN/checkpoints/step_N."""
    return RunFolder(_run_of(path)).config.is_file()


def _run_of(path: Path) -> Path:
    return path.parents[1] if path.parent.name == "checkpoints" else path


def open_trained(path: Path | str, average: int = 1) -> StoredModel:
    """As `load_trained`, without reading the masters yet; path may also be RUN/checkpoints/step_N."""
    path = Path(path)
    folder = RunFolder(_run_of(path))
    if not folder.config.is_file():
        raise ValueError(
            f"{path}: not a run folder (no {folder.config.name}). Pass a folder written by fourbits train."
        )
    config = folder.stored_config()
    checkpoint = folder.good_checkpoint() if folder.path == path else open_checkpoint(path)
    if checkpoint is None:
        raise ValueError(f"{path}: the run has no checkpoint yet. Continue it until it saves one.")
    with torch.device("meta"):
        model = LanguageModel(config.model)
    if config.optim.masters != "fp32":
        bf16_masters(model)
    parameters = dict(model.named_parameters())
    stored = [open_tensors(each, "model", parameters) for each in _newest(folder, checkpoint, average)]
    masters = stored[0] if average == 1 else _MeanMasters(stored)
    manifest = read_json(folder.manifest)
    tokenizer = Tokenizer.load(folder.tokenizer, manifest["data"]["tokenizer"]["end_token"])
    recorded = manifest["data"]["tokenizer"].get("sha256", tokenizer.sha256)
    if tokenizer.sha256 != recorded:
        raise ValueError(
            f"{folder.tokenizer}: is not the tokenizer that the run was trained with, whose SHA-256 is "
            f"{recorded}. Restore it."
        )
    return StoredModel(folder.path, masters, tokenizer, config, checkpoint, manifest)


def _newest(folder: RunFolder, last: Checkpoint, count: int) -> list[Checkpoint]:
    """`last` and the checkpoints before it, `count` in all. Raises ValueError if there are not as many."""
    if count < 1:
        raise ValueError(f"average: must be at least 1, got {count}. Pass 1 for the newest checkpoint alone.")
    paths = [path for path in checkpoints(folder.checkpoints) if step_of(path) < last.step]
    if len(paths) < count - 1:
        raise ValueError(
            f"average: must be at most the number of checkpoints of {folder.path} up to step {last.step}, "
            f"{len(paths) + 1}, got {count}. Lower it, or train with a larger train.keep_checkpoints."
        )
    return [*(open_checkpoint(path) for path in paths[len(paths) - count + 1 :]), last]
