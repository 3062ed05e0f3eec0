"""health: a sample of all quantized layers during a training step, and its report."""

import math
import statistics
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fourbits.linear.layer_state import LayerState, converted_state
from fourbits.linear.module import QuantizedLinear
from fourbits.linear.monitor.alarms import Alarm, alarms_of
from fourbits.linear.monitor.layer import GEMMS, LayerTap
from fourbits.linear.monitor.layer_health import OPERAND_STATS, LayerHealth, layer_health
from fourbits.linear.stacked.layer import converted_layers
from fourbits.linear.transposed import QuantizedConv1D
from fourbits.quant.request import OPERAND_ROLES
from fourbits.recipe.recipe import table_from_text


class HealthReport:
    """The result of a sample; complete once the `with` block of `health` has ended."""

    def __init__(self) -> None:
        self.layers: tuple[LayerHealth, ...] = ()
        self.alarms: tuple[Alarm, ...] = ()
        #: layers that the sample could not see: groups of experts, compiled ones, those that were not called
        self.unseen: tuple[str, ...] = ()
        #: element codes of a part of W by layer, of this sample and of the one before: for the next sample
        self.codes: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})

    def numbers(self) -> dict[str, float]:
        """The sample in a few numbers, by the names they have in metrics.jsonl.

        SNRs are medians over layers, in dB; gradient_to_noise is that of all sampled parts of dW together;
        the other shares are those of the worst operand.
        """
        # without oscillation, which depends on earlier samples, so that a resumed run has equal metrics
        alarms = [alarm for alarm in self.alarms if alarm.kind != "oscillation"]
        found: dict[str, float] = {"health_alarms": float(len(alarms))}
        for gemm in GEMMS:
            known = [snr for layer in self.layers if (snr := layer.snr_db[gemm]) is not None]
            if known:
                found[f"health_snr_{gemm}"] = statistics.median(known)
        for stat in OPERAND_STATS[:-1]:
            shares = [
                s for layer in self.layers for o in layer.operands.values() if (s := o[stat]) is not None
            ]
            if shares:
                found[f"health_{stat}"] = max(shares)
        ratios = [ratio for layer in self.layers if (ratio := layer.gradient_to_noise) is not None]
        if ratios:  # each part weighs alike, whatever its magnitude
            found["health_gradient_to_noise"] = 1 / math.sqrt(statistics.fmean(1 / r**2 for r in ratios))
        dead = [share for layer in self.layers if (share := layer.dead) is not None]
        if dead:
            found["health_dead"] = max(dead)
        return found

    def to_dict(self) -> dict[str, Any]:
        """The sample as plain data."""
        return {
            "layers": [layer.to_dict() for layer in self.layers],
            "alarms": [{"kind": a.kind, "layers": list(a.layers), "text": a.text} for a in self.alarms],
            "unseen": list(self.unseen),
        }

    def __str__(self) -> str:
        head = f"{'layer':<32} {'Fprop':>7} {'Dgrad':>7} {'Wgrad':>7}  dW/noise  zero X/W/dY"
        lines = [f"{len(self.layers)} quantized layers sampled; SNR of GEMMs in dB", head]
        lines += [_line(layer) for layer in self.layers]
        lines += [f"not sampled: {len(self.unseen)} layers, first {self.unseen[0]}"] if self.unseen else []
        return "\n".join([*lines, *(f"{alarm.kind}: {alarm.text}" for alarm in self.alarms)])


class Sampling:
    """The taps of a model's layers while a sample is taken."""

    def __init__(self, model: nn.Module) -> None:
        self.taps: dict[str, tuple[LayerState, LayerTap]] = {}
        self.unseen: list[str] = []
        for name, layer in converted_layers(model.named_modules()):
            state = converted_state(layer) if isinstance(layer, nn.Module) else None
            if state is None or not isinstance(layer, QuantizedLinear | QuantizedConv1D):
                self.unseen.append(name)
            elif not state.plain:
                self.taps[name] = (state, LayerTap())

    def report(self, previous: HealthReport | None = None) -> HealthReport:
        """The sample; reads the device once. previous: the last sample of the same model."""
        report = HealthReport()
        self.fill(report, previous)
        return report

    def fill(self, report: HealthReport, previous: HealthReport | None) -> None:
        """As `report`, into an existing object."""
        seen = {name: tap.measured for name, (_, tap) in self.taps.items() if tap.measured is not None}
        values = torch.stack([each.values for each in seen.values()]).tolist() if seen else []
        codes = {name: each.weight_codes for name, each in seen.items() if each.weight_codes is not None}
        last, before = previous.codes if previous is not None else ({}, {})
        swinging = {name: _swinging(codes[name], last.get(name), before.get(name)) for name in codes}
        report.layers = tuple(
            layer_health(name, row, swinging.get(name), _stale(self.taps[name][0]))
            for name, row in zip(seen, values, strict=True)
        )
        report.alarms = alarms_of(report.layers)
        report.unseen = (*self.unseen, *(name for name in self.taps if name not in seen))
        report.codes = codes, last


@contextmanager
def sampling(model: nn.Module) -> Generator[Sampling]:
    """A context in which the first eager call of each layer is sampled."""
    taken = Sampling(model)
    for state, tap in taken.taps.values():
        state.tap = tap
    try:
        yield taken
    finally:
        for state, tap in taken.taps.values():
            state.tap = None
            tap.finish()


@contextmanager
def health(model: nn.Module, previous: HealthReport | None = None) -> Generator[HealthReport]:
    """Sample the health of a converted model's layers in the forward and backward passes of the block.

    Run a training step, or its first micro-batch, inside; its gradients keep their bits. Compiled modules run
    eagerly inside. previous: the last report of this model, needed to detect oscillating weights.
    The report is complete after the block: `layers`, `alarms`, `str(report)`. Raises ValueError for a model
    without quantized layers.
    """
    if not any(True for _ in converted_layers(model.named_modules())):
        raise ValueError(
            "health: the model has no quantized layer. Call fourbits.convert(model, recipe) first, with a "
            "recipe that quantizes."
        )
    report = HealthReport()
    with torch.compiler.set_stance("force_eager"), sampling(model) as taken:
        yield report
    taken.fill(report, previous)


def _swinging(codes: Tensor, last: Tensor | None, before: Tensor | None) -> tuple[float, float] | None:
    """The shares of codes that differ from the last sample's and equal those before it: among all codes, and
    among those that differ.
    """
    if last is None or before is None or not codes.shape == last.shape == before.shape:
        return None
    changed = codes != last
    back = float((changed & (codes == before)).sum())
    return back / codes.numel(), back / max(1.0, float(changed.sum()))


def _stale(state: LayerState) -> tuple[str, ...]:
    table = table_from_text(state.table)
    return tuple(role for role in OPERAND_ROLES if table.operand(role).amax_policy != "current")


def _line(layer: LayerHealth) -> str:
    snrs = " ".join(f"{_number(layer.snr_db[gemm], 1):>7}" for gemm in GEMMS)
    zeros: Sequence[float | None] = [
        layer.operands.get(role, {}).get("zeros") for role in ("fprop.lhs", "fprop.rhs", "dgrad.lhs")
    ]
    shares = "/".join("-" if share is None else f"{share:.0%}" for share in zeros)
    return f"{layer.name:<32} {snrs}  {_number(layer.gradient_to_noise, 1):>8}  {shares}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
