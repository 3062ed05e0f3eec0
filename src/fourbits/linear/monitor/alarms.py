"""Alarms about a sample of a model's health, each with practical advice. Thresholds: docs/health.md."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fourbits.linear.monitor.layer_health import LayerHealth

#: shares from which an alarm is raised
CLIPPED, AT_MAX, AT_ZERO, ZERO_CODES = 0.001, 0.5, 0.1, 0.6
DEAD = 0.07
#: oscillation: at least this share of a layer's codes came back, and at least that share of changed codes
OSCILLATING, RETURNING = 0.02, 0.4
#: a GEMM whose noise has this share of its signal's energy or more
LOW_SNR_DB = 5.0
#: arXiv:2505.19115: gradients smaller than this multiple of their quantization noise no longer train
GRADIENT_TO_NOISE = math.sqrt(3)
#: tolerance by which a share exactly at its threshold raises an alarm
_TINY = 1e-9
#: an amax carried by few rows: at most this share of them is large, and at least this share of blocks is lost
FEW_ROWS, LOST_BLOCKS = 0.1, 0.1


class Alarm(NamedTuple):
    """Something that harms training. kind: its short name; layers: those concerned, the worst first."""

    kind: str
    layers: tuple[str, ...]
    #: measurement of the worst layer
    value: float
    text: str


class _Rule(NamedTuple):
    kind: str
    #: how bad a layer is, above 0 if the alarm is raised; the number to show, and what it belongs to
    badness: Callable[[LayerHealth], tuple[float, float, str]]
    text: str


def alarms_of(layers: Sequence[LayerHealth]) -> tuple[Alarm, ...]:
    """The alarms of a sample, the same for equal samples."""
    found: list[Alarm] = []
    for rule in _RULES:
        rated = [(*rule.badness(layer), layer.name) for layer in layers]
        bad = sorted((each for each in rated if each[0] > 0), key=lambda each: (-each[0], each[3]))
        if bad:
            _, value, what, name = bad[0]
            text = rule.text.format(
                value=value, percent=100 * value, what=what, layer=name, count=len(bad), all=len(layers)
            )
            found.append(Alarm(rule.kind, tuple(each[3] for each in bad), value, text))
    return tuple(found)


def _largest(
    layer: LayerHealth, stat: str, least: float, stale: bool | None = None
) -> tuple[float, float, str]:
    """The operand with the largest share of something. stale: only those with (without) an amax policy."""
    worst = (0.0, "")
    for role, operand in layer.operands.items():
        share = operand[stat]
        if share is not None and (stale is None or (role in layer.stale) == stale):
            worst = max(worst, (share, role))
    share, role = worst
    return share - least + _TINY if share >= least else 0.0, share, role


def _saturated(layer: LayerHealth) -> tuple[float, float, str]:
    clipped = _largest(layer, "clipped", CLIPPED, stale=True)
    at_max = _largest(layer, "at_max", AT_MAX, stale=True)
    return clipped if clipped[0] else (at_max[0], 0.0, at_max[2]) if at_max[0] else (0.0, 0.0, "")


def _noisy(layer: LayerHealth) -> tuple[float, float, str]:
    known = [(snr, gemm) for gemm, snr in layer.snr_db.items() if snr is not None]
    snr, gemm = min(known, default=(math.inf, ""))
    return (LOW_SNR_DB - snr if snr < LOW_SNR_DB else 0.0), snr, gemm


def _below_noise(layer: LayerHealth) -> tuple[float, float, str]:
    ratio = layer.gradient_to_noise
    below = ratio is not None and ratio < GRADIENT_TO_NOISE
    return (GRADIENT_TO_NOISE - ratio, ratio, "") if below and ratio is not None else (0.0, 0.0, "")


def _oscillates(layer: LayerHealth) -> tuple[float, float, str]:
    if layer.returning is None or layer.returning < RETURNING:
        return 0.0, 0.0, ""
    return _of(layer.oscillating, OSCILLATING)


def _few_rows(layer: LayerHealth) -> tuple[float, float, str]:
    worst = (0.0, 0.0, "")
    for tensor, (lost, large) in layer.rows.items():
        if lost is not None and large is not None and lost >= LOST_BLOCKS and large <= FEW_ROWS:
            worst = max(worst, (lost, lost, tensor))
    return worst


def _of(value: float | None, least: float) -> tuple[float, float, str]:
    return (value - least + _TINY, value, "") if value is not None and value >= least else (0.0, 0.0, "")


_RULES = (
    _Rule(
        "saturation",
        _saturated,
        "scales of an earlier step are too small: in {layer!r}, {what} has {percent:.2g} % of its elements "
        "clipped ({count} of {all} layers). Update the scale more often (amax_policy current, or a shorter "
        "amax_interval), raise amax_headroom, or lower the learning rate",
    ),
    _Rule(
        "clipping",
        lambda layer: _largest(layer, "clipped", CLIPPED, stale=False),
        "scales that are rounded down clip the largest elements: in {layer!r}, {percent:.2g} % of {what} "
        "({count} of {all} layers). Choose a scale_rule that rounds up, as in mxfp4-ceil",
    ),
    _Rule(
        "zero scales",
        lambda layer: _largest(layer, "at_zero", AT_ZERO),
        "block scales underflow: in {layer!r}, {percent:.2g} % of the blocks of {what} have scale 0 ({count} "
        "of {all} layers). Find the outliers that set the tensor's scale; keep the layer in BF16 or MXFP8 (a "
        "rule in layers), or use an outer scale (format nvfp4-double)",
    ),
    _Rule(
        "zero codes",
        lambda layer: _largest(layer, "zeros", ZERO_CODES),
        "most of an operand is rounded to zero: in {layer!r}, {percent:.2g} % of {what} ({count} of {all} "
        "layers). Use rht in Wgrad, sr on dY, or a finer format for this layer",
    ),
    _Rule(
        "noise",
        _noisy,
        "a GEMM is mostly noise: in {layer!r}, {what} has a signal-to-noise ratio of {value:.1f} dB ({count} "
        "of {all} layers). Keep the layer in BF16, or switch this GEMM to BF16 (docs/precision.md)",
    ),
    _Rule(
        "gradient below noise",
        _below_noise,
        "gradients drown in quantization noise: in {layer!r}, dW is {value:.2f} times its noise, below "
        "sqrt(3) ({count} of {all} layers; arXiv:2505.19115). Switch the backward pass or all GEMMs to BF16 "
        "(docs/precision.md), or use larger batches",
    ),
    _Rule(
        "oscillation",
        _oscillates,
        "weights swing between two codes: in {layer!r}, {percent:.2g} % of them left a code and came back "
        "between samples ({count} of {all} layers). Lower the learning rate, decay earlier, reset such "
        "weights (oscillation), or switch the forward pass to BF16 late in the run (docs/precision.md)",
    ),
    _Rule(
        "dead gradients",
        lambda layer: _of(layer.dead, DEAD),
        "weight gradients underflow to zero: in {layer!r}, {percent:.2g} % of dW that is not zero in BF16 "
        "({count} of {all} layers). Keep the layer in MXFP8 or BF16 (a rule in layers), as Nemotron 3 Super "
        "keeps Mamba's out_proj",
    ),
    _Rule(
        "few rows",
        _few_rows,
        "few rows carry the amax: in {layer!r}, {percent:.2g} % of the blocks of {what} lose their scale to "
        "them ({count} of {all} layers). Set gradient_rows to limited for dY; for X look for tokens or "
        "channels with outliers (docs/convert.md)",
    ),
)
