"""ParallelConfig: how several processes share a run. By design it does not affect the bits of the run."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fourbits.model.config import ModelConfig

#: when gathered weights are freed
Reshard = Literal["pass", "step"]
#: elements of a block, which no shard of a layer splits
_BLOCK = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How the processes that torchrun starts share a run; one process ignores it.

    The ranks form a mesh of replicate x shard x tensor. shard: the ranks over which masters, gradients and
    moments of one copy of the model are sharded (FSDP2); null: all ranks / replicate / tensor. replicate:
    copies of the model, whose gradients are summed (hybrid sharding, such as one copy per node). tensor:
    neighbouring ranks that share the layers of blocks and the tokens of a micro-batch (tensor and sequence
    parallelism).
    gradients: the dtype in which gradients are summed over ranks; a single process sums in FP32. gather: the
    format in which a layer's weight is gathered from its shards, with equal bits: the most compact that its
    recipe allows (codes and scales, BF16 if the layer reads only that, else FP32), or FP32 masters.
    gather_weights: consecutive blocks are gathered and their gradients summed together, in groups of at
    least this many weights; 0: each block separately. reshard: gathered weights are freed after each pass
    through their blocks, which takes the least memory, or kept until a step's last micro-batch, so that they
    are gathered once per step. accumulate: gradients of a step's micro-batches add up unsharded and are
    summed over ranks once, or, in the memory of a shard, after every micro-batch. timeout: seconds without
    progress after which a rank is reported as hung and the run ends.
    """

    replicate: int = 1
    shard: int | None = None
    tensor: int = 1
    gradients: Literal["fp32", "bf16"] = "fp32"
    gather: Literal["packed", "masters"] = "packed"
    gather_weights: int = 64 << 20
    reshard: Reshard = "pass"
    accumulate: Literal["unsharded", "sharded"] = "unsharded"
    timeout: float = 900.0

    def __post_init__(self) -> None:
        for name in ("replicate", "shard", "tensor"):
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                remedy = "null, for all ranks that are left" if name == "shard" else "1 for one process"
                raise ValueError(f"{name} must be at least 1, got {value}. Set it to {remedy}.")
        if self.gather_weights < 0:
            raise ValueError(
                f"gather_weights must be at least 0, got {self.gather_weights}. Set it to 0 to "
                "gather each block by itself."
            )
        if self.timeout <= 0:
            raise ValueError(
                f"timeout must be above 0 seconds, got {self.timeout}. Set it to 900, the default."
            )


class MeshShape(NamedTuple):
    """Ranks in each dimension of a run's mesh. Neighbouring ranks differ in `tensor`, then in `shard`."""

    replicate: int
    shard: int
    tensor: int

    @property
    def data(self) -> int:
        """Number of ranks with separate micro-batches, or of groups of ranks that share micro-batches."""
        return self.replicate * self.shard


def mesh_shape(config: ParallelConfig, world: int) -> MeshShape:
    """The mesh of `world` ranks. Raises ValueError if they do not fit."""
    if world % config.tensor:
        raise ValueError(
            f"parallel.tensor must divide the number of ranks, {world}, got {config.tensor}. "
            f"Start {_count(_nearest(world, config.tensor))}, or set parallel.tensor to 1."
        )
    left = world // config.tensor
    if left % config.replicate:
        raise ValueError(
            f"parallel.replicate must divide the number of ranks{_per(config)}, {left}, got "
            f"{config.replicate}. Start {_count(_nearest(left, config.replicate) * config.tensor)}, or set "
            "parallel.replicate to 1."
        )
    shard = left // config.replicate
    if config.shard not in (None, shard):
        raise ValueError(
            f"parallel.shard must be ranks{_per(config)} / parallel.replicate = {left} / {config.replicate} "
            f"= {shard}, got {config.shard}. Set it to null, which fits any number of ranks, or start "
            f"{_count(config.replicate * (config.shard or 1) * config.tensor)}."
        )
    return MeshShape(config.replicate, shard, config.tensor)


class Uneven(NamedTuple):
    """A size of a model that does not divide among the ranks of tensor parallelism.

    each: what each rank needs of it.
    """

    name: str
    size: int
    multiple: int
    each: str


def uneven(model: ModelConfig, seq_len: int, tensor: int) -> Iterator[Uneven]:
    """Sizes that keep `tensor` ranks from sharing a model's layers: heads, groups and blocks stay whole."""
    blocks = f"whole blocks of {_BLOCK}"
    sizes = [("train.seq_len", seq_len, tensor, "as many tokens")]
    if model.uses("-T"):
        sizes.append(("model.d_ffn", model.d_ffn, _BLOCK * tensor, f"{blocks} features"))
    if model.uses("*T"):
        sizes += [
            ("model.num_heads", model.num_heads, tensor, "whole heads"),
            ("model.num_kv_heads", model.num_kv_heads, tensor, "whole heads of K and V"),
        ]
        width = model.num_kv_heads * model.head_dim
        name = "model.num_kv_heads * model.head_dim"
        sizes.append((name, width, _BLOCK * tensor, f"{blocks} rows of k_proj and v_proj"))
    if model.uses("M"):
        heads, state = model.mamba_num_heads, model.num_groups * model.state_size
        sizes += [
            ("model.num_groups", model.num_groups, tensor, "whole groups of Mamba heads"),
            # in_proj has one row dt per head
            ("model.mamba_num_heads", heads, _BLOCK * tensor, f"{blocks} of in_proj's rows dt, one per head"),
            (
                "model.num_groups * model.state_size",
                state,
                _BLOCK * tensor,
                f"{blocks} of in_proj's rows B and C",
            ),
        ]
    for name, size, multiple, each in sizes:
        if size % multiple:
            yield Uneven(name, size, multiple, each)


def fitting_ranks(model: ModelConfig, seq_len: int, below: int) -> int:
    """The largest number of ranks, fewer than `below`, that can share a model's layers; at least 1."""
    numbers = range(min(below - 1, seq_len), 1, -1)
    return next((n for n in numbers if seq_len % n == 0 and not [*uneven(model, seq_len, n)]), 1)


def require_even(model: ModelConfig, seq_len: int, tensor: int) -> None:
    """Raises ValueError for a model that `tensor` ranks cannot share."""
    first = next(uneven(model, seq_len, tensor), None) if tensor > 1 else None
    if first is not None:
        raise ValueError(
            f"parallel.tensor {tensor}: {first.name} must be a multiple of {first.multiple}, so that each "
            f"rank has {first.each}, got {first.size}. Set parallel.tensor to "
            f"{fitting_ranks(model, seq_len, tensor)}."
        )


def micro_batches(accumulation: int, rank: int, world: int, tensor: int = 1) -> range:
    """The micro-batches of a step that a rank computes: a step is the same on any number of ranks.

    accumulation: micro-batches of a step on all ranks together; rank, world: among those with different
    micro-batches; tensor: ranks that share them. Raises ValueError if they do not divide.
    """
    if accumulation % world:
        above = -(-accumulation // world) * world
        below = above - world
        counts = f"{below} or {above}" if below else f"{above}"
        fitting = max(count for count in range(1, world) if accumulation % count == 0)
        raise ValueError(
            f"train.gradient_accumulation must be a multiple of the number of ranks"
            f"{' / parallel.tensor' if tensor > 1 else ''}, {world}, because a step has as many "
            f"micro-batches on any number of ranks; got {accumulation}. Nearest: {counts}. Or start "
            f"{_count(fitting * tensor)}."
        )
    own = accumulation // world
    return range(rank * own, (rank + 1) * own)


def _nearest(world: int, factor: int) -> int:
    return max(factor, world // factor * factor)


def _count(ranks: int) -> str:
    return f"{ranks} ranks" if ranks > 1 else "1 rank"


def _per(config: ParallelConfig) -> str:
    return " / parallel.tensor" if config.tensor > 1 else ""
