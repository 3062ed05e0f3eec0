"""The device time of a step by type of layer: GEMMs, quantization and all other kernels of a layer.

A step runs kernel by kernel under PyTorch's profiler, with a range around every layer. A kernel is attributed
to the innermost range that launched it; in the backward pass, by autograd's number of the forward call.
"""

from collections import Counter, defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from fourbits.bench.steps.training_step import TrainingStep
from fourbits.model.attention import Attention
from fourbits.model.layers import FFN, RMSNorm
from fourbits.model.mamba2 import Mamba2
from fourbits.train.profile import kernels_by_range

#: mixer -> names for its linear layers, and for the rest of it
_MIXERS: dict[type[nn.Module], tuple[str, str]] = {
    Mamba2: ("Mamba linears", "scan"),
    Attention: ("attention linears", "attention"),
    FFN: ("FFN linears", "activation"),
}
_HEAD, _NORM, _EMBEDDING, _OPTIMIZER = "head", "norm", "embedding", "optimizer"
_LOSS, _REST = "loss", "residuals and gradient sums"
#: profiler range -> type of layer
_RANGES = {"summed_cross_entropy": _LOSS, "Optimizer.step": _OPTIMIZER}
_PREFIX = "layer type: "
_TABLE_ROWS = 25


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Device seconds of one micro-batch and one optimizer step, by type of layer and by kernel."""

    seconds: dict[str, float]
    #: (kernel, seconds, calls), the slowest first
    kernels: tuple[tuple[str, float, int], ...]

    @property
    def total(self) -> float:
        """Seconds of all kernels."""
        return sum(self.seconds.values())


def layer_times(step: TrainingStep) -> LayerTimes:
    """Profile one micro-batch of a step that has run before. The step's device must be a GPU."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with _ranges(step.model), profile(activities=activities, acc_events=True) as recorded:
        step.one_micro_batch()
        torch.cuda.synchronize()
    return summarize(recorded.events() or ())


def summarize(events: Any) -> LayerTimes:
    """The times in a profiler's events, by type of layer and by kernel."""
    seconds: dict[str, float] = defaultdict(float)
    by_kernel: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    names = [*_RANGES, *(_PREFIX + kind for kind in sorted(_kinds(), key=len, reverse=True))]
    for kernel, found, microseconds in kernels_by_range(events, names):
        kind = _REST if found is None else _RANGES.get(found) or found.removeprefix(_PREFIX)
        seconds[kind] += microseconds * 1e-6
        by_kernel[kernel] += microseconds * 1e-6
        calls[kernel] += 1
    slowest = tuple((name, time, calls[name]) for name, time in _largest(by_kernel)[:_TABLE_ROWS])
    return LayerTimes(dict(_largest(seconds)), slowest)


def _largest(seconds: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: item[1], reverse=True)


@contextmanager
def _ranges(model: nn.Module) -> Generator[None]:
    """Add a profiler range around every layer of a known type."""
    open_ranges: list[Any] = []
    handles = []

    def enter(kind: str) -> Any:
        def hook(*_: object) -> None:
            open_ranges.append(record_function(_PREFIX + kind))
            open_ranges[-1].__enter__()

        return hook

    def leave(*_: object) -> None:
        open_ranges.pop().__exit__(None, None, None)

    for module, kind in _kinds_of(model):
        handles.append(module.register_forward_pre_hook(enter(kind)))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _kinds_of(model: nn.Module) -> list[tuple[nn.Module, str]]:
    found: list[tuple[nn.Module, str]] = []
    for name, module in model.named_modules():
        if linears_and_rest := _MIXERS.get(type(module)):
            linears, rest = linears_and_rest
            found.append((module, rest))
            found += [(child, linears) for child in module.children() if isinstance(child, nn.Linear)]
        elif isinstance(module, RMSNorm):
            found.append((module, _NORM))
        elif name in ("head", "embed"):
            found.append((module, _HEAD if name == "head" else _EMBEDDING))
    return found


def _kinds() -> list[str]:
    return [kind for pair in _MIXERS.values() for kind in pair] + [_HEAD, _NORM, _EMBEDDING]
