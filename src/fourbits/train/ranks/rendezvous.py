"""A rendezvous of the ranks in the launcher's store, which still has the keys from before a restart.

Rank 0 writes the name of the rendezvous, every rank stores a random number under it, and rank 0 publishes the
list. A rank whose number is not in the list has read an earlier rendezvous, and polls for a new one.
"""

import importlib
import json
import time
import uuid
from datetime import timedelta
from typing import Any

from fourbits.train.ranks.failure import MissingRankError
from fourbits.train.ranks.launcher import LaunchedRank

_PAUSE = 0.05


def connected(where: LaunchedRank, timeout: float) -> Any:
    """The launcher's store, or that of rank 0. Raises MissingRankError if it cannot be reached in time."""
    distributed = importlib.import_module("torch.distributed")
    try:
        return distributed.TCPStore(
            *(where.address, where.port, None, where.hosts_store, timedelta(seconds=timeout)),
            wait_for_workers=False,  # `rendezvous` names those that are missing
            multi_tenant=True,
        )
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        how = "opened" if where.hosts_store else f"reached within {timeout:g} s (parallel.timeout)"
        raise MissingRankError(
            f"the store of the ranks, {where.address}:{where.port} (MASTER_ADDR, MASTER_PORT), could not be "
            f"{how}: {reason.removesuffix('.')}. Check that rank 0 has started, and that its node can be "
            "reached at this address."
        ) from error


def rendezvous(store: Any, rank: int, world: int, timeout: float) -> str:
    """Wait for all ranks; returns the name of the rendezvous, a prefix for keys of this start.

    Raises MissingRankError naming the ranks that did not arrive within `timeout` seconds.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout
    if rank == 0:
        store.set("rendezvous", own)
    while True:
        name = store.get("rendezvous").decode() if store.check(["rendezvous"]) else None
        if name is not None:
            store.set(f"{name}/{rank}", own)
            if rank == 0 and not _missing(store, name, world):
                everyone = [store.get(f"{name}/{number}").decode() for number in range(world)]
                store.set(f"{name}/list", json.dumps(everyone))
            if store.check([f"{name}/list"]) and json.loads(store.get(f"{name}/list"))[rank] == own:
                return name
        if time.monotonic() > deadline:
            missing = [0] if name is None else _missing(store, name, world) or [0]
            raise MissingRankError(
                f"rank {', '.join(map(str, missing))} of {world} did not start within {timeout:g} s "
                "(parallel.timeout). Look for its error on its node."
            )
        time.sleep(_PAUSE)


def _missing(store: Any, name: str, world: int) -> list[int]:
    return [rank for rank in range(world) if not store.check([f"{name}/{rank}"])]
