"""The section of a run's page about the health of its layers: charts over training, alarms, last sample."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fourbits.compare.number_format import DASH, percent
from fourbits.compare.report.curves import Line
from fourbits.compare.report.figures import sampled_chart
from fourbits.compare.report.runs import Run
from fourbits.train.health_log import read_health

#: title -> (name of the line, metric), and the threshold of an alarm
_CHARTS: Mapping[str, tuple[tuple[tuple[str, str], ...], float | None]] = {
    "Signal-to-noise ratio of GEMMs (dB, median of layers)": (
        (("Fprop", "health_snr_fprop"), ("Dgrad", "health_snr_dgrad"), ("Wgrad", "health_snr_wgrad")),
        None,
    ),
    "Weight gradient over its quantization noise": (
        (("dW/noise", "health_gradient_to_noise"),),
        math.sqrt(3),
    ),
}
_SHARES = ("at_max", "at_zero", "clipped")


def health_section(run: Run) -> dict[str, Any] | None:
    """The values of the template; None for a run without samples."""
    samples = read_health(run.path / "health.jsonl")
    if not samples:
        return None
    charts = [
        sampled_chart(title, lines, limit)
        for title, (metrics, limit) in _CHARTS.items()
        if (lines := _lines(run, metrics))
    ]
    return {
        "charts": charts,
        "alarms": _alarms(samples),
        "step": samples[-1]["step"],
        "layers": [_row(layer) for layer in samples[-1]["layers"]],
        "unseen": len(samples[-1]["unseen"]),
    }


def _lines(run: Run, metrics: Sequence[tuple[str, str]]) -> list[Line]:
    found: list[Line] = []
    for series, (name, key) in enumerate(metrics):
        values = run.train.get(key, np.empty(0))
        known = np.isfinite(values)
        if known.any():
            found.append(Line(name, series, run.tokens[known], values[known]))
    return found


def _alarms(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each kind of alarm once: when it was raised, and the text of its last sample."""
    found: dict[str, dict[str, Any]] = {}
    for sample in samples:
        for alarm in sample["alarms"]:
            entry = found.setdefault(
                alarm["kind"], {"kind": alarm["kind"], "first": sample["step"], "count": 0}
            )
            entry |= {"last": sample["step"], "count": entry["count"] + 1, "text": alarm["text"]}
    return [{**entry, "samples": len(samples)} for entry in found.values()]


def _row(layer: Mapping[str, Any]) -> dict[str, Any]:
    """A layer's cells, as text."""
    operands = layer["operands"]
    zeros = [operands.get(role, {}).get("zeros") for role in ("fprop.lhs", "fprop.rhs", "dgrad.lhs")]
    shares = [_worst(operands, stat) for stat in _SHARES]
    return {
        "name": layer["name"],
        "cells": [
            *(_number(layer["snr_db"][gemm]) for gemm in ("fprop", "dgrad", "wgrad")),
            _number(layer["gradient_to_noise"]),
            *(_percent(share) for share in (*zeros, *shares, layer["dead"], layer["oscillating"])),
        ],
    }


def _worst(operands: Mapping[str, Mapping[str, float | None]], stat: str) -> float | None:
    return max((value for each in operands.values() if (value := each[stat]) is not None), default=None)


def _number(value: float | None) -> str:
    return DASH if value is None else f"{value:.1f}"


def _percent(share: float | None) -> str:
    return DASH if share is None else percent(share)
