"""Views of a 2-D tensor as blocks and back; padding. docs/nvfp4.md, sections 5 and 6.

Tensors stay in their own layout: `axis` says along which axis blocks run, and nothing is transposed.
"""

import torch
from torch import Tensor

from fourbits.quant.operand import OperandSpec


def padded(x: Tensor, spec: OperandSpec, axis: int) -> Tensor:
    """x with zeros appended along axis up to Cp: a multiple of 16 and of the transform's size."""
    return _pad_end(x, axis, -x.shape[axis] % max(16, spec.rht))


def block_view(x: Tensor, spec: OperandSpec, axis: int) -> Tensor:
    """x as blocks [A / a, a, B / b, b], (a, b) the block in x's layout; zeros fill incomplete blocks.

    Blocks of one row along axis 1 do not care which row they are in, so they become [number of blocks, 1, 1,
    b].
    """
    size = spec.block_size
    if size is None:
        return x[None, :, None, :]
    x = _pad_end(_pad_end(x, axis, -x.shape[axis] % size[1]), 1 - axis, -x.shape[1 - axis] % size[0])
    if axis == 1 and size[0] == 1:
        return x.reshape(x.numel() // size[1], 1, 1, size[1])
    tall, wide = size if axis == 1 else size[::-1]
    return x.reshape(x.shape[0] // tall, tall, x.shape[1] // wide, wide)


def unblock(blocks: Tensor, spec: OperandSpec, axis: int, shape: torch.Size) -> Tensor:
    """Inverse of `block_view`: elements in `shape`, what filled incomplete blocks cropped."""
    if blocks.numel() == shape.numel():
        return blocks.reshape(shape)
    if spec.block_size is not None and axis == 1 and spec.block_size[0] == 1:
        return blocks.reshape(shape[0], -1)[:, : shape[1]]
    return blocks.flatten(2, 3).flatten(0, 1)[: shape[0], : shape[1]]


def scale_grid(block_scale: Tensor, spec: OperandSpec, axis: int, shape: torch.Size) -> Tensor:
    """Block scales as a grid in the layout of the tensor: [A / a, 1, B / b, 1] -> [ceil(A / a), ceil(B /
    b)].
    """
    size = spec.block_size
    if size is not None and axis == 1 and size[0] == 1:
        return block_scale.reshape(shape[0], -(-shape[1] // size[1]))
    return block_scale[:, 0, :, 0]


def lane_view(x: Tensor, size: int, axis: int) -> Tensor:
    """x with every `size` consecutive elements along axis in a dimension of their own, dimension 1."""
    if axis == 0:
        return x.reshape(x.shape[0] // size, size, x.shape[1])
    return x.reshape(x.numel() // size, size)


def _pad_end(x: Tensor, axis: int, missing: int) -> Tensor:
    if not missing:
        return x
    return torch.nn.functional.pad(x, (0, missing) if axis == 1 else (0, 0, 0, missing))
