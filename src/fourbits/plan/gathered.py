"""Bytes of the weights that a gather over shards sends, by the format of each (decision S 11).

Ranks that share layers hold a part of each block's weights, which is then sharded. Embedding and head are not
split by layer: they are sharded over all ranks of a copy, and gathered whole (decision S 13).
"""

import math
from dataclasses import dataclass

from fourbits.model.config import ModelConfig
from fourbits.model.counts import count_parameters
from fourbits.plan.layouts import ParallelLayout
from fourbits.plan.linears import LinearGroup, stored_bytes
from fourbits.plan.software import Software


@dataclass(frozen=True, slots=True)
class Gathered:
    """Bytes that a rank receives, its own part included: a rank's part of all blocks, and the whole embedding
    and head, which no block hides.
    """

    blocks: float
    ends: float


def gathered(
    model: ModelConfig, groups: list[LinearGroup], layout: ParallelLayout, software: Software
) -> Gathered:
    """The bytes that a rank receives in a gather of all blocks, and of embedding and head."""
    width = float(software.weight_bytes)
    embedding = width * model.vocab_size * model.d_model
    head = 0.0
    linears = 0.0
    for group in groups:
        size = group.weights * _bytes(group, layout, software)
        if group.kind == "head and loss":
            head += 0.0 if model.tie_embeddings else size
        else:
            linears += size
    counts = count_parameters(model)
    rest = width * (counts["norm"] + counts["conv"] + counts["scan"])
    return Gathered((linears + rest) / layout.tensor, embedding + head)


def end_weights(model: ModelConfig) -> int:
    """Weights of embedding and head."""
    return (1 if model.tie_embeddings else 2) * model.vocab_size * model.d_model


def block_weights(model: ModelConfig, layout: ParallelLayout) -> float:
    """Weights of all blocks (and the final norm) on one of the ranks that share layers."""
    return (sum(count_parameters(model).values()) - end_weights(model)) / layout.tensor


def blocks_per_gather(model: ModelConfig, layout: ParallelLayout) -> int:
    """How many blocks share a gather (decision S 12)."""
    blocks = len(model.pattern)
    return min(blocks, max(1, math.ceil(layout.gather_weights * blocks / block_weights(model, layout))))


def gathers_packed(group: LinearGroup, layout: ParallelLayout, software: Software) -> bool:
    """Whether shards of a weight are quantized before they are gathered."""
    if not group.packable or layout.gather == "masters" or not software.packs_gathers:
        return False
    size = group.table.fprop.rhs.block_size
    return size is not None and group.outputs % (layout.shard * size[0]) == 0


def _bytes(group: LinearGroup, layout: ParallelLayout, software: Software) -> float:
    """Bytes per weight: codes where no shard splits a block and Dgrad reuses them, else BF16, else FP32."""
    if not software.packs_gathers or layout.gather == "masters":
        return float(software.weight_bytes)
    spec = group.table.fprop.rhs
    size = spec.block_size
    if gathers_packed(group, layout, software) and size is not None:
        return stored_bytes(spec) - (1 - 1 / size[0]) / size[1]  # one scale per block, not per row
    return 2.0 if group.outputs % layout.shard == 0 else 4.0
