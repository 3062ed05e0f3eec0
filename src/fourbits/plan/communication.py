"""What ranks send, and how much of it a step waits for: the model of docs/scaling.md with a GPU's links.

Weights of blocks are gathered before each forward and backward pass, or once per step, and gradients are
summed after the last micro-batch; both overlap with computation, but for embedding and head. Sums over
replicas do not overlap.
"""

from dataclasses import dataclass

from fourbits.model.config import ModelConfig
from fourbits.plan.gathered import block_weights, end_weights, gathered
from fourbits.plan.gpus import Gpu
from fourbits.plan.layouts import ParallelLayout
from fourbits.plan.linears import LinearGroup
from fourbits.plan.machine import Machine
from fourbits.plan.rates import Rates
from fourbits.plan.software import Software

#: seconds that a collective takes per rank, besides sending
LATENCY = 3e-6


@dataclass(frozen=True, slots=True)
class Traffic:
    """Seconds: of a gather of all blocks, of summing their gradients over a replica's shards, of both for
    embedding and head, of sums over replicas, and of tensor parallelism in a micro-batch.
    """

    gather: float
    reduce: float
    ends: float
    replicas: float
    tensor: float


def bandwidth(gpu: Gpu, rates: Rates, ranks: int) -> float:
    """Bytes per second and GPU of a collective over this many GPUs."""
    if ranks <= gpu.domain:
        return gpu.link * rates.link
    return gpu.network * min(gpu.domain, 8) * rates.network


def traffic(
    model: ModelConfig, groups: list[LinearGroup], layout: ParallelLayout, machine: Machine, tokens: int
) -> Traffic:
    """The traffic of a layout. tokens: of a micro-batch."""
    gpu, rates = machine.gpu, machine.rates
    sent = gathered(model, groups, layout, machine.software)
    blocks, ends = block_weights(model, layout), end_weights(model)
    ranks, all_ranks, replicas = layout.shard, layout.shard * layout.tensor, layout.replicate
    rate = bandwidth(gpu, rates, all_ranks)
    others = (ranks - 1) / ranks  # the share that other ranks send
    latency = len(model.pattern) * (ranks - 1) * LATENCY
    replica_sums = 0.0
    if replicas > 1:
        inside = layout.gpus <= gpu.domain
        speed = gpu.link * rates.link if inside else gpu.network * rates.replicas
        own = blocks / ranks + ends / all_ranks
        replica_sums = 2 * layout.gradients * own * (replicas - 1) / replicas / speed
    tensor = 0.0
    if layout.tensor > 1:  # two sums of [tokens, d] in BF16 per branch, forward and backward
        summed = 2 * 2 * 2.0 * tokens * model.d_model * model.num_residual_branches
        tensor = summed * (layout.tensor - 1) / layout.tensor / bandwidth(gpu, rates, layout.tensor)
    return Traffic(
        gather=sent.blocks * others / rate + latency,
        reduce=layout.gradients * blocks * others / rate + latency,
        ends=(sent.ends + layout.gradients * ends) * (all_ranks - 1) / all_ranks / rate,
        replicas=replica_sums,
        tensor=tensor,
    )


def waiting(found: Traffic, micro_batch: float, layout: ParallelLayout, software: Software) -> float:
    """Seconds per step spent waiting for traffic. micro_batch: seconds for which a micro-batch computes."""
    once = 0.0
    if layout.shard == 1:
        gathers = last = 0.0
    elif layout.reshard == "step":
        # in the first micro-batch, whose forward pass is a third of it
        gathers, last = 0.0, found.reduce
        once = max(0.0, found.gather - micro_batch / 3)
    else:
        gathers = found.gather * (2 if software.regathers else 1)
        last = gathers + found.reduce
    # where every micro-batch sums its gradients, sums over replicas overlap with its backward pass, too
    if not software.sums_once or layout.accumulate == "sharded":
        each = max(0.0, last + found.replicas - micro_batch) + found.ends
        return layout.accumulation * each + once
    hidden = (layout.accumulation - 1) * max(0.0, gathers - micro_batch) + max(0.0, last - micro_batch)
    return hidden + once + found.ends + found.replicas
