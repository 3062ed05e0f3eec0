"""Digests of the bits of tensors: a flipped bit changes them, the order of computation does not.

The digest of elements with bits b_0, b_1, ... is the sum of (2 i + 1) b_i modulo 2^64. A flipped bit k adds
or subtracts 2^k times an odd number, with k < 64, which is never a multiple of 2^64.
"""

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor, nn

#: elements at a time, so that their positions take little memory
_CHUNK = 1 << 22
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """int64 scalar, on the tensor's device."""
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first in range(0, len(bits), _CHUNK):
        part = bits[first : first + _CHUNK]
        places = torch.arange(first, first + len(part), dtype=torch.int64, device=tensor.device)
        total += (part * (2 * places + 1)).sum()
    return total


class GradientDigests:
    """A context in which each gradient is digested and dropped as soon as a backward pass completes it."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._found: dict[str, Tensor] = {}

    def __enter__(self) -> Self:
        self._handles = [
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._take(name, p))
            for name, parameter in self._parameters.items()
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _take(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        found = digest(parameter.grad)
        self._found[name] = self._found[name] + found if name in self._found else found
        parameter.grad = None

    def with_loss(self, loss: Tensor) -> Tensor:
        """int64 [1 + parameters]: the digests of a loss and of the gradients; 0 where there was none."""
        first = digest(loss)
        none = torch.zeros_like(first)
        return torch.stack([first, *(self._found.get(name, none) for name in self._parameters)])
