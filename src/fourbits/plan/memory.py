"""Bytes per GPU at the peak of a step, by part."""

import math
from dataclasses import dataclass

from fourbits.model.config import ModelConfig
from fourbits.model.counts import count_parameters
from fourbits.model.loss import GPU_CHUNK_LOGITS, chunk_length
from fourbits.plan.gathered import gathered
from fourbits.plan.gpus import Gpu
from fourbits.plan.layouts import Layout
from fourbits.plan.linears import LinearGroup
from fourbits.plan.saved import kept_weights, saved_per_token
from fourbits.plan.software import Software

#: the share of a GPU's memory that a plan fills: the rest is for the context, libraries and fragmentation
USABLE = 0.92


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one GPU. activations: saved inputs of linear layers, and the rest; see saved.py."""

    masters: float
    gradients: float
    optimizer: float
    linear_inputs: float
    other_activations: float
    kept_weights: float
    gathered: float
    logits: float

    @property
    def parts(self) -> dict[str, float]:
        """By name, for tables."""
        return {name.replace("_", " "): getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def total(self) -> float:
        """The peak, in the loss of a step's last micro-batch; an upper bound where it is also the first."""
        return sum(self.parts.values())


def memory_of(
    model: ModelConfig,
    groups: list[LinearGroup],
    packs: bool,
    seq_len: int,
    layout: Layout,
    gpu: Gpu,
    software: Software,
    loss_chunk: int = GPU_CHUNK_LOGITS,
) -> Memory:
    """The memory of a step. packs: saved inputs of quantized layers are codes and scales; loss_chunk: logits
    per chunk of the loss.
    """
    parameters = sum(count_parameters(model).values()) / layout.tensor
    tokens = layout.micro_batch * seq_len
    blocks = len(model.pattern)
    saved = saved_per_token(model, groups, packs, software)
    share = _held(layout, blocks) / layout.tensor
    kept = kept_weights(groups, gpu, software) / layout.tensor
    return Memory(
        masters=4 * parameters / layout.shard,
        gradients=_gradients(parameters, layout, software),
        optimizer=8 * parameters / layout.shard,
        linear_inputs=saved.inputs * tokens * share,
        other_activations=saved.rest * tokens * share
        + 2.0 * model.d_model * tokens * layout.recomputed * blocks,
        kept_weights=kept * _held(layout, blocks),
        gathered=_gathered(model, groups, parameters, layout, software),
        logits=_logits(model, tokens // layout.tensor, loss_chunk),
    )


def _held(layout: Layout, blocks: int) -> float:
    """The share of the activations that is held at once: of blocks that are not recomputed, and of one."""
    return min(1.0, 1 - layout.recomputed + layout.recomputed / blocks)


def _gradients(parameters: float, layout: Layout, software: Software) -> float:
    """FP32 gradients: of the shard, and of all parameters where micro-batches add up before they are summed
    over ranks.
    """
    if layout.shard == 1:
        return 4 * parameters
    adds_up = software.sums_once and layout.adds_up
    return 4 * parameters / layout.shard + (4 * parameters if adds_up else 0)


def _gathered(
    model: ModelConfig, groups: list[LinearGroup], parameters: float, layout: Layout, software: Software
) -> float:
    """Weights gathered from shards: of two groups of blocks, or of all where they are kept, with one group's
    gradients, and of both ends. Ranks that share layers are shards of the ends, too, which are gathered
    whole.
    """
    ends = (1 if model.tie_embeddings else 2) * model.vocab_size * model.d_model
    if layout.shard == 1:
        return software.weight_bytes * ends if layout.tensor > 1 else 0.0
    block = (parameters - ends / layout.tensor) / len(model.pattern)
    sent = gathered(model, groups, layout, software).per_block(model)
    together = max(1, math.ceil(layout.gather_weights / block))  # blocks that share a gather
    held = min(2 * together if software.regathers else len(model.pattern), len(model.pattern))
    return held * sent + software.weight_bytes * ends + 4 * block * together


def _logits(model: ModelConfig, tokens: int, most: int) -> float:
    """Logits of a chunk and their gradients, and the head: in BF16, and the gradients of a chunk and of those
    before it. tokens: of a rank's own.
    """
    chunk = chunk_length(tokens, model.vocab_size, most)
    head = model.vocab_size * model.d_model
    several = 2 if chunk < tokens else 1
    return 4.0 * chunk * model.vocab_size + head * (2 + 4 * several) + 2.0 * tokens * model.d_model
