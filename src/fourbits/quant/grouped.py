"""The entry of quantization for tensors of groups of rows, which only kernels support.

Elsewhere each group is quantized by itself (`fourbits.linear.stacked.loop`), to the same bits.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fourbits.quant.grouped_layout import GroupedOperand, GroupTiles
from fourbits.quant.kernels.kernel_config import FP8_FORMATS
from fourbits.quant.kernels.support import unsupported_device, unsupported_spec
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference import grouped as reference
from fourbits.quant.reference.philox import computed_once
from fourbits.quant.request import OperandRequest, Signature
from fourbits.triton_version import HAS_TRITON

if TYPE_CHECKING or HAS_TRITON:
    from fourbits.quant.kernels.launch_grouped import GroupedQuantizer, TileMap

#: elements along the contraction that a GEMM reads at a time; groups of rows along it are padded to this
STEP = 64
#: (tensor, tiles, counters, streams of group 0 by request) -> operands
Quantizer = Callable[[Tensor, GroupTiles, Tensor | None, tuple[int, ...]], tuple[GroupedOperand, ...]]


def unsupported_groups(device: torch.device, specs: Sequence[tuple[OperandSpec, int]]) -> str | None:
    """Why kernels do not quantize groups by these specs along these axes of their sources, or None."""
    for spec, axis in specs:
        if reason := unsupported_spec(spec):
            return reason
        if spec.format in FP8_FORMATS or spec.rounding == "ms-eden":
            return f"{spec.format} {spec.rounding} has no grouped kernel"
        if spec.source == "forward" or spec.correction:
            return "operands derived from other operands have no grouped kernel"
        if axis == 1 and spec.rht:
            return "a transform along axis 1 needs a transposed copy"
    return unsupported_device(device)


def height_of(specs: Sequence[OperandSpec]) -> int:
    """Rows of a tile of the map: whole steps of a GEMM, and whole transforms."""
    return max(STEP, *(spec.rht for spec in specs), *(max(spec.block_size or (0, 0)) for spec in specs))


@functools.lru_cache(maxsize=1 << 12)
def tile_map(rows: int, groups: int, height: int, device: torch.device) -> Callable[[Tensor], GroupTiles]:
    """A function that maps offsets of groups, int32 [groups + 1], to their tiles, without the host."""
    return TileMap(rows, groups, height, device)


@computed_once
def equal_groups(groups: int, rows: int, height: int, device: torch.device) -> GroupTiles:
    """The map of tiles of groups of `rows` rows each: the weights of experts."""
    tiles = reference.group_tiles(
        torch.arange(groups + 1, dtype=torch.int32, device="cpu") * rows, height, groups * -(-rows // height)
    )
    return GroupTiles(tiles.entries.to(device), tiles.starts.to(device), height)


@functools.lru_cache(maxsize=1 << 12)
def grouped_quantizer(
    signature: Signature,
    groups: int,
    tiles: tuple[int, int],
    requests: tuple[OperandRequest, ...],
    padded: bool = False,
    key_stride: int = 0,
) -> Quantizer:
    """The quantizer that computes these operands of the groups of tensors of one signature.

    tiles: number of tiles in the map, and their height; padded: whether operands along axis 1 are padded;
    key_stride: distance between the counters of consecutive groups, 0 for one counter.
    """
    return GroupedQuantizer(signature, groups, tiles, requests, padded, key_stride)
