"""A 2-D tensor as blocks and back; padding; grids of one number per block. docs/nvfp4.md, section 5.

Tensors keep their own layout: `axis` says along which axis blocks run, and nothing is transposed.
"""

import torch
from torch import Tensor

from fourbits.quant.operand import OperandSpec


def padded(x: Tensor, spec: OperandSpec, axis: int) -> Tensor:
    """x with zeros appended along axis up to Cp: a multiple of 16 and of the transform's size."""
    return _pad_end(x, axis, -x.shape[axis] % max(16, spec.rht))


def completed(x: Tensor, spec: OperandSpec, axis: int) -> Tensor:
    """x with zeros appended to both dimensions until no block is incomplete."""
    size = in_layout(spec.block_size, axis)
    if size is None:
        return x
    return _pad_end(_pad_end(x, 0, -x.shape[0] % size[0]), 1, -x.shape[1] % size[1])


def in_layout(size: tuple[int, int] | None, axis: int) -> tuple[int, int] | None:
    """(other axis, contraction axis) as (dimension 0, dimension 1) of a tensor with that contraction axis."""
    return size if size is None or axis == 1 else (size[1], size[0])


def block_view(x: Tensor, spec: OperandSpec, axis: int) -> Tensor:
    """A completed tensor as blocks [A, a, B, b]: A x B blocks, each a x b in the layout of x."""
    size = in_layout(spec.block_size, axis)
    if size is None:
        return x[None, :, None, :]
    return x.reshape(x.shape[0] // size[0], size[0], x.shape[1] // size[1], size[1])


def unblocked(blocks: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The matrix that blocks [A, a, B, b] cover, cropped to shape."""
    down, rows, across, cols = blocks.shape
    return blocks.reshape(down * rows, across * cols)[: shape[0], : shape[1]]


def grid_shape(x: Tensor, spec: OperandSpec, axis: int) -> tuple[int, int]:
    """Blocks down and across a completed tensor."""
    size = in_layout(spec.block_size, axis)
    return (1, 1) if size is None else (x.shape[0] // size[0], x.shape[1] // size[1])


def coarser_maxima(grid: Tensor, ratio: tuple[int, int]) -> Tensor:
    """Largest entry of every ratio[0] x ratio[1] cells: [A, B] -> [ceil(A / r), ceil(B / c)]."""
    grid = _pad_end(_pad_end(grid, 0, -grid.shape[0] % ratio[0]), 1, -grid.shape[1] % ratio[1])
    rows, cols = grid.shape[0] // ratio[0], grid.shape[1] // ratio[1]
    return grid.reshape(rows, ratio[0], cols, ratio[1]).amax(dim=(1, 3))


def finer(grid: Tensor, ratio: tuple[int, int], shape: torch.Size | tuple[int, int]) -> Tensor:
    """Every entry repeated over ratio[0] x ratio[1] cells, cropped to shape."""
    rows, cols = grid.shape
    cells = grid[:, None, :, None].expand(rows, ratio[0], cols, ratio[1])
    return cells.reshape(rows * ratio[0], cols * ratio[1])[: shape[0], : shape[1]]


def _pad_end(x: Tensor, axis: int, missing: int) -> Tensor:
    if not missing:
        return x
    return torch.nn.functional.pad(x, (0, missing) if axis == 1 else (0, 0, 0, missing))
