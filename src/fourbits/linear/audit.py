"""audit: whether the layers that a conversion claims to quantize are the ones that run.

Converting a layer has no effect if other code multiplies by its weight without calling the layer. The weight
then gets a gradient although the layer was never called. Eager calls leave a plan in their layer, and
operators record layer and shape, so the audit adds no work to a step; the first step of any optimizer after a
conversion, when there are gradients, compares the two once and warns.
"""

import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fourbits.linear.arguments import model_parts
from fourbits.linear.audit_report import AuditReport
from fourbits.linear.dominant_tokens import CallKey, described, gradients_seen
from fourbits.linear.graph_products import record_products_of, was_multiplied
from fourbits.linear.layer_state import LayerState, converted_state
from fourbits.linear.ops import calls_seen
from fourbits.linear.stacked.layer import converted_layers
from fourbits.linear.weights import multiplied_weights, named_modules, other_parameters

#: optimizer steps after which the audit gives up on a model that was never called
_PATIENCE = 64


class _Watched:
    """A conversion before its first training step."""

    def __init__(self, layers: Sequence[tuple[str, Any]], others: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.layers = [(name, weakref.ref(module)) for name, module in layers]
        self._others = [(name, weakref.ref(parameter)) for name, parameter in others]
        self.steps = 0

    def others(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters that the conversion did not count."""
        found = ((name, reference()) for name, reference in self._others)
        return [(name, parameter) for name, parameter in found if parameter is not None]

    def alive(self) -> list[tuple[str, Any]]:
        """Its layers that are still converted."""
        found = ((name, reference()) for name, reference in self.layers)
        return [(name, module) for name, module in found if module is not None and converted_state(module)]


_watched: list[_Watched] = []
_hooks: list[Any] = []


def audit(model: nn.Module | Sequence[nn.Module], loss: Tensor | None = None) -> AuditReport:
    """Compare the layers that are quantized with those that were called since the conversion.

    model: what `convert` was given. loss: of a step without torch.compile, before or after its backward; its
    graph shows every product, while the report otherwise only has those before a quantized layer. Raises
    ValueError unless model is a module.

    Call it after a training step, best between backward and the optimizer's step, while the gradients exist
    that reveal a bypassed layer. On a GPU it reads a few numbers from the device.
    """
    modules = named_modules(model_parts(model, "audit"))
    if loss is not None:
        record_products_of(loss)
    return _compared(list(converted_layers(modules)), _not_counted(modules))


def watch(
    modules: Sequence[tuple[str, nn.Module]], others: Sequence[tuple[str, nn.Parameter, str]] = ()
) -> None:
    """Audit the first training step after a conversion. others: parameters that it did not count."""
    watch_layers(list(converted_layers(modules)), modules, others)


def watch_layers(
    layers: Sequence[tuple[str, Any]],
    modules: Sequence[tuple[str, nn.Module]] = (),
    others: Sequence[tuple[str, nn.Parameter, str]] = (),
) -> None:
    """Audit the next training step for these layers. modules: their earlier audits are dropped."""
    converted = {id(module) for _, module in modules} | {id(layer) for _, layer in layers}
    for watched in _watched:
        watched.layers = [(name, ref) for name, ref in watched.layers if id(ref()) not in converted]
    for _, module in layers:  # those of another model with the same layer numbers
        for key in _operator_keys(module):
            calls_seen.discard(key)
            gradients_seen.pop(key, None)
    if layers:
        _watched.append(_Watched(layers, [(name, parameter) for name, parameter, _ in others]))
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_optimizer_step))


def _not_counted(modules: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Parameter]]:
    """The parameters of two or more dimensions that appear in no row of the summary."""
    return [(name, each) for name, each, _ in other_parameters(modules, multiplied_weights(modules))]


def _before_optimizer_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Audit the watched conversions that have run; after the last one the hook removes itself."""
    if torch.compiler.is_compiling() or (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    ):
        return
    if all(group.get("lr") == 0 for group in optimizer.param_groups):
        return  # torch.distributed.checkpoint runs a fake step with gradients to create optimizer state
    reports: list[AuditReport] = []
    for watched in list(_watched):
        layers = watched.alive()
        watched.steps += 1
        if any(_is_plain(module) or _was_called(module) or _has_gradient(module) for _, module in layers):
            reports.append(_compared(layers, watched.others()))
        elif layers and watched.steps < _PATIENCE:
            continue
        _watched.remove(watched)
    if not _watched and _hooks:
        _hooks.pop().remove()
    for report in reports:
        _warn_of(report)


def _compared(layers: Sequence[tuple[str, Any]], others: Sequence[tuple[str, nn.Parameter]]) -> AuditReport:
    plain = [name for name, module in layers if _is_plain(module)]
    called = [name for name, module in layers if name not in plain and _was_called(module)]
    missing = {name: module for name, module in layers if name not in plain and not _was_called(module)}
    bypassed = [name for name, module in missing.items() if _has_gradient(module)]
    multiplied = {name: each.numel() for name, each in others if was_multiplied(each)}
    sizes = {name: _size(module) for name, module in layers}
    states = [(name, state) for name, module in layers if (state := converted_state(module)) is not None]
    numberings = {id(s.numbering): s.numbering for _, s in states if s.numbering is not None}
    whole = sum(numbering.weights for numbering in numberings.values()) or sum(sizes.values()) or 1
    return AuditReport(
        tuple(called),
        tuple(bypassed),
        tuple(name for name in missing if name not in bypassed),
        sum(sizes.values()) / whole,
        sum(sizes[name] for name in called) / (whole + sum(multiplied.values())),
        described([(name, _first_gradient(module)) for name, module in layers]),
        tuple(multiplied),
        tuple(plain),
        _phases([state for _, state in states]),
    )


def _phases(states: Sequence[LayerState]) -> tuple[str, ...]:
    """The active phases of schedules, each with its effect and the number of layers it affects."""
    found: list[str] = []
    for state in states:
        if state.phases is not None and state.numbering is not None:
            stage, phases = state.numbering.stage, state.phases.phases
            now = [phases[index][0] for index in (*stage.full, *stage.blending) if index in phases]
            found += [f"phase {phase.name} of the schedule: {phase.describe()}" for phase in now]
    counts = Counter(found)
    return tuple(f"{phase}, {count} {'layer' if count == 1 else 'layers'}" for phase, count in counts.items())


def _is_plain(module: Any) -> bool:
    """Whether the current phase of a layer quantizes nothing, so that it now claims nothing."""
    state = converted_state(module)
    return state is not None and state.plain


def _was_called(module: Any) -> bool:
    """Whether a layer ran, eagerly or in a traced graph; one expert's call counts for its group."""
    state = converted_state(module)
    assert state is not None
    return bool(state.plans) or state.called or not calls_seen.isdisjoint(_operator_keys(module))


def _first_gradient(module: Any) -> Tensor | None:
    """The measurement of a layer's first output gradient, eagerly or in a traced graph."""
    state = converted_state(module)
    if state is not None and state.gradient is not None:
        return state.gradient
    return next(
        (found for key in _operator_keys(module) if (found := gradients_seen.get(key)) is not None), None
    )


def _operator_keys(module: Any) -> list[CallKey]:
    """The keys by which operators record calls of a layer, or of a group's layers."""
    weight: Any = module.weight
    state = converted_state(module)
    assert state is not None
    as_stored = hasattr(module, "in_features") or getattr(module, "transposed", None) is False
    shape = weight.shape[-2:] if as_stored else weight.shape[-2:][::-1]
    count = len(weight) if weight.dim() == 3 else 1
    shapes = [(*shape,), *_parts(weight)] if isinstance(module, nn.Linear) else [(*shape,)]
    return [(state.layer + place, *each) for place in range(count) for each in shapes]


def _parts(weight: Any) -> Iterator[tuple[int, int]]:
    """The shapes of a rank's part of a DTensor [N, K], whichever dimension of its mesh shares the layer."""
    rows, columns = weight.shape
    for dim, placement in enumerate(getattr(weight, "placements", ())):
        ranks = weight.device_mesh.size(dim)
        if placement.is_shard(1):
            yield rows, columns // ranks
        elif not placement.is_replicate():  # rows, which FSDP2 may have placed in turns
            yield rows // ranks, columns


def _size(module: Any) -> int:
    """The weights that the products of a layer read, as its row of the summary counts them."""
    return (
        module.in_features * module.out_features if isinstance(module, nn.Linear) else module.weight.numel()
    )


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
    if report.multiplied:
        names = ", ".join(report.multiplied[:3]) + (", ..." if len(report.multiplied) > 3 else "")
        _warn(
            f"products multiply by {names}, which convert did not count as weights. They stay in high "
            f"precision; with them {report.called_share:.0%} of the weights ran quantized, not "
            f"{report.claimed_share:.0%}."
        )
    for finding in report.gradients:
        _warn(finding)


def _never_called(count: int) -> str:
    layers, are = ("layer", "is") if count == 1 else ("layers", "are")
    return f"{count} {layers} that convert quantized {are} never called"


def _warn(text: str) -> None:
    warnings.warn(f"fourbits: {text}", stacklevel=4)
