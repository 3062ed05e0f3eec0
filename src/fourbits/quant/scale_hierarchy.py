"""Scale hierarchies: how the scales of blocks are derived, combined and stored, by `BlockFormat.scale`.

The shipped ones have one level below the FP32 scale of the tensor: one number per block. Further levels hold
numbers that several blocks share (`BlockFormat.scale_groups`), and come from outside: docs/extending.md.
docs/nvfp4.md, sections 5 and 7.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fourbits.formats.descriptors import BlockFormat
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference.blocks import finer, in_layout
from fourbits.quant.reference.scales import (
    Derived,
    Level,
    fp32_scales,
    power_of_two_scales,
    small_float_scales,
)
from fourbits.quant.scale_codes import SCALE_DTYPES, decode_scale, encode_scale

Levels = tuple[Tensor, ...]
Derive = Callable[[Tensor, Tensor, Level, Tensor | None, OperandSpec, int], Derived]


def product_of_levels(levels: Levels, block_format: BlockFormat, axis: int) -> Tensor:
    """The scale of every block: its own number, times those that it shares. Grids in the layout of axis."""
    scale = levels[0]
    for shared, group in zip(levels[1:], block_format.scale_groups, strict=True):
        ratio = in_layout(group, axis)
        assert ratio is not None
        scale = scale * finer(shared, ratio, scale.shape)
    return scale


def one_per_block(rows: int, columns: int) -> tuple[int, int]:
    """The shape of the stored scales if there is one number per block."""
    return rows, columns


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleHierarchy:
    """The functions of one hierarchy. Levels are fp32 grids, the finest first."""

    name: str
    #: (block_amax, ideal, level, words, spec, axis) -> (levels, encode): grids in the layout of the tensor.
    #: block_amax, ideal: largest magnitude and ideal scale of each block, NaN or Inf where it has one; level:
    #: the FP32 scale above; words: random bits, for scale_rounding sr; encode: what elements are multiplied
    #: by. The finest level of a non-finite block becomes NaN afterwards
    derive: Derive
    #: levels, rows first -> what `QuantizedTensor.block_scale` stores, 2-D
    encode: Callable[[Levels], Tensor]
    #: inverse of `encode`
    decode: Callable[[Tensor], Levels]
    #: (levels, format, axis) -> the scale of every block
    effective: Callable[[Levels, BlockFormat, int], Tensor] = product_of_levels
    #: dtype of what is stored, and its shape for a grid with these numbers of blocks down and across
    dtype: torch.dtype = torch.uint8
    stored_shape: Callable[[int, int], tuple[int, int]] = one_per_block
    #: whether `derive` reads ideal, which scale rules compute; E8M0 and FP32 scales read block_amax alone
    reads_ideal: bool = True
    #: each level's number for blocks of zeros
    of_zeros: tuple[float, ...] = (0.0,)


def _one_level(name: str, derive: Derive, of_zeros: float = 0.0, reads_ideal: bool = True) -> ScaleHierarchy:
    return ScaleHierarchy(
        name=name,
        derive=derive,
        encode=lambda levels: encode_scale(levels[0], name),
        decode=lambda stored: (decode_scale(stored, name),),
        dtype=SCALE_DTYPES[name],
        reads_ideal=reads_ideal,
        of_zeros=(of_zeros,),
    )


#: all hierarchies by name: those of this file, and registered ones
SCALE_HIERARCHIES = {
    "e4m3": _one_level("e4m3", small_float_scales),
    "ue5m3": _one_level("ue5m3", small_float_scales),
    "e8m0": _one_level("e8m0", power_of_two_scales, 2.0**-127, reads_ideal=False),
    "fp32": _one_level("fp32", fp32_scales, 1.0, reads_ideal=False),
}


def hierarchy_of(block_format: BlockFormat) -> ScaleHierarchy:
    """The hierarchy of a format's block scales; the format must have some."""
    assert block_format.scale is not None
    return SCALE_HIERARCHIES[block_format.scale]


def encode_levels(levels: Levels, block_format: BlockFormat) -> Tensor:
    """Levels, rows first, as they are stored."""
    return hierarchy_of(block_format).encode(levels)


def decode_scales(stored: Tensor, block_format: BlockFormat) -> Tensor:
    """The scale of every block, fp32, from what is stored."""
    hierarchy = hierarchy_of(block_format)
    return hierarchy.effective(hierarchy.decode(stored), block_format, 1)
