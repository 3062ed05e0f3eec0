"""The cost of a recipe's options: every operand of its three GEMMs, relative to plain quantization.

Plain quantization has the operand's format, blocks, source and transform, but block scales from block maxima
and round to nearest. If the transform is part of a rounding rule, so is its cost.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from fourbits.bench.timing import (
    Measurements,
    Result,
    copy_bandwidth,
    measured,
    medians,
    normal,
    product_rate,
)
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantize
from fourbits.quant.request import OPERAND_ROLES
from fourbits.recipe.presets import get_recipe

_SHAPE = {"cuda": (8192, 4096), "cpu": (2048, 4096)}
#: target speed with an option, as a share of plain quantization's
_GOALS = {"4over6": 1 / 1.3, "ms-eden": 1 / 1.6}


def bench_recipe(device: torch.device, name: str) -> Measurements:
    """Time every distinct operand of a recipe, packed, alternating with its plain form."""
    rates = copy_bandwidth(device), product_rate(device)
    results: list[Result] = []
    for roles, spec, axis in _operands(name):
        plain, own = medians(
            [_run(spec_, axis, device) for spec_ in (_plain(spec), spec)], device, repeats=10, ahead=True
        )
        results.append(
            Result(name=roles, seconds=own, value=plain / own, unit="of plain quantization", goal=_goal(spec))
        )
    return measured(f"quantize, {name}", device, tuple(results), rates)


def _operands(name: str) -> list[tuple[str, OperandSpec, int]]:
    """(roles, spec, axis) of every distinct quantized operand; weights are FP32 masters."""
    table = get_recipe(name).table
    roles: dict[tuple[OperandSpec, int, bool], list[str]] = {}
    for role in OPERAND_ROLES:
        spec = table.operand(role)
        if spec.block_format.quantized:
            axis = 1 if role in ("fprop.lhs", "fprop.rhs", "dgrad.lhs") else 0
            roles.setdefault((spec, axis, role in ("fprop.rhs", "dgrad.rhs")), []).append(role)
    return [(", ".join(names), spec, axis) for (spec, axis, _), names in roles.items()]


def _plain(spec: OperandSpec) -> OperandSpec:
    """The spec with the same format, blocks, source and transform, without options."""
    return OperandSpec(
        format=spec.format,
        block=spec.block,
        outer=spec.outer,
        source="as_is" if spec.source == "forward" else spec.source,
        rht=spec.rht,
        rht_signs=spec.rht_signs,
    )


def _run(spec: OperandSpec, axis: int, device: torch.device) -> Callable[[], object]:
    x = normal(*_SHAPE[device.type], device=device)
    x = x if spec.source == "bf16" else x.to(torch.bfloat16)
    key = torch.tensor([1, 2, 3, 4, 5], device=device, dtype=torch.int64)
    spec = replace(spec, source="as_is") if spec.source == "forward" else spec
    return lambda: quantize(x, spec, axis, sr_key=key)


def _goal(spec: OperandSpec) -> float | None:
    rule = spec.rounding if spec.rounding in _GOALS else spec.scale_rule.partition("-")[0]
    return _GOALS.get(rule)
