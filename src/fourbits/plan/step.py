"""The time of a step, part by part: GEMMs by shape, quantizers, attention, scan, elementwise work, optimizer,
and what communication and the host add.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

from fourbits.model.config import ModelConfig
from fourbits.model.counts import count_parameters, training_flops
from fourbits.model.loss import GPU_CHUNK_LOGITS, chunk_length
from fourbits.plan.communication import traffic, waiting
from fourbits.plan.gathered import blocks_per_gather, gathers_packed
from fourbits.plan.layouts import ParallelLayout
from fourbits.plan.linears import LinearGroup, gemms_of, stored_bytes, unit_of
from fourbits.plan.machine import Machine
from fourbits.plan.passes import attention_bytes, elementwise_bytes, loss_bytes, quantizer_bytes, tensors_of
from fourbits.plan.rates import copy_rate, gemm_seconds

#: the forward pass as a share of forward and backward, by kind of work: what recomputation repeats
FORWARD = {"gemm": 1 / 3, "attention": 0.3, "elementwise": 0.4, "quantization": 0.4}
#: bytes per weight that AdamW and the gradient norm move: read 20, write 12
OPTIMIZER_BYTES = 32.0
#: kernels per block, forward and backward, and per quantized linear layer
KERNELS, QUANTIZED_KERNELS = 40, 6
QUANTIZATION, OPTIMIZER, WEIGHTS = "quantization", "optimizer", "weights cast and gradients added"
WAITING, HOST, RECOMPUTATION = "communication not hidden", "waiting for the host", "recomputation"


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of an optimizer step by part, and those of GEMMs that run on tensor cores other than BF16's."""

    parts: dict[str, float]
    low_precision: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self.parts.values())


def step_of(
    model: ModelConfig, groups: list[LinearGroup], seq_len: int, layout: ParallelLayout, machine: Machine
) -> Step:
    """The step of a layout on a machine."""
    tokens = layout.micro_batch * seq_len
    parts, low = _gemms(model, groups, tokens, layout, machine)
    parts[QUANTIZATION] = _quantization(groups, tokens, layout, machine)
    parts |= _outside_linears(model, seq_len, tokens, layout, machine)
    parts[WEIGHTS] = _weights(groups, layout, machine)
    gemms = sum(parts[kind] for kind in dict.fromkeys(g.kind for g in groups) if kind != "head and loss")
    parts[RECOMPUTATION] = layout.recomputed * (
        FORWARD["gemm"] * gemms
        + FORWARD["attention"] * (parts["attention"] + parts["SSD scan"])
        + FORWARD["elementwise"] * parts["norms and elementwise"]
        + FORWARD["quantization"] * parts[QUANTIZATION]
    )
    found = traffic(model, groups, layout, machine, tokens)
    parts["tensor parallelism"] = found.tensor
    launches = KERNELS * len(model.pattern) + QUANTIZED_KERNELS * sum(g.count for g in groups if g.quantized)
    parts["between kernels"] = launches * machine.rates.launch
    micro_batch = sum(parts.values())
    parts = {name: seconds * layout.accumulation for name, seconds in parts.items()}
    parts[HOST] = layout.accumulation * max(0.0, _host(model, groups, layout, machine) - micro_batch)
    parts[OPTIMIZER] = (
        OPTIMIZER_BYTES * _parameters(model, layout) / layout.shard / _elementwise_rate(machine)
    )
    parts[WAITING] = waiting(found, micro_batch, layout, machine.software)
    return Step({k: v for k, v in parts.items() if v}, low * _gemm_repeats(layout))


def linear_seconds(
    model: ModelConfig, groups: list[LinearGroup], seq_len: int, layout: ParallelLayout, machine: Machine
) -> float:
    """Seconds of a step in the GEMMs of some groups, recomputed ones included."""
    kinds, _ = _gemms(model, groups, layout.micro_batch * seq_len, layout, machine)
    return sum(kinds.values()) * _gemm_repeats(layout)


def _gemm_repeats(layout: ParallelLayout) -> float:
    """How often a step runs the GEMMs of a micro-batch."""
    return layout.accumulation * (1 + FORWARD["gemm"] * layout.recomputed)


def _parameters(model: ModelConfig, layout: ParallelLayout) -> float:
    return sum(count_parameters(model).values()) / layout.tensor


def _copy(machine: Machine) -> float:
    return copy_rate(machine.gpu, machine.rates)


def _elementwise_rate(machine: Machine) -> float:
    """Bytes per second of elementwise work."""
    return _copy(machine) * machine.rates.elementwise


def _gemms(
    model: ModelConfig, groups: list[LinearGroup], tokens: int, layout: ParallelLayout, machine: Machine
) -> tuple[dict[str, float], float]:
    """Seconds of GEMMs by kind of layer, and of those in low precision."""
    kinds: dict[str, float] = defaultdict(float)
    low = 0.0
    for group in groups:
        head = group.kind == "head and loss"
        # ranks that share layers each compute a part of the loss
        own = tokens // layout.tensor if head else tokens
        rows = chunk_length(own, model.vocab_size, GPU_CHUNK_LOGITS) if head else own
        n, k = group.on_rank(layout.tensor)
        times = group.count * (own / rows)
        shapes = ((rows, n, k), (rows, k, n), (n, k, rows))
        for gemm, shape, wgrad in zip(gemms_of(group.table), shapes, (False, False, True), strict=True):
            unit = unit_of(gemm, machine.gpu)
            read = 2.0 if unit == "bf16" else stored_bytes(gemm.lhs)
            rate = "emulated" if unit == "bf16" and not gemm.high_precision else unit
            formats = (rate, read, 4.0 if wgrad else 2.0)
            spent = times * gemm_seconds(machine.gpu, machine.rates, shape, formats)
            kinds[group.kind] += spent
            low += spent if unit != "bf16" else 0.0
    return dict(kinds), low


def _quantization(groups: list[LinearGroup], tokens: int, layout: ParallelLayout, machine: Machine) -> float:
    """Seconds of quantizers in a micro-batch; of W once per step where the operand is kept, and of a shard
    where shards are gathered quantized.
    """
    total, software = 0.0, machine.software
    for group in groups:
        if not group.quantized:
            continue
        n, k = group.on_rank(layout.tensor)
        shared = group.readers if software.shares_inputs else 1
        packed = layout.shard > 1 and gathers_packed(group, layout, software)
        kept = (software.saves_weights and layout.shard == 1) or packed
        shards = layout.shard if packed else 1
        sizes = {
            "X": tokens * k * group.count / shared,
            "W": n * k * group.count / shards / (layout.accumulation if kept else 1),
            "dY": tokens * n * group.count,
        }
        for tensor, operands in tensors_of(group).items():
            read = 2.0 if tensor != "W" else float(software.weight_bytes)
            moved = quantizer_bytes(operands, read, machine.gpu, software) * sizes[tensor]
            stochastic = any(spec.stochastic for spec, _ in operands)
            share = machine.rates.quantize_stochastic if stochastic else machine.rates.quantize
            total += moved / (_copy(machine) * share)
    return total


def _outside_linears(
    model: ModelConfig, seq_len: int, tokens: int, layout: ParallelLayout, machine: Machine
) -> dict[str, float]:
    """Seconds in a micro-batch outside linear layers."""
    flops, rate, rates = training_flops(model, seq_len), _elementwise_rate(machine), machine.rates
    share = tokens // layout.tensor
    peak = machine.gpu.bf16_peak
    moved = sum(elementwise_bytes(model, machine.software.fused).values())
    chunks = share / chunk_length(share, model.vocab_size, GPU_CHUNK_LOGITS)
    head = 12.0 * model.vocab_size * model.d_model * (chunks - 1)
    return {
        "attention": share * (flops["attention"] / (peak * rates.attention) + attention_bytes(model) / rate),
        "SSD scan": share * flops["scan"] / (peak * rates.scan),
        "norms and elementwise": share * moved / rate,
        "loss": (share * loss_bytes(model) + head) / rate,
    }


def _weights(groups: list[LinearGroup], layout: ParallelLayout, machine: Machine) -> float:
    """Seconds in a micro-batch of casting FP32 weights to BF16 twice, and of adding up gradients."""
    cast = 2 * (machine.software.weight_bytes + 2.0) if machine.software.weight_bytes > 2 else 0.0
    added = 12.0 * (layout.accumulation - 1) / layout.accumulation
    moved = sum(g.weights * ((0.0 if g.quantized else cast) + added) for g in groups)
    return moved / layout.tensor / _elementwise_rate(machine)


def _host(model: ModelConfig, groups: list[LinearGroup], layout: ParallelLayout, machine: Machine) -> float:
    """Seconds in which the host queues a micro-batch; 0 where CUDA graphs replay it."""
    if machine.software.graphs and layout.gpus == 1:
        return 0.0
    rates = machine.rates
    linears = sum(g.count * (rates.host_quantized if g.quantized else rates.host_linear) for g in groups)
    messages = 0.0
    if layout.shard > 1:
        software = machine.software
        sums = 1 / layout.accumulation if software.sums_once and layout.accumulate == "unsharded" else 1
        times = min(layout.gathers, 2 if software.regathers else 1) + sums
        messages = times * math.ceil(len(model.pattern) / blocks_per_gather(model, layout))
    return linears + rates.host_block * model.num_residual_branches + rates.host_message * messages
