"""This process's rank, from the environment that torchrun or another launcher sets."""

import os
from collections.abc import Mapping
from typing import NamedTuple

#: variables that torchrun sets, and that another launcher has to set
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

_COUNTS = ("RESTART_COUNT", "MAX_RESTARTS")


class LaunchedRank(NamedTuple):
    """One of the processes that a launcher started to train together.

    restarts: how often torchrun has restarted them; may_restart: whether it would. address, port: of the
    store that all of them use; hosts_store: whether this process provides it, and not torchrun.
    """

    rank: int
    world: int
    local_rank: int
    restarts: int
    may_restart: bool
    address: str
    port: int
    hosts_store: bool


def launched_rank(environment: Mapping[str, str] = os.environ) -> LaunchedRank | None:
    """This process's rank, or None if no launcher started it."""
    if not all(name in environment for name in _NEEDED):
        return None
    rank, world, local = (int(environment[name]) for name in _NEEDED[:3])
    restarts, most = (int(environment.get(f"TORCHELASTIC_{name}", "0")) for name in _COUNTS)
    of_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), rank == 0 and not of_agent
    return LaunchedRank(rank, world, local, restarts, most > 0, *store)
