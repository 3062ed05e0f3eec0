"""The groups of blocks that share a gather: few large messages instead of many small ones.

Every gather and every sum costs the host about a millisecond. A block of a 1B model computes for only a few
milliseconds, so the GPU waits for the host if each block has a separate gather.
"""

from collections.abc import Iterable

from torch import nn


def block_groups(blocks: Iterable[nn.Module], weights: int) -> list[list[nn.Module]]:
    """Consecutive blocks; a group ends with the block that brings it to this many weights."""
    groups: list[list[nn.Module]] = []
    missing = 0
    for block in blocks:
        if missing <= 0:
            groups.append([])
            missing = weights
        groups[-1].append(block)
        missing -= sum(parameter.numel() for parameter in block.parameters())
    return groups
