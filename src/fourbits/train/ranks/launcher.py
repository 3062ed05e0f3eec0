"""Where a launcher put this process: torchrun's environment."""

import os
from collections.abc import Mapping
from typing import NamedTuple

#: what torchrun sets, and what another launcher has to set
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

_COUNTS = ("RESTART_COUNT", "MAX_RESTARTS")


class Place(NamedTuple):
    """A process among those that train together.

    restarts: how often torchrun has started them again; may_restart: whether it would.
    """

    rank: int
    world: int
    local_rank: int
    restarts: int
    may_restart: bool


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """This process's place, or None if no launcher started it."""
    if not all(name in environment for name in _NEEDED):
        return None
    rank, world, local = (int(environment[name]) for name in _NEEDED[:3])
    restarts, most = (int(environment.get(f"TORCHELASTIC_{name}", "0")) for name in _COUNTS)
    return Place(rank, world, local, restarts, most > 0)
