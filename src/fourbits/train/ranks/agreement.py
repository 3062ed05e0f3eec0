"""Decisions of rank 0, which other ranks read in the launcher's store."""

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

from fourbits.train.ranks.failure import FAILED, OtherRankError

T = TypeVar("T")

#: seconds between two polls for a decision
_PAUSE = 0.02


class Agreements:
    """A sequence of decisions. All ranks ask in the same order; each sequence has its own prefix."""

    def __init__(self, store: Any, is_first: bool, prefix: str = "agreed") -> None:
        """store: a separate connection if another thread may block in the store."""
        self._store, self._is_first, self._prefix = store, is_first, prefix
        self._count = 0

    def agreed(self, decide: Callable[[], T]) -> T:
        """What rank 0 decides. Others wait, however long it takes, and raise OtherRankError if it failed."""
        key = f"{self._prefix}/{self._count}"
        self._count += 1
        if self._is_first:
            value = decide()
            self._store.set(key, json.dumps([value]))
            return value
        while not self._store.check([key]):
            if self._store.check([FAILED]):
                raise OtherRankError("another rank failed")
            time.sleep(_PAUSE)
        return json.loads(self._store.get(key))[0]
