"""Tensors whose rows belong to groups, such as tokens sorted by expert: where groups lie, and their operands.

The rows of group e are offsets[e] to offsets[e + 1], which only the device knows. A kernel's grid covers
tiles of some rows; a tile holds rows of one group, so that no block and no transform reaches into the next
one. How many tiles there may be follows from shapes: at most one per group is not full.
"""

from typing import NamedTuple

from torch import Tensor

from fourbits.quant.operand import OperandSpec

#: int32 entries of a tile: its group; its first row, and how many it has, in the tensor; its first row in the
#: group
TILE_FIELDS = ("group", "first", "rows", "place")


class GroupTiles(NamedTuple):
    """The tiles of `height` rows of a tensor's groups."""

    #: int32 [tiles, 4], `TILE_FIELDS`; tiles past the last group have no rows
    entries: Tensor
    #: int32 [groups + 1]: the first tile of each group, and the number of tiles
    starts: Tensor
    height: int

    @property
    def groups(self) -> int:
        """How many groups there are."""
        return len(self.starts) - 1


class GroupedOperand(NamedTuple):
    """An exact operand of each group: value = values * scale[group], where values are exact in BF16.

    Along axis 1 a group's values lie at its rows of the tensor. Along axis 0, and along axis 1 if padded,
    group e's begin at row starts[e] * height of the tiles it was quantized by, and zeros fill its last tile.
    """

    values: Tensor
    #: fp32 [groups]; of a group without rows undefined
    scale: Tensor
    axis: int
    spec: OperandSpec


def most_tiles(rows: int, groups: int, height: int) -> int:
    """The most tiles of `height` rows that `groups` groups of `rows` rows in all can have."""
    return (rows + groups * (height - 1)) // height
