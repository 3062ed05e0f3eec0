"""Speed of experts, forward and backward, relative to BF16's grouped GEMM on the same FP32 master weights.

BF16 casts the masters in every step, and NVFP4 quantizes them; or both do so once, as in the later
micro-batches of a step. Gradients of weights are FP32 on both sides. Rows are already sorted by expert, and
the number of rows of each expert is on the device.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fourbits.bench.timing import (
    Measurements,
    Result,
    copy_bandwidth,
    host_medians,
    measured,
    medians,
    normal,
    product_rate,
)
from fourbits.linear.convert import convert
from fourbits.linear.step import set_step

#: (experts, mean tokens of an expert, in_features, out_features)
Size = tuple[int, int, int, int]
_GPU_SIZES: tuple[Size, ...] = ((64, 256, 2048, 1024), (128, 128, 2048, 768), (8, 2048, 4096, 14336))
_CPU_SIZES: tuple[Size, ...] = ((8, 64, 512, 256),)
#: goals of the first size on a GPU, with weights quantized in each step, and reused
_GOALS = 0.50, 0.65
_GROUPED: Callable[..., Tensor] | None = getattr(
    nn.functional, "grouped_mm", getattr(torch, "_grouped_mm", None)
)


class _Run(NamedTuple):
    """A step to measure: its name, its function, and the step with which its time is compared."""

    name: str
    step: Callable[[], object]
    baseline: int
    goal: float | None = None
    #: bytes that quantization moves in addition to those of BF16's casts
    extra_bytes: float | None = None


class Experts(nn.Module):
    """One linear layer per expert, as a model's code has them: FP32 master weights, a grouped GEMM."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x: [M, K], sorted by expert; ends: int32 [E], the end of each expert's rows -> [M, N]."""
        return grouped_mm(x, self.weight.to(x.dtype).transpose(-2, -1), offs=ends)


def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """PyTorch's grouped GEMM, or a loop of GEMMs on devices without one. weight: [E, K, N]."""
    if _GROUPED is not None:
        return _GROUPED(x, weight, offs=offs)
    counts = torch.diff(offs, prepend=offs.new_zeros(1)).tolist()
    return torch.cat([part @ weight[i] for i, part in enumerate(x.split(counts))])


def bench_experts(device: torch.device) -> Measurements:
    """Measure nvfp4 for equal and for uneven numbers of tokens, on a device."""
    rates = copy_bandwidth(device), product_rate(device)
    results: list[Result] = []
    for place, size in enumerate(_GPU_SIZES if device.type == "cuda" else _CPU_SIZES):
        goals = _GOALS if place == 0 and device.type == "cuda" else (None, None)
        results += _results(device, size, goals, rates[0])
    return measured("experts", device, tuple(results), rates)


def _results(
    device: torch.device, size: Size, goals: tuple[float | None, float | None], bandwidth: float
) -> list[Result]:
    label = "{}x{}x{}x{}".format(*size)
    runs = _runs(device, size, goals)
    seconds = medians([run.step for run in runs], device, repeats=15, ahead=True)
    hosts: Sequence[float | None] = [None] * len(runs)
    if device.type == "cuda":
        hosts = host_medians([run.step for run in runs], device)
    results: list[Result] = []
    for run, time, host in zip(runs, seconds, hosts, strict=True):
        base = seconds[run.baseline]
        ceiling = None if run.extra_bytes is None else base / (base + run.extra_bytes / bandwidth)
        results.append(
            Result(
                name=f"{label} {run.name}",
                seconds=time,
                value=base / time,
                unit=f"of {runs[run.baseline].name}",
                goal=run.goal,
                host_seconds=host,
                ceiling=ceiling,
            )
        )
    return results


def _runs(device: torch.device, size: Size, goals: tuple[float | None, float | None]) -> list[_Run]:
    """BF16 and NVFP4: weights cast or quantized in each step, then once; then uneven numbers of tokens."""
    experts, tokens, columns, rows = size
    x = normal(experts * tokens, columns, device=device).to(torch.bfloat16)
    dy = normal(experts * tokens, rows, device=device, seed=1).to(torch.bfloat16)
    masters = normal(experts, rows, columns, device=device, seed=2) * 0.02
    equal = torch.arange(1, experts + 1, dtype=torch.int32, device=device) * tokens
    uneven = uneven_ends(experts, tokens).to(device)
    plain, once, reused = Experts(masters), Experts(masters.to(torch.bfloat16)), converted_experts(masters)
    quantized = converted_experts(masters)
    activations = 8.0 * experts * tokens * (columns + rows)
    weights = 4.0 * experts * rows * columns
    return [
        _Run("bf16", _step(plain, x, dy, equal), 0),
        _Run("bf16, weights cast once", _step(once, x, dy, equal), 1),
        _Run("nvfp4", _step(quantized, x, dy, equal), 0, goals[0], activations + weights),
        _Run("nvfp4, weights reused", _step(reused, x, dy, equal, reuses=True), 1, goals[1], activations),
        _Run("bf16, uneven", _step(plain, x, dy, uneven), 4),
        _Run("nvfp4, uneven", _step(quantized, x, dy, uneven), 4, None, activations + weights),
    ]


def uneven_ends(experts: int, tokens: int) -> Tensor:
    """Ends of `experts * tokens` rows distributed unevenly, as by a router; the last expert gets none."""
    shares = torch.linspace(2.0, 0.0, experts, dtype=torch.float64, device="cpu")
    ends = (shares.cumsum(0) / shares.sum() * experts * tokens).round()
    return ends.to(torch.int32)


def _step(layer: Experts, x: Tensor, dy: Tensor, ends: Tensor, reuses: bool = False) -> Callable[[], object]:
    """Forward and backward with gradients of both inputs; those of weights are FP32 and not accumulated."""

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        if reuses:
            set_step(layer, 0, same_weights=True)
        layer(x.detach().requires_grad_(), ends).backward(dy)
        grad = layer.weight.grad
        if grad is not None and grad.dtype != torch.float32:
            grad.to(torch.float32)

    return step


def converted_experts(masters: Tensor) -> Experts:
    """Experts in nvfp4, from FP32 masters [E, N, K]."""
    layer = Experts(masters)
    convert(layer, "nvfp4", keep_first=0, keep_last=0)
    set_step(layer, 0)
    return layer
