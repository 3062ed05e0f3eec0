"""A trained model under measurement: its quantized layers, fixed batches, tensors and gradients."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fourbits.data.stream.dataset import PreparedData
from fourbits.evaluate import split_sample, uncompiled
from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from fourbits.model.lm import LanguageModel
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import Recipe
from fourbits.train.load_run import load_trained
from fourbits.train.run_folder import read_json

# Batches of the training's size, or of this many tokens, from the validation text; the range over them is
# reported.
MAX_TOKENS = 4096
MAX_BATCHES = 3

Gradients = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The operands of one linear layer in BF16. x: [M, K]; weight: [N, K], FP32; dy: [M, N]."""

    name: str
    x: Tensor
    weight: Tensor
    dy: Tensor


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A BF16 model with fixed batches, int64 [B, T + 1] each. layers: those that a recipe may quantize."""

    model: LanguageModel
    step: int
    batches: tuple[Tensor, ...]
    layers: Mapping[str, nn.Linear]

    @classmethod
    def of_run(cls, run: Path, device: str = "cpu", tokens: int | None = None) -> "TrainedModel":
        """The newest checkpoint of a run, converted to BF16.

        tokens: read batches until they have this many tokens, if the text has as many; None: at most
        MAX_BATCHES batches. Raises ValueError if the run has no checkpoint, or if no layer of the model can
        be quantized.
        """
        trained = load_trained(run, device)
        train, model = trained.config.train, trained.model
        data = PreparedData.open(read_json(run / "manifest.json")["data"]["folder"])
        size = train.micro_batch_size * train.gradient_accumulation
        size = max(1, min(size, MAX_TOKENS // train.seq_len))
        most = MAX_BATCHES if tokens is None else -(-tokens // (size * train.seq_len))
        limit = train.validation_samples if tokens is None else most * size
        samples = list(data.validation_samples(train.seq_len, limit).values())
        summary = convert(model, without_kept_blocks("nvfp4"))
        names = [row.name for row in summary.rows if row.quantized]
        convert(model, "bf16")
        modules = dict(model.named_modules())
        if not names:
            raise ValueError(f"{run}: the model must have a linear layer that nvfp4 quantizes, but has none.")
        layers = {name: module for name in names if isinstance(module := modules[name], nn.Linear)}
        batches = tuple(batch.to(device) for batch in _batches(samples, size, most))
        return cls(model.train(), trained.step, batches, layers)

    def gradients(self, batch: Tensor, recipe: Recipe | None = None, draw: int = 0) -> Gradients:
        """The gradient of every layer's weight under a recipe (None: BF16), with the random bits of `draw`.

        batch: int64 [B, T + 1]. The loss is the mean over the batch's tokens, as in training.
        """
        if recipe is not None:
            convert(self.model, recipe)
            set_step(self.model, draw)
        self.model.zero_grad(set_to_none=True)
        try:
            with uncompiled(self.model):
                loss, tokens = self.model.loss(*split_sample(batch))
                (loss / tokens).backward()
        finally:
            if recipe is not None:
                convert(self.model, "bf16")
        found = {name: layer.weight.grad for name, layer in self.layers.items()}
        return {name: grad for name, grad in found.items() if grad is not None}

    def tensors(self, batch: Tensor) -> list[LayerTensors]:
        """X, W and dY of every layer in BF16, for one batch."""
        with _recorded(self.layers) as (inputs, outputs):
            self.gradients(batch)
        return [
            LayerTensors(name, inputs[name], layer.weight.detach(), outputs[name])
            for name, layer in self.layers.items()
        ]


def without_kept_blocks(name: str | Recipe) -> Recipe:
    """A recipe that quantizes every block, so that recipes are measured on the same layers."""
    recipe = get_recipe(name)
    return replace(recipe, keep_bf16=replace(recipe.keep_bf16, first_blocks=0, last_blocks=0))


@contextmanager
def _recorded(layers: Mapping[str, nn.Linear]) -> Generator[tuple[Gradients, Gradients]]:
    """X and dY by layer, recorded during the forward and backward pass inside the block."""
    inputs: Gradients = {}
    outputs: Gradients = {}

    def record(name: str) -> Any:
        def hook(layer: nn.Linear, given: tuple[Tensor, ...], out: Tensor) -> None:
            inputs[name] = given[0].detach().reshape(-1, layer.in_features)
            out.register_hook(lambda dy: outputs.update({name: dy.reshape(-1, layer.out_features)}))

        return hook

    handles = [layer.register_forward_hook(record(name)) for name, layer in layers.items()]
    try:
        yield inputs, outputs
    finally:
        for handle in handles:
            handle.remove()


def _batches(samples: Sequence[Any], size: int, most: int) -> tuple[Tensor, ...]:
    """At most `most` batches of `size` samples that mix the sources; fewer samples become one batch.

    samples: int64 [n, T + 1] per source.
    """
    rows = [row for group in zip_longest(*samples) for row in group if row is not None]
    count = min(most, max(1, len(rows) // size))
    mixed = torch.from_numpy(np.stack(rows[: count * size]))
    return tuple(mixed.chunk(count))
