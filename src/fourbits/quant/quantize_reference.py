"""The specification of quantization, in plain torch: readable aloud, bit-exact, on any device.

The same source under torch.compile is the CPU path (`compiled.py`); other backends must give equal bytes.
Everything works in the layout of the tensor, so that no step transposes: `axis` says along which axis blocks
run. docs/nvfp4.md has the rules.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fourbits.formats.codes import grid_codes
from fourbits.formats.descriptors import FloatFormat
from fourbits.formats.rounding import round_nearest, round_stochastic, round_stochastic_32
from fourbits.quant.choice import block_errors, wanted_scales
from fourbits.quant.operand import OperandSpec
from fourbits.quant.scaling import SIMPLE_SCALES, Level, Scales, level_of, poisoned, two_level_scales

Runner = Callable[[Callable[..., Any]], Callable[..., Any]]


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """The runner that runs a function as it is."""
    return function


def block_maxima(blocks: Tensor) -> Tensor:
    """Largest magnitude of every block, NaN where one is in it. [A, a, B, b] -> fp32 [A, B]."""
    return blocks.to(torch.float32).abs().amax(dim=(1, 3))


def scales_of(
    block_amax: Tensor,
    amax: Tensor | None,
    words: Tensor | None,
    lanes: Tensor | None,
    spec: OperandSpec,
    axis: int,
    run: Runner = eager,
) -> Scales:
    """Scales of every block from the blocks' maxima.

    block_amax: fp32 grid in layout; amax: fp32 scalar, None for the tensor's own; words: 32 random bits per
    block, for stochastic block scales; lanes: the tensor as from `lanes_first`, for rules that compare
    errors; run: what runs those comparisons.
    """
    level, stored = level_of(block_amax, amax, spec, axis)
    kind = spec.block_format.scale or ""
    if kind in SIMPLE_SCALES:
        scales = SIMPLE_SCALES[kind](block_amax, level, spec)
    else:
        errors = functools.partial(_errors, run, lanes, level, spec, axis)
        wanted = wanted_scales(block_amax, level, spec, errors)
        scales = two_level_scales(wanted, level, spec, words)
    return poisoned(scales, block_amax, level)._replace(global_scale=stored)


def _errors(
    run: Runner,
    lanes: Tensor | None,
    level: Level,
    spec: OperandSpec,
    axis: int,
    candidates: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    assert lanes is not None, "rules that compare errors are called with the tensor"
    return run(block_errors)(lanes, candidates, level, spec, axis)


def element_codes(
    blocks: Tensor, encode: Tensor, block_scale: Tensor, noise: Tensor | None, spec: OperandSpec
) -> Tensor:
    """Codes of the rounded elements, uint8, one per element.

    blocks: floats [A, a, B, b]; encode, block_scale: fp32 [A, 1, B, 1], see Scales; noise: random integers in
    the shape of blocks, for stochastic rounding.
    """
    values = blocks.to(torch.float32)
    magnitude = _poison(_magnitudes(values, encode, block_scale, noise, spec), block_scale, spec)
    return grid_codes(magnitude, _number(values), _element(spec))


def exact_values(
    blocks: Tensor, encode: Tensor, block_scale: Tensor, noise: Tensor | None, spec: OperandSpec
) -> Tensor:
    """Values of an exact operand, bf16: element * block scale, or the element under fp32 scales.

    Arguments as for `element_codes`. A zero has the sign of the input.
    """
    values = blocks.to(torch.float32)
    magnitude = _magnitudes(values, encode, block_scale, noise, spec)
    if spec.block_format.scale == "fp32":
        magnitude, values = _poison(magnitude, block_scale, spec), _number(values)
    else:
        magnitude = magnitude * block_scale
    return torch.copysign(magnitude, values).to(torch.bfloat16)


def _magnitudes(
    values: Tensor, encode: Tensor, block_scale: Tensor, noise: Tensor | None, spec: OperandSpec
) -> Tensor:
    """Magnitudes on the element's grid, fp32."""
    element = _element(spec)
    scaled = (values * encode).abs()
    if spec.rounding == "rne":
        rounded = round_nearest(scaled, element)
    else:
        assert noise is not None, "stochastic rounding is called with noise"
        round_up = round_stochastic if spec.rounding == "sr" else round_stochastic_32
        rounded = round_up(scaled, noise, element)
    return rounded if spec.te_compat else torch.where(block_scale == 0, 0.0, rounded)


def _poison(magnitude: Tensor, block_scale: Tensor, spec: OperandSpec) -> Tensor:
    """The largest magnitude in blocks whose scale is NaN."""
    return torch.where(block_scale != block_scale, _element(spec).max_value, magnitude)


def _number(values: Tensor) -> Tensor:
    """Values with zeros for NaN, whose sign differs between processors."""
    return torch.where(values != values, 0.0, values)


def _element(spec: OperandSpec) -> FloatFormat:
    element = spec.block_format.element
    assert element is not None
    return element
