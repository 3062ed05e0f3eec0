"""How N GPUs share a step: replicas and shards, micro-batches, recomputation, tensor parallelism."""

from dataclasses import dataclass
from typing import Literal

from fourbits.train.parallel import ParallelConfig, Reshard

Recompute = Literal["none", "selective", "full"]
#: the share of the blocks that each kind of activation checkpointing recomputes
RECOMPUTED: dict[Recompute, float] = {"none": 0.0, "selective": 0.5, "full": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """replicate x shard x tensor GPUs; each group of `tensor` GPUs computes `accumulation` micro-batches of
    micro_batch sequences in a step.

    gradients: bytes of a gradient as it is summed over ranks; gather, gather_weights, reshard, accumulate: as
    in `parallel`; recomputed: the share of blocks that the backward pass computes again.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    micro_batch: int
    accumulation: int
    recomputed: float = 0.0
    gradients: int = 4
    gather: Literal["packed", "masters"] = "packed"
    gather_weights: int = 0
    reshard: Reshard = "pass"
    accumulate: Literal["unsharded", "sharded"] = "unsharded"

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.replicate * self.shard * self.tensor

    @property
    def data_ranks(self) -> int:
        """Groups that compute different sequences."""
        return self.replicate * self.shard

    @property
    def samples(self) -> int:
        """Sequences of a step."""
        return self.data_ranks * self.micro_batch * self.accumulation

    @property
    def gathers(self) -> float:
        """How often per micro-batch weights are gathered from shards: for both passes, or once per step."""
        return 2.0 if self.reshard == "pass" else 1 / self.accumulation

    @property
    def adds_up(self) -> bool:
        """Whether gradients of all parameters add up over micro-batches before they are summed over ranks."""
        return self.accumulation > 1 and self.accumulate == "unsharded"

    @property
    def recompute(self) -> str:
        """The value of train.activation_checkpointing, or the share."""
        names = {share: name for name, share in RECOMPUTED.items()}
        return names.get(self.recomputed, f"{self.recomputed:.0%} of blocks")


def unsupported(layout: ParallelLayout) -> str | None:
    """Why this trainer cannot run a layout, or None."""
    try:
        ParallelConfig(replicate=layout.replicate, shard=layout.shard, tensor=layout.tensor)
    except ValueError as error:
        return f"parallel.{str(error).partition('. ')[0]}"
    return None
