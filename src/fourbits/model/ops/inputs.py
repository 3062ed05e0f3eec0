"""How the ops prepare their inputs: unit stride on the last axis for kernels, at least FP32 for PyTorch.

And what the compiler sees of a kernel: empty outputs like its inputs.
"""

import torch
from torch import Tensor


def unit_stride(x: Tensor) -> Tensor:
    """x with unit stride along its last axis: x itself if it has that, else a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def at_least_fp32(x: Tensor) -> Tensor:
    """x in FP32; FP64, which tests use, stays FP64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def empty_like_first(x: Tensor, *_: object) -> Tensor:
    """The output of a kernel that returns one tensor like its first argument, contiguous."""
    return x.new_empty(x.shape)


def empty_like_each(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The outputs of a kernel that returns a tensor like each of these, contiguous."""
    return tuple(map(empty_like_first, tensors))
