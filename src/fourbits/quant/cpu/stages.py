"""The reference in stages that are compiled one by one, so that operands share what is compiled.

A stage is a function of tensors, a spec and an axis; the compiler fuses it into one or two loops. Specs are
stripped of the fields that a stage does not depend on, so that those fields cause no further compilation.
"""

import functools
from dataclasses import replace

import torch
from torch import Tensor

from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference.elements import codes_of, exact_values_of, rounded_magnitudes
from fourbits.quant.reference.quantize import block_scales
from fourbits.quant.reference.scales import (
    block_maxima,
    level_of,
    over_blocks,
    scale_of_maximum,
    tensor_amax,
)


@functools.lru_cache(maxsize=1024)
def for_scales(spec: OperandSpec) -> OperandSpec:
    """The spec with only what scales depend on once the blocks' maxima are known."""
    eden = spec.rounding == "ms-eden"
    return replace(
        spec,
        source="as_is",
        rounding=spec.rounding if eden or spec.sr_headroom else "rne",
        rht=spec.rht if eden else 0,
        rht_signs="",
        te_compat=True,
        amax_policy="current",
        adaptive="none",
    )


@functools.lru_cache(maxsize=1024)
def for_elements(spec: OperandSpec) -> OperandSpec:
    """The spec with only what elements depend on once scales are known."""
    eden = spec.rounding == "ms-eden"
    return OperandSpec(
        format=spec.format,
        block=spec.block,
        outer=spec.outer,
        rounding="rne" if eden else spec.rounding,
        te_compat=spec.te_compat or eden,
    )


def scales_of_blocks(
    blocks: Tensor, amax: Tensor | None, words: Tensor | None, spec: OperandSpec, axis: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The fields of the Scales of blocks [A, a, B, b], where no search has to choose them."""
    return scales_of_maxima(block_maxima(blocks), amax, None, words, spec, axis)


def scales_of_maxima(
    block_amax: Tensor,
    amax: Tensor | None,
    ideal: Tensor | None,
    words: Tensor | None,
    spec: OperandSpec,
    axis: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The fields of the Scales of blocks with these maxima.

    ideal: None for `scale_of_maximum`; words: as for `block_scales`.
    """
    level = level_of(tensor_amax(block_amax, amax, spec, axis), spec)
    if ideal is None:
        ideal = scale_of_maximum(block_amax, over_blocks(level, block_amax, spec, axis), spec)
    scales = block_scales(block_amax, ideal, level, words, spec, axis)
    return scales.block_scale, scales.global_scale, scales.encode


def level_over_blocks(
    block_amax: Tensor, amax: Tensor | None, spec: OperandSpec, axis: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The fields of the Level that applies to each block."""
    level = level_of(tensor_amax(block_amax, amax, spec, axis), spec)
    level = over_blocks(level, block_amax, spec, axis)
    return level.amax, level.encode, level.decode


def slice_maxima(slices: Tensor) -> Tensor:
    """`block_maxima` from `element_slices` of axis 1, which is faster: [A, a, b, B] -> fp32 [A, B]."""
    return slices.to(torch.float32).abs().amax(dim=(1, 2))


def element_codes(
    blocks: Tensor, encode: Tensor, block_scale: Tensor, noise: Tensor | None, spec: OperandSpec
) -> Tensor:
    """Codes of blocks [A, a, B, b] under their scales, uint8; arguments as for `rounded_magnitudes`."""
    return codes_of(*_rounded(blocks, encode, block_scale, noise, spec), block_scale, spec)


def exact_values(
    blocks: Tensor, encode: Tensor, block_scale: Tensor, noise: Tensor | None, spec: OperandSpec
) -> Tensor:
    """Values of an exact operand, bf16; arguments as for `element_codes`."""
    return exact_values_of(*_rounded(blocks, encode, block_scale, noise, spec), block_scale, spec)


def _rounded(
    blocks: Tensor, encode: Tensor, block_scale: Tensor, noise: Tensor | None, spec: OperandSpec
) -> tuple[Tensor, Tensor]:
    """Magnitudes on the element grid, and the values that they round."""
    values = blocks.to(torch.float32)
    return rounded_magnitudes(values, encode, block_scale, noise, spec), values
