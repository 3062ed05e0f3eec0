"""Evaluation: validation loss in nats and bits per byte.

A loss per token depends on the tokenizer; bits per byte do not, so they compare across tokenizers:
bits per byte = nats / (ln 2 * bytes of the predicted text).
"""

import math
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fourbits.data.tokenizer import Tokenizer
from fourbits.model.lm import LanguageModel
from fourbits.model.loss import IGNORED
from fourbits.model.regions import RegionModule, compile_regions


@dataclass(frozen=True, slots=True)
class Loss:
    """Summed cross-entropy in nats over `tokens` predicted tokens, which decode to `num_bytes` bytes."""

    nats: float
    tokens: int
    num_bytes: int

    @property
    def per_token(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text."""
        return self.nats / (math.log(2) * max(self.num_bytes, 1))


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Fixed samples of one source, int64 [n, T + 1], and the number of bytes their targets decode to."""

    samples: Tensor
    num_bytes: int

    @classmethod
    def of(cls, samples: npt.NDArray[np.int64], tokenizer: Tokenizer) -> "HeldOut":
        """samples: int64 [n, T + 1]."""
        num_bytes = sum(len(tokenizer.decode(row[1:].tolist()).encode()) for row in samples)
        return cls(torch.from_numpy(samples), num_bytes)


class EvaluationRanks(Protocol):
    """The interface of the processes that share an evaluation. all: [k] of each -> [world, k]."""

    rank: int
    world: int

    def all(self, values: Tensor) -> Tensor:
        """Values of all processes."""
        ...


def evaluate(
    model: LanguageModel,
    sources: Mapping[str, HeldOut],
    batch_size: int,
    ranks: EvaluationRanks | None = None,
) -> dict[str, Loss]:
    """The loss on every source, in evaluation mode and without gradients; restores the model's mode.

    ranks: processes that share the batches alternately; losses are added in the order of batches, as in one
    process.
    """
    device = next(model.parameters()).device
    sums: dict[str, Tensor] = {}
    with torch.no_grad(), evaluation_mode(model):
        for name, held_out in sources.items():
            total = torch.zeros((), device=device, dtype=torch.float32)
            batches = list(_batches(held_out.samples, batch_size))
            own = batches if ranks is None else own_batches(batches, ranks)
            losses = [model.loss(*split_sample(b.to(device, non_blocking=True)))[0] for b in own]
            if ranks is not None:  # the ranks' batches alternate, so this is the order of one process
                losses = ranks.all(torch.stack(losses)).t().flatten()[: len(batches)].unbind()
            for loss in losses:
                total += loss
            sums[name] = total
    counts = {name: held_out.samples[:, 1:].numel() for name, held_out in sources.items()}
    return {name: Loss(float(sums[name]), counts[name], sources[name].num_bytes) for name in sources}


def total_loss(losses: Iterable[Loss]) -> Loss:
    """The loss over all sources; each token has equal weight."""
    parts = list(losses)
    return Loss(sum(p.nats for p in parts), sum(p.tokens for p in parts), sum(p.num_bytes for p in parts))


def split_sample(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets. samples: [B, T + 1], -100 allowed in targets only -> [B, T] each."""
    return samples[:, :-1].clamp(min=0), samples[:, 1:]


def unigram_counts(tokens: npt.NDArray[Any], vocab_size: int, limit: int = 1 << 24) -> npt.NDArray[np.int64]:
    """Occurrences of each token in `tokens`, or in 64 evenly spaced parts of `limit` tokens in total."""
    parts = [tokens]
    if len(tokens) > limit:
        starts = np.linspace(0, len(tokens) - limit // 64, 64, dtype=np.int64)
        parts = [tokens[start : start + limit // 64] for start in starts]
    counts = np.zeros(vocab_size, dtype=np.int64)
    for part in parts:
        counts += np.bincount(part, minlength=vocab_size)
    return counts


def unigram_entropy(counts: npt.ArrayLike) -> float:
    """Loss in nats per token of a model that knows only the token frequencies. counts: [V]."""
    share = np.asarray(counts, dtype=np.float64)
    share = share[share > 0] / share.sum()
    return float(-(share * np.log(share)).sum())


@contextmanager
def evaluation_mode(model: nn.Module) -> Generator[None]:
    """Set evaluation mode inside the block; restore the previous mode afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def uncompiled(model: nn.Module) -> Generator[None]:
    """Run regions eagerly inside the block; restore the previous mode afterwards."""
    mode = next((m.compile_mode for m in model.modules() if isinstance(m, RegionModule)), None)
    compile_regions(model, None)
    try:
        yield
    finally:
        compile_regions(model, mode)


def own_batches(batches: list[Tensor], ranks: EvaluationRanks) -> list[Tensor]:
    """Every world-th batch. All processes get as many, because a model's shards are gathered for each."""
    rounds = -(-len(batches) // ranks.world)
    return [batches[min(i * ranks.world + ranks.rank, len(batches) - 1)] for i in range(rounds)]


def _batches(samples: Tensor, size: int) -> Iterator[Tensor]:
    """Batches of equal size, so that one shape is compiled; ignored rows fill up the last."""
    for batch in samples.split(size):
        missing = size - len(batch)
        if missing:
            filling = batch[:1].expand(missing, -1).clone()
            filling[:, 1:] = IGNORED
            batch = torch.cat((batch, filling))
        yield batch
