"""audit: whether the layers that a conversion claims to quantize are the ones that run.

A layer has no effect where other code multiplies by its weight without calling it. Its weight then gets a
gradient although it was never called. Eager calls leave a plan in their layer, and operators record layer
and shape, so the audit adds no work to a step; the first step of any optimizer after a conversion, when there
are gradients, compares the two once and warns.
"""

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fourbits.linear.arguments import model_parts
from fourbits.linear.health import described, gradients_seen
from fourbits.linear.layer_state import converted_state
from fourbits.linear.ops import calls_seen
from fourbits.linear.stacked.layer import converted_layers
from fourbits.linear.weights import named_modules

#: optimizer steps after which the audit gives up on a model that was never called
_PATIENCE = 64


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What was claimed and what ran; names of layers, and weights as shares of all that GEMMs read."""

    called: tuple[str, ...]
    #: not called, although a gradient reached the weight: other code multiplies by it, in high precision
    bypassed: tuple[str, ...]
    #: not called, without a gradient: not needed so far, or frozen and perhaps bypassed
    unused: tuple[str, ...]
    #: quantized share of the weights that GEMMs read, as the summary has it, and as it ran
    claimed_share: float
    called_share: float
    #: findings about gradients, each with its remedy
    gradients: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"called {len(self.called)}, bypassed {len(self.bypassed)}, unused {len(self.unused)} quantized "
            f"layers; {self.claimed_share:.1%} of the weights claimed, {self.called_share:.1%} called"
        ]
        lines += [f"  bypassed: {name}" for name in self.bypassed]
        lines += [f"  unused: {name}" for name in self.unused]
        return "\n".join([*lines, *(f"  {finding}" for finding in self.gradients)])


class _Watched:
    """A conversion whose first training step is still to come."""

    def __init__(self, layers: Sequence[tuple[str, Any]]) -> None:
        self.layers = [(name, weakref.ref(module)) for name, module in layers]
        self.steps = 0

    def alive(self) -> list[tuple[str, Any]]:
        """Its layers that are still converted."""
        found = ((name, reference()) for name, reference in self.layers)
        return [(name, module) for name, module in found if module is not None and converted_state(module)]


_watched: list[_Watched] = []
_hooks: list[Any] = []


def audit(model: nn.Module | Sequence[nn.Module]) -> AuditReport:
    """Compare the layers that are quantized with those that were called since the conversion.

    model: what `convert` was given. Raises ValueError for what is no module.

    Call it after a training step, best between backward and the optimizer's step, while the gradients that
    show a bypassed layer are there. On a GPU it reads a few numbers from the device.
    """
    return _compared(list(converted_layers(named_modules(model_parts(model, "audit")))))


def watch(modules: Sequence[tuple[str, nn.Module]]) -> None:
    """Have the first training step after a conversion audited."""
    watch_layers(list(converted_layers(modules)), modules)


def watch_layers(layers: Sequence[tuple[str, Any]], modules: Sequence[tuple[str, nn.Module]] = ()) -> None:
    """Have the next training step audited for these layers. modules: whose earlier audits are dropped."""
    converted = {id(module) for _, module in modules} | {id(layer) for _, layer in layers}
    for watched in _watched:
        watched.layers = [(name, ref) for name, ref in watched.layers if id(ref()) not in converted]
    for _, module in layers:  # of another model that had these numbers
        for key in _operator_keys(module):
            calls_seen.discard(key)
            gradients_seen.pop(key, None)
    if layers:
        _watched.append(_Watched(layers))
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_optimizer_step))


def _before_optimizer_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Audit the watched conversions that have run; after the last one the hook removes itself."""
    if torch.compiler.is_compiling() or (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    ):
        return
    if all(group.get("lr") == 0 for group in optimizer.param_groups):
        return  # torch.distributed.checkpoint makes up such a step, with gradients, to create optimizer state
    reports: list[AuditReport] = []
    for watched in list(_watched):
        layers = watched.alive()
        watched.steps += 1
        if any(_was_called(module) or _has_gradient(module) for _, module in layers):
            reports.append(_compared(layers))
        elif layers and watched.steps < _PATIENCE:
            continue
        _watched.remove(watched)
    if not _watched and _hooks:
        _hooks.pop().remove()
    for report in reports:
        _warn_of(report)


def _compared(layers: Sequence[tuple[str, Any]]) -> AuditReport:
    called = [name for name, module in layers if _was_called(module)]
    missing = {name: module for name, module in layers if not _was_called(module)}
    bypassed = [name for name, module in missing.items() if _has_gradient(module)]
    sizes = {name: sum(p.numel() for p in module.parameters() if p.dim() > 1) for name, module in layers}
    states = [(name, state) for name, module in layers if (state := converted_state(module)) is not None]
    numberings = {id(s.numbering): s.numbering for _, s in states if s.numbering is not None}
    whole = sum(numbering.weights for numbering in numberings.values()) or sum(sizes.values()) or 1
    return AuditReport(
        tuple(called),
        tuple(bypassed),
        tuple(name for name in missing if name not in bypassed),
        sum(sizes.values()) / whole,
        sum(sizes[name] for name in called) / whole,
        described([(name, _first_gradient(module)) for name, module in layers]),
    )


def _was_called(module: Any) -> bool:
    """Whether a layer ran, eagerly or in a traced graph; one expert's call counts for its group."""
    state = converted_state(module)
    assert state is not None
    if state.plain:  # in this phase nothing of it is claimed
        return True
    return bool(state.plans) or state.called or not calls_seen.isdisjoint(_operator_keys(module))


def _first_gradient(module: Any) -> Tensor | None:
    """What was measured of a layer's first output gradient, eagerly or in a traced graph."""
    state = converted_state(module)
    if state is not None and state.gradient is not None:
        return state.gradient
    return next(
        (found for key in _operator_keys(module) if (found := gradients_seen.get(key)) is not None), None
    )


def _operator_keys(module: Any) -> list[tuple[int, int, int]]:
    """What operators note of calls of a layer, or of a group's layers."""
    weight: Any = module.weight
    state = converted_state(module)
    assert state is not None
    as_stored = hasattr(module, "in_features") or getattr(module, "transposed", None) is False
    shape = weight.shape[-2:] if as_stored else weight.shape[-2:][::-1]
    count = len(weight) if weight.dim() == 3 else 1
    return [(state.layer + place, *shape) for place in range(count)]


def _has_gradient(module: Any) -> bool:
    return any(p.grad is not None for p in module.parameters() if p.dim() > 1)


def _warn_of(report: AuditReport) -> None:
    if report.bypassed:
        names = ", ".join(report.bypassed[:3]) + (", ..." if len(report.bypassed) > 3 else "")
        _warn(
            f"{_never_called(len(report.bypassed))}; other code multiplies by the weight in high precision "
            f"({names}). {report.claimed_share:.0%} of the weights were claimed, {report.called_share:.0%} "
            "ran. Name them in exclude; fourbits.audit(model) lists them."
        )
    for finding in report.gradients:
        _warn(finding)


def _never_called(count: int) -> str:
    layers, are = ("layer", "is") if count == 1 else ("layers", "are")
    return f"{count} {layers} that convert quantized {are} never called"


def _warn(text: str) -> None:
    warnings.warn(f"fourbits: {text}", stacklevel=4)
