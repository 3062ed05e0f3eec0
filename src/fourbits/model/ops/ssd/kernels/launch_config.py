"""Chunk lengths, tiles and compiler options of the scan's kernels, by GPU."""

import functools
from typing import NamedTuple

import torch


class CompilerOptions(NamedTuple):
    """Compiler options of a kernel: warps per program, and pipeline stages of the loads in its loop."""

    warps: int
    stages: int

    @property
    def named(self) -> dict[str, int]:
        """As keyword arguments of a launch."""
        return {"num_warps": self.warps, "num_stages": self.stages}


class StatesConfig(NamedTuple):
    """How states are computed: the tile of P x N that one program carries along the sequence."""

    p: int
    n: int
    compiler: CompilerOptions


class GroupsConfig(NamedTuple):
    """How sums over the heads of a group are computed: the part of N that one program handles."""

    n: int
    compiler: CompilerOptions


class LaunchConfig(NamedTuple):
    """Tokens per chunk, and the kernels of one pass: states, work within chunks, sums over heads."""

    chunk: int
    states: StatesConfig
    chunks: CompilerOptions
    groups: GroupsConfig = GroupsConfig(64, CompilerOptions(4, 1))


#: For 227 KiB of shared memory (sm_90, sm_100); for about 99 KiB (sm_86, sm_89, sm_120); for the interpreter.
#: Measured on an H200 with 8,192 tokens: `forward` with heads of 64, `states` with 64 and 80 (the backward
#: one before its kernel also read the forward states). `chunks` and `groups` of `backward` were measured
#: after that (commit 686915f): no other chunk, tile or option was faster overall.
_LARGE = {
    "forward": LaunchConfig(128, StatesConfig(128, 64, CompilerOptions(4, 2)), CompilerOptions(8, 3)),
    "backward": LaunchConfig(
        64,
        StatesConfig(128, 64, CompilerOptions(4, 3)),
        CompilerOptions(4, 2),
        GroupsConfig(64, CompilerOptions(4, 3)),
    ),
}
_SMALL = {
    "forward": LaunchConfig(64, StatesConfig(64, 64, CompilerOptions(4, 2)), CompilerOptions(4, 1)),
    "backward": LaunchConfig(32, StatesConfig(64, 64, CompilerOptions(4, 2)), CompilerOptions(4, 1)),
}
_INTERPRETED = {
    "forward": LaunchConfig(32, StatesConfig(32, 32, CompilerOptions(4, 1)), CompilerOptions(4, 1)),
    "backward": LaunchConfig(
        16,
        StatesConfig(32, 32, CompilerOptions(4, 1)),
        CompilerOptions(4, 1),
        GroupsConfig(16, CompilerOptions(4, 1)),
    ),
}


@functools.cache
def launch_config(device: torch.device) -> dict[str, LaunchConfig]:
    """The configurations of the forward and the backward pass on a device."""
    if device.type != "cuda":
        return _INTERPRETED
    shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return _LARGE if shared >= 220 << 10 else _SMALL
