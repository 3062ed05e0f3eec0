"""Bytes per GPU at the peak of a step, by part."""

from dataclasses import dataclass

from fourbits.model.config import ModelConfig
from fourbits.model.loss import GPU_CHUNK_LOGITS, chunk_length
from fourbits.plan.gathered import block_weights, blocks_per_gather, end_weights, gathered
from fourbits.plan.gpus import Gpu
from fourbits.plan.layouts import ParallelLayout
from fourbits.plan.linears import LinearGroup
from fourbits.plan.saved import kept_weights, saved_per_token
from fourbits.plan.software import Software

#: the share of a GPU's memory that a plan fills: the rest is for the context, libraries and fragmentation
USABLE = 0.92


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one GPU. linear_inputs, other_activations: what the forward pass saves (saved.py)."""

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
        """The bytes by name, for tables."""
        return {name.replace("_", " "): getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def total(self) -> float:
        """The peak: during the loss of a step's last micro-batch, or, over several ranks, while the last
        gradients are summed. For one rank with one micro-batch it is an upper bound.
        """
        return sum(self.parts.values())


def memory_of(
    model: ModelConfig,
    groups: list[LinearGroup],
    packs: bool,
    seq_len: int,
    layout: ParallelLayout,
    gpu: Gpu,
    software: Software,
    loss_chunk: int = GPU_CHUNK_LOGITS,
) -> Memory:
    """The memory of a step. packs: saved inputs of quantized layers are codes and scales; loss_chunk: logits
    per chunk of the loss.
    """
    own = block_weights(model, layout) + end_weights(model) / layout.tensor
    tokens, blocks = layout.micro_batch * seq_len, len(model.pattern)
    saved = saved_per_token(model, groups, packs, software)
    held, parts = _held(layout, blocks), layout.tensor
    inputs = (saved.inputs - saved.unsharded_inputs) / parts + saved.unsharded_inputs
    kept = kept_weights(groups, gpu, software) / parts
    in_loss = Memory(
        masters=4 * own / layout.shard,
        gradients=_gradients(model, layout, software),
        optimizer=8 * own / layout.shard,
        linear_inputs=inputs * tokens * held,
        other_activations=saved.rest * tokens * held / parts
        + 2.0 * model.d_model * tokens * layout.recomputed * blocks,
        kept_weights=kept * held,
        gathered=_gathered(model, groups, layout, software),
        logits=_logits(model, tokens // parts, loss_chunk),
    )
    if layout.shard * parts == 1:
        return in_loss
    return max(in_loss, _in_last_sum(in_loss, model, layout), key=lambda memory: memory.total)


def _in_last_sum(in_loss: Memory, model: ModelConfig, layout: ParallelLayout) -> Memory:
    """Memory at the end of a step's backward pass: gradients of the shard, and those of the whole embedding
    and head, with a copy of them that is summed over ranks. Where gradients add up in shards, FSDP2 holds the
    sums of the last micro-batch, which it added to those before, until its backward pass ends (inferred from
    a measured peak: docs/log.md, 2026-11-29).
    """
    zero = dict.fromkeys(in_loss.__dataclass_fields__, 0.0)
    sums = 2 if layout.accumulation > 1 and not layout.adds_up else 1
    summed = sums * in_loss.masters + 2 * 4 * end_weights(model)
    held = {"masters": in_loss.masters, "optimizer": in_loss.optimizer, "gradients": summed}
    return Memory(**zero | held)


def _held(layout: ParallelLayout, blocks: int) -> float:
    """The share of the activations that is held at once: of blocks that are not recomputed, and of one."""
    return min(1.0, 1 - layout.recomputed + layout.recomputed / blocks)


def _gradients(model: ModelConfig, layout: ParallelLayout, software: Software) -> float:
    """FP32 gradients during the loss of the last micro-batch, from the micro-batches before it: of all
    parameters where they add up before they are summed over ranks, else of the shard.
    """
    blocks, ends = block_weights(model, layout), end_weights(model)
    if layout.shard * layout.tensor == 1:
        return 4 * (blocks + ends)
    if layout.accumulation == 1:
        return 0.0
    if software.sums_once and layout.adds_up:
        return 4 * (blocks + ends)
    return 4 * (blocks + ends / layout.tensor) / layout.shard


def _gathered(
    model: ModelConfig, groups: list[LinearGroup], layout: ParallelLayout, software: Software
) -> float:
    """Weights gathered from shards: of two groups of blocks, or of all where they are kept, with one group's
    gradients, and of both ends.
    """
    whole = software.weight_bytes * end_weights(model)
    if layout.shard == 1:
        return float(whole if layout.tensor > 1 else 0)
    blocks, together = len(model.pattern), blocks_per_gather(model, layout)
    sent = gathered(model, groups, layout, software).blocks / blocks
    frees = software.regathers and layout.reshard == "pass"
    held = min(2 * together if frees else blocks, blocks)
    return held * sent + whole + 4 * together * block_weights(model, layout) / blocks


def _logits(model: ModelConfig, tokens: int, most: int) -> float:
    """Logits of a chunk and their gradients; the head in BF16, and its gradients from this chunk and from
    those before it. tokens: of one rank.
    """
    chunk = chunk_length(tokens, model.vocab_size, most)
    head = model.vocab_size * model.d_model
    several = 2 if chunk < tokens else 1
    return 4.0 * chunk * model.vocab_size + head * (2 + 4 * several) + 2.0 * tokens * model.d_model
