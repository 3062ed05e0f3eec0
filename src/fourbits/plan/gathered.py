"""Bytes of the weights that a gather over shards sends, by the form of each one (decision S 11)."""

from dataclasses import dataclass

from fourbits.model.config import ModelConfig
from fourbits.model.counts import count_parameters
from fourbits.plan.layouts import Layout
from fourbits.plan.linears import LinearGroup, stored_bytes
from fourbits.plan.software import Software
from fourbits.recipe.recipe import has_4_bits


@dataclass(frozen=True, slots=True)
class Gathered:
    """Bytes of all weights as they travel, and of embedding and head, which no block hides."""

    total: float
    ends: float

    def per_block(self, model: ModelConfig) -> float:
        """The mean over blocks."""
        return (self.total - self.ends) / len(model.pattern)


def gathered(model: ModelConfig, groups: list[LinearGroup], layout: Layout, software: Software) -> Gathered:
    """What each of the ranks that share tensors receives, its own part included."""
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
    ranks = layout.tensor
    return Gathered((embedding + head + linears + rest) / ranks, (embedding + head) / ranks)


def travels_packed(group: LinearGroup, layout: Layout, software: Software) -> bool:
    """Whether shards of a weight are quantized before they are gathered."""
    size = group.table.fprop.rhs.block_size
    if not group.quantized or size is None or layout.gather == "masters" or not software.packs_gathers:
        return False
    if not has_4_bits(group.table):  # wider codes travel in BF16 (linear/packed_shards.py)
        return False
    return group.table.keeps_weight and group.outputs % (layout.shard * size[0]) == 0


def _bytes(group: LinearGroup, layout: Layout, software: Software) -> float:
    """Per weight: codes where no shard cuts a block and Dgrad needs no others, else BF16, else FP32."""
    if not software.packs_gathers or layout.gather == "masters":
        return float(software.weight_bytes)
    spec = group.table.fprop.rhs
    size = spec.block_size
    if travels_packed(group, layout, software) and size is not None:
        return stored_bytes(spec) - (1 - 1 / size[0]) / size[1]  # one scale per block, not per row
    return 2.0 if group.outputs % layout.shard == 0 else 4.0
