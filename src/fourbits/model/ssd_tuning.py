"""How the scan's kernels are cut and compiled for a card."""

import functools
from typing import NamedTuple

import torch


class Launch(NamedTuple):
    """How a kernel is compiled: warps of a program and stages of its loop's loads."""

    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """The options of a kernel's launch."""
        return {"num_warps": self.warps, "num_stages": self.stages}


class Walk(NamedTuple):
    """How states are made: the parts of P and of N that one program walks with."""

    p: int
    n: int
    launch: Launch


class Sums(NamedTuple):
    """How sums over the heads of a group are made: the part of N of one program."""

    n: int
    launch: Launch


class Tuning(NamedTuple):
    """Tokens of a chunk and launches of one pass: of its walks, its visits of chunks, its sums over heads."""

    chunk: int
    walk: Walk
    visit: Launch
    sums: Sums = Sums(64, Launch(4, 1))


#: shared memory of 227 KiB (sm_90, sm_100); about 99 KiB (sm_86, sm_89, sm_120); the interpreter.
#: Measured on an H200 with 8,192 tokens: the forward launches for heads of 64, and the walks for 64 and 80
#: (backwards before they met the other states); the backward visits and sums after (commit 686915f), where no
#: other chunk, part or launch was faster in all.
_LARGE = {
    "forward": Tuning(128, Walk(128, 64, Launch(4, 2)), Launch(8, 3)),
    "backward": Tuning(64, Walk(128, 64, Launch(4, 3)), Launch(4, 2), Sums(64, Launch(4, 3))),
}
_SMALL = {
    "forward": Tuning(64, Walk(64, 64, Launch(4, 2)), Launch(4, 1)),
    "backward": Tuning(32, Walk(64, 64, Launch(4, 2)), Launch(4, 1)),
}
_INTERPRETED = {
    "forward": Tuning(32, Walk(32, 32, Launch(4, 1)), Launch(4, 1)),
    "backward": Tuning(16, Walk(32, 32, Launch(4, 1)), Launch(4, 1), Sums(16, Launch(4, 1))),
}


@functools.cache
def tuning_of(device: torch.device) -> dict[str, Tuning]:
    """The tuning of both passes on a device."""
    if device.type != "cuda":
        return _INTERPRETED
    shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return _LARGE if shared >= 220 << 10 else _SMALL
