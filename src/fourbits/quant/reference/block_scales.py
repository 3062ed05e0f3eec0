"""From block maxima to block scales: a scale rule says which is ideal, a scale hierarchy what can be stored.

docs/nvfp4.md, section 7; docs/extending.md adds rules and hierarchies from outside.
"""

from collections.abc import Callable

from torch import Tensor

from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference.scale_search import searched_scales
from fourbits.quant.reference.scales import Level, Scales, over_blocks, poisoned, scale_of_maximum
from fourbits.quant.scale_hierarchy import hierarchy_of
from fourbits.quant.scale_rules import FOUR_OVER_SIX, SEARCH

#: (blocks [A, a, B, b], block_amax, the level of each block, spec, axis) -> fp32 grid [A, B]
IdealScale = Callable[[Tensor, Tensor, Level, OperandSpec, int], Tensor]


def of_maximum(blocks: Tensor, block_amax: Tensor, level: Level, spec: OperandSpec, axis: int) -> Tensor:
    """`scale_of_maximum`; the rules of E8M0, `max` and `ceil`, round up or down later."""
    return scale_of_maximum(block_amax, level, spec)


#: the functions of SCALE_RULES, by name
IDEAL_SCALES: dict[str, IdealScale] = {
    "max": of_maximum,
    "ceil": of_maximum,
    **dict.fromkeys((*FOUR_OVER_SIX, *SEARCH), searched_scales),
}


def ideal_scales(blocks: Tensor, block_amax: Tensor, level: Level, spec: OperandSpec, axis: int) -> Tensor:
    """The block scales that spec's rule asks for, before rounding: fp32 grid.

    blocks: completed, [A, a, B, b]; block_amax: fp32 grid; level: that of each block, see `over_blocks`.
    """
    return IDEAL_SCALES[spec.scale_rule](blocks, block_amax, level, spec, axis)


def block_scales(
    block_amax: Tensor, ideal: Tensor, level: Level, words: Tensor | None, spec: OperandSpec, axis: int
) -> Scales:
    """Scales of every block under a tensor's level.

    ideal: as from `ideal_scales`; words: 32 random bits per block, where block scales round stochastically.
    """
    fmt, local = spec.block_format, over_blocks(level, block_amax, spec, axis)
    hierarchy = hierarchy_of(fmt)
    levels, encode = hierarchy.derive(block_amax, ideal, local, words, spec, axis)
    block_scale = poisoned(hierarchy.effective(levels, fmt, axis), block_amax, local)
    if len(levels) == 1:
        return Scales(block_scale, level.decode, encode)
    return Scales(block_scale, level.decode, encode, (poisoned(levels[0], block_amax, local), *levels[1:]))
