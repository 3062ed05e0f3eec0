"""The ranks of one start meet in the launcher's store, which still has the keys of starts before a restart.

Rank 0 names the meeting, every rank leaves a number of its own there, and rank 0 publishes the list. A rank
that finds another number in its place has read an earlier meeting, and looks for a newer one.
"""

import json
import time
import uuid
from typing import Any

_PAUSE = 0.05


def meet(store: Any, rank: int, world: int, timeout: float) -> str:
    """The name of the meeting, a prefix for all its keys, when all ranks are there.

    Raises TimeoutError naming the ranks that did not come within `timeout` seconds.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout
    if rank == 0:
        store.set("meeting", own)
    while True:
        name = store.get("meeting").decode() if store.check(["meeting"]) else None
        if name is not None:
            store.set(f"{name}/{rank}", own)
            if rank == 0 and not _missing(store, name, world):
                everyone = [store.get(f"{name}/{number}").decode() for number in range(world)]
                store.set(f"{name}/list", json.dumps(everyone))
            if store.check([f"{name}/list"]) and json.loads(store.get(f"{name}/list"))[rank] == own:
                return name
        if time.monotonic() > deadline:
            missing = [0] if name is None else _missing(store, name, world) or [0]
            raise TimeoutError(
                f"rank {', '.join(map(str, missing))} of {world} did not start within {timeout:g} s "
                "(parallel.timeout). Look for its error on its node."
            )
        time.sleep(_PAUSE)


def _missing(store: Any, name: str, world: int) -> list[int]:
    return [rank for rank in range(world) if not store.check([f"{name}/{rank}"])]
