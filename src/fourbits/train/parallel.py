"""ParallelConfig: how several processes share a run. Which bits a run has does not depend on it by design."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How the processes that torchrun starts share a run; one process ignores it.

    The ranks form a mesh of replicate x shard. shard: the ranks over which masters, gradients and moments of
    one copy of the model are cut (FSDP2); null: all ranks / replicate. replicate: copies of the model, whose
    gradients are summed (hybrid sharding, as one copy per node). tensor: ranks that share a layer; only 1.
    gradients: the dtype in which gradients are summed over ranks; FP32 is what one process does. gather: what
    travels when a layer's weight is put together from its shards, with equal bits: the shortest that its
    recipe allows (codes and scales, BF16 where it is read so, else FP32), or FP32 masters. gather_weights:
    consecutive blocks are gathered and their gradients summed together, in groups of at least so many
    weights; 0: each block by itself. accumulate: gradients of a step's micro-batches add up unsharded and are
    summed over ranks once, or, in the memory of a shard, after every micro-batch. timeout: seconds without
    progress after which a rank is reported as hung and the run ends.
    """

    replicate: int = 1
    shard: int | None = None
    tensor: int = 1
    gradients: Literal["fp32", "bf16"] = "fp32"
    gather: Literal["packed", "masters"] = "packed"
    gather_weights: int = 64 << 20
    accumulate: Literal["unsharded", "sharded"] = "unsharded"
    timeout: float = 900.0

    def __post_init__(self) -> None:
        for name in ("replicate", "shard", "tensor"):
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"parallel.{name} must be at least 1, got {value}.")
        if self.tensor > 1:
            raise ValueError(
                f"parallel.tensor must be 1, got {self.tensor}: tensor parallelism is not implemented. Use "
                "parallel.shard, which cuts masters, gradients and moments over ranks, and "
                "train.activation_checkpointing."
            )
        if self.gather_weights < 0:
            raise ValueError(
                f"parallel.gather_weights must be at least 0, which gathers each block by itself, got "
                f"{self.gather_weights}."
            )
        if self.timeout <= 0:
            raise ValueError(f"parallel.timeout must be above 0 seconds, got {self.timeout}.")


def mesh_shape(config: ParallelConfig, world: int) -> tuple[int, int]:
    """(replicate, shard) for `world` ranks. Raises ValueError if they do not fit."""
    if world % config.replicate:
        raise ValueError(
            f"parallel.replicate must divide the number of ranks, {world}, got {config.replicate}. "
            f"Start {_nearest(world, config.replicate)} ranks, or set parallel.replicate to 1."
        )
    shard = world // config.replicate
    if config.shard not in (None, shard):
        raise ValueError(
            f"parallel.shard must be ranks / parallel.replicate = {world} / {config.replicate} = {shard}, "
            f"got {config.shard}. Set it to null, which fits any number of ranks, or start "
            f"{config.replicate * (config.shard or 1)} ranks."
        )
    return config.replicate, shard


def micro_batches(accumulation: int, rank: int, world: int) -> range:
    """The micro-batches of a step that a rank computes: a step is the same on any number of ranks.

    accumulation: micro-batches of a step on all ranks together. Raises ValueError if they do not divide.
    """
    if accumulation % world:
        above = -(-accumulation // world) * world
        below = above - world
        counts = f"{below} or {above}" if below else f"{above}"
        fitting = max(count for count in range(1, world) if accumulation % count == 0)
        raise ValueError(
            f"train.gradient_accumulation must be a multiple of the number of ranks, {world}, because a step "
            f"has as many micro-batches on any number of ranks; got {accumulation}. Nearest: {counts}. Or "
            f"start {fitting} ranks."
        )
    own = accumulation // world
    return range(rank * own, (rank + 1) * own)


def _nearest(world: int, factor: int) -> int:
    return max(factor, world // factor * factor)
