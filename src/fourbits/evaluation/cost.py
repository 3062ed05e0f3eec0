"""The loss that a recipe costs a model: BF16 and quantized forward passes compared token by token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fourbits.evaluate import EvaluationRanks, HeldOut, Loss, own_batches, split_sample
from fourbits.generate.decoder import ready
from fourbits.generate.held import HeldLayer, in_use
from fourbits.model.lm import LanguageModel
from fourbits.model.loss import chunk_limit


@dataclass(frozen=True, slots=True)
class Difference:
    """BF16 and quantized forward passes on one source.

    agreement: share of positions at which both predict the same token. divergence: the mean over tokens of
    KL(BF16 || quantized), in nats.
    """

    bf16: Loss
    quantized: Loss
    agreement: float
    divergence: float

    def of_quantized(self) -> dict[str, float]:
        """The quantized pass as plain values."""
        return loss_values(self.quantized) | {
            "agreement": self.agreement,
            "divergence": self.divergence,
        }


def loss_values(loss: Loss) -> dict[str, float]:
    """A loss as plain values."""
    return {"loss": loss.per_token, "bits_per_byte": loss.bits_per_byte, "tokens": loss.tokens}


def differences(
    model: LanguageModel,
    layers: Sequence[HeldLayer],
    sources: Mapping[str, HeldOut],
    batch_size: int,
    ranks: EvaluationRanks,
) -> dict[str, Difference]:
    """The difference between quantized and BF16 layers on each source. model: in BF16; layers: calibrated.

    ranks: processes that share the batches, see `evaluate`.
    """
    found: dict[str, Difference] = {}
    for name, held_out in sources.items():
        batches = list(held_out.samples.split(batch_size))
        with ready(model):
            own = [
                _summed(model, layers, batch.to(model.embed.weight.device))
                for batch in own_batches(batches, ranks)
            ]
        each = ranks.all(torch.stack(own).flatten()).unflatten(1, (-1, 4))  # [world, batches, 4]
        sums = torch.zeros(4, dtype=torch.float64, device="cpu")
        for batch in each.transpose(0, 1).flatten(0, 1)[: len(batches)]:
            sums += batch
        tokens = held_out.samples[:, 1:].numel()
        plain, quantized, agreeing, divergence = sums.tolist()
        found[name] = Difference(
            Loss(plain, tokens, held_out.num_bytes),
            Loss(quantized, tokens, held_out.num_bytes),
            agreeing / tokens,
            divergence / tokens,
        )
    return found


def total(parts: Mapping[str, Difference]) -> Difference:
    """The difference over all sources; each token has equal weight."""
    each = list(parts.values())
    tokens, num_bytes = sum(part.bf16.tokens for part in each), sum(part.bf16.num_bytes for part in each)
    return Difference(
        Loss(sum(part.bf16.nats for part in each), tokens, num_bytes),
        Loss(sum(part.quantized.nats for part in each), tokens, num_bytes),
        sum(part.agreement * part.bf16.tokens for part in each) / tokens,
        sum(part.divergence * part.bf16.tokens for part in each) / tokens,
    )


def _summed(model: LanguageModel, layers: Sequence[HeldLayer], samples: Tensor) -> Tensor:
    """Sums over the tokens of samples [B, T + 1]: both losses, agreeing tokens, divergence; fp64 [4]."""
    inputs, targets = split_sample(samples)
    plain = model.hidden(inputs).flatten(0, 1)
    with in_use(layers):
        quantized = model.hidden(inputs).flatten(0, 1)
    targets = targets.flatten()
    rows = max(1, chunk_limit(inputs.device) // model.config.vocab_size)
    sums = torch.zeros(4, dtype=torch.float64, device="cpu")
    for one, other, expected in zip(
        plain.split(rows), quantized.split(rows), targets.split(rows), strict=True
    ):
        p = model.head(one).float().log_softmax(-1)
        with in_use(layers):
            q = model.head(other).float().log_softmax(-1)
        nats = [-each.gather(1, expected[:, None]).sum() for each in (p, q)]
        agreeing = (p.argmax(-1) == q.argmax(-1)).sum()
        divergence = (p.exp() * (p - q)).sum()
        sums += torch.stack((*nats, agreeing.to(p.dtype), divergence)).double().cpu()
    return sums
