"""The specification of operands of groups of rows: each group is quantized as a separate tensor."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fourbits.quant.grouped_layout import GroupedOperand, GroupTiles
from fourbits.quant.reference.quantize import exact_operand
from fourbits.quant.request import OperandRequest


def group_tiles(offsets: Tensor, height: int, tiles: int) -> GroupTiles:
    """The tiles of groups. offsets: int [groups + 1]; tiles: how many the map has room for."""
    ends: list[int] = offsets.tolist()
    entries: list[list[int]] = []
    starts = [0]
    for group, (first, last) in enumerate(itertools.pairwise(ends)):
        rows = last - first
        places = range(0, rows, height)
        entries += [[group, first + place, min(height, rows - place), place] for place in places]
        starts.append(len(entries))
    entries += [[0, 0, 0, 0]] * (tiles - len(entries))
    table = torch.tensor(entries, dtype=torch.int32, device="cpu").reshape(-1, 4)
    return GroupTiles(table, torch.tensor(starts, dtype=torch.int32, device="cpu"), height)


def grouped_operands(
    x: Tensor,
    offsets: Tensor,
    tiles: GroupTiles,
    requests: Sequence[OperandRequest],
    keys: Callable[[OperandRequest, int], Tensor | None],
    padded: bool,
) -> tuple[GroupedOperand, ...]:
    """The operands of every group, as GroupedOperand lays them out: the twin of kernels/launch_grouped.py.

    No layer calls it, because a device without the kernel runs a loop of linear layers; the kernel must have
    its bytes.

    keys: of a request and a group, the key of its random bits; padded: whether operands along axis 1 are.
    """
    ends, height = offsets.tolist(), tiles.height
    found: list[GroupedOperand] = []
    for request in requests:
        in_tiles = padded or request.axis == 0
        values = torch.zeros(
            (len(tiles.entries) * height if in_tiles else len(x), -(-x.shape[1] // 16) * 16),
            dtype=torch.bfloat16,
            device=x.device,
        )
        scale = torch.ones(tiles.groups, dtype=torch.float32, device=x.device)
        for group, (first, last) in enumerate(itertools.pairwise(ends)):
            if last > first:
                key = keys(request, group)
                operand = exact_operand(x[first:last], request.spec, request.axis, None, key)
                start = int(tiles.starts[group]) * height if in_tiles else first
                part = values[start : start + operand.values.shape[0]]
                part[:, : operand.values.shape[1]] = operand.values
                scale[group] = operand.scale
        found.append(GroupedOperand(values, scale, request.axis, request.spec))
    return tuple(found)
