"""The cost of quantizing a trained model's forward pass: loss, and divergence of its predictions.

The loss of one quantized layer moves by less than the noise of a few thousand tokens, and may even fall. The
divergence, the mean KL divergence of the predictions from BF16's in nats per token, is never negative, has
far less noise, and equals the increase of the loss if BF16's predictions are the true frequencies. The head's
logits are computed in FP32, because rounding them to BF16 would hide small divergences.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from fourbits.compare.proxies.findings import Cost
from fourbits.compare.statistics.interval import margin
from fourbits.compare.techniques.trained import TrainedModel
from fourbits.evaluate import split_sample, uncompiled
from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from fourbits.recipe.recipe import Recipe

#: largest number of logits in memory at a time
CHUNK = 1 << 24


@dataclass(frozen=True, slots=True)
class Exact:
    """BF16's forward pass: for each batch its loss, nats per token, and the head's input, [tokens, D]."""

    losses: tuple[float, ...]
    hidden: tuple[Tensor, ...]

    @property
    def loss(self) -> float:
        """Mean over batches."""
        return sum(self.losses) / len(self.losses)


def exact_forward(trained: TrainedModel) -> Exact:
    """The forward pass of the model in BF16."""
    hidden = _hidden(trained)
    losses = [_compared(trained, number, state, state)[0] for number, state in enumerate(hidden)]
    return Exact(tuple(losses), tuple(hidden))


def forward_cost(
    trained: TrainedModel, exact: Exact, recipe: Recipe, include: Sequence[str] | None = None
) -> Cost:
    """The cost of a recipe's forward pass. include: names of the layers to quantize; None for all."""
    with _converted(trained, recipe, include):
        hidden = _hidden(trained)
    pairs = [
        _compared(trained, number, state, base)
        for number, (state, base) in enumerate(zip(hidden, exact.hidden, strict=True))
    ]
    increases = [loss - base for (loss, _), base in zip(pairs, exact.losses, strict=True)]
    divergences = [divergence for _, divergence in pairs]
    return Cost(
        loss_increase=sum(increases) / len(increases),
        loss_margin=margin(increases),
        divergence=sum(divergences) / len(divergences),
    )


@contextmanager
def _converted(trained: TrainedModel, recipe: Recipe, include: Sequence[str] | None) -> Generator[None]:
    """Convert the model to a recipe inside the block, without gradients; back to BF16 afterwards."""
    convert(trained.model, replace(recipe, quantize_eval=True), include=include)
    set_step(trained.model, 0)
    try:
        yield
    finally:
        convert(trained.model, "bf16")


def _hidden(trained: TrainedModel) -> list[Tensor]:
    """The head's input, for each batch."""
    with torch.no_grad(), uncompiled(trained.model):
        return [trained.model.hidden(split_sample(batch)[0]).flatten(0, 1) for batch in trained.batches]


def _compared(trained: TrainedModel, number: int, state: Tensor, base: Tensor) -> tuple[float, float]:
    """Loss of `state`, and divergence of its predictions from those of `base`, nats per token."""
    targets = split_sample(trained.batches[number])[1].flatten()
    weight = trained.model.head.weight.detach().float()
    rows = max(1, CHUNK // len(weight))
    loss = divergence = 0.0
    with torch.no_grad():
        for own, other, target in zip(state.split(rows), base.split(rows), targets.split(rows), strict=True):
            found = functional.linear(own.float(), weight).log_softmax(1)
            loss += float(functional.nll_loss(found, target, reduction="sum"))
            if own is not other:
                exact = functional.linear(other.float(), weight).log_softmax(1)
                divergence += float(_divergence(exact, found))
    return loss / len(targets), divergence / len(targets)


def _divergence(exact: Tensor, found: Tensor) -> Tensor:
    """Sum over rows of the KL divergence of `found` from `exact`, log-probabilities [n, V].

    With d = log p - log q, sum p (d + exp(-d) - 1) equals sum p d, because q adds up to 1. Its terms are not
    negative, so they do not cancel if d is small.
    """
    d = exact - found
    return (exact.exp() * (d + torch.expm1(-d))).sum(1).double().sum()
