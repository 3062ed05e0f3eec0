"""A watchdog over the ranks, which names the one that is gone or keeps the others waiting.

A thread of each rank writes heartbeats to the launcher's store. If its own rank makes no progress for
`timeout` seconds, it also writes what the rank is doing: waiting for others, or something else. The first
thread to do so reads the entries of all ranks, names the rank at fault, and every rank ends.
"""

import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from fourbits.train.ranks.failure import (
    FAILED,
    LostRankError,
    OtherRankError,
    ended,
    is_broken_connection,
    may_be_connection,
    why,
)

#: seconds between heartbeats, and without one until a rank counts as gone
BEAT, GONE = 0.5, 4.0
#: seconds that a rank has to end by itself after another one failed
_GRACE = 10.0
#: seconds for the thread to end
_JOIN_TIMEOUT = 2.0
#: files of functions that wait for other ranks: of torch.distributed, and of a GPU whose kernels wait
_WAITS = ("torch/distributed/", "torch/cuda/streams.py", "train/timing.py")
WAITING = "waiting for other ranks"
_NO_STORE = (
    "lost the launcher: its store does not answer, because torchrun was killed, or rank 0's "
    "node is down. The run ends, to be resumed from its last checkpoint."
)


class Watchdog:
    """Heartbeats and progress of this rank, compared with those of others."""

    def __init__(self, store: Any, rank: int, world: int, timeout: float) -> None:
        """store: a separate connection for this thread, because another thread's may block."""
        self._store, self.rank, self.world, self.timeout = store, rank, world, timeout
        self._progress: float | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._failed_since: float | None = None
        self._main = threading.main_thread().ident
        self._explained: Exception | None = None

    def start(self) -> None:
        """Start the heartbeats. Progress is watched from the first `progress` on."""
        self._thread = threading.Thread(target=self._run, name="fourbits-watch", daemon=True)
        self._thread.start()

    def progress(self) -> None:
        """Report progress: this rank has done something that others may wait for."""
        self._progress = time.monotonic()

    def end(self) -> None:
        """Stop watching, because a process that exits aborts while a thread is inside the store."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_JOIN_TIMEOUT)

    def gone(self) -> list[int]:
        """Ranks without a heartbeat for GONE seconds from now."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        before = [self._store.add(f"beat/{rank}", 0) for rank in others]
        time.sleep(GONE)
        return [
            rank
            for rank, beats in zip(others, before, strict=True)
            if self._store.add(f"beat/{rank}", 0) == beats
        ]

    def explained(self, error: Exception) -> Exception:
        """The error, or one that names the ranks that are gone, if a broken connection may be why.

        Takes GONE seconds. A rank that failed by itself has stored its error, which a broken connection to it
        then is explained by; it is not gone.
        """
        if error is self._explained or not may_be_connection(error):
            return error
        self._explained = error
        try:
            gone = [rank for rank in self.gone() if not self._store.check([ended(rank)])]
            if not gone:
                return self._caused_by_another(error)
            names = ", ".join(f"{rank} on {self.node_of(rank)}" for rank in gone)
        except RuntimeError:
            found = LostRankError(_NO_STORE)
        else:
            found = LostRankError(
                f"lost rank {names}: not responding. It was killed, perhaps for lack of memory, or its node "
                "is down. Started again, the run continues from its last checkpoint; torchrun --max-restarts "
                "N does so by itself."
            )
        found.__cause__ = error
        return found

    def _caused_by_another(self, error: Exception) -> Exception:
        """The error of a rank that failed by itself, if this one is a broken connection; else this one."""
        for rank in range(self.world) if is_broken_connection(error) else ():
            if rank != self.rank and self._store.check([why(rank)]) and (text := self._store.get(why(rank))):
                found = OtherRankError(f"rank {rank} on {self.node_of(rank)} failed: {text.decode()}")
                found.__cause__ = error
                return found
        return error

    def node_of(self, rank: int) -> str:
        """The node on which a rank started."""
        return self._store.get(f"here/{rank}").decode()

    def _run(self) -> None:
        while not self._ended.wait(BEAT):
            try:
                self._store.add(f"beat/{self.rank}", 1)
                self._look(os._exit)
            except RuntimeError:  # the process that holds the store is gone, and so is the run
                if not self._ended.wait(_GRACE):
                    self._log(_NO_STORE)
                    os._exit(1)

    def _look(self, leave: Callable[[int], object]) -> None:
        """End this process if its rank is stuck, or if another one failed some time ago."""
        now = time.monotonic()
        if self._progress is not None and now - self._progress > self.timeout:
            self._progress = None
            self._store.set(f"stuck/{self.rank}", self._doing())
            if self._store.add(FAILED, 1) == 1:
                self._log(self.verdict())
                leave(1)
        if self._store.check([FAILED]):
            self._failed_since = self._failed_since or now
            if now - self._failed_since > _GRACE:
                leave(1)

    def _log(self, text: str) -> None:
        """Print and log a sentence about this rank, whose main thread may be stuck."""
        node = platform.node()
        logging.getLogger("fourbits").error("fourbits train: rank %d on %s: %s", self.rank, node, text)

    def verdict(self) -> str:
        """A sentence naming the rank that keeps others waiting. Takes GONE seconds; by then all are stuck."""
        gone = self.gone()
        reports = {rank: self._reported(rank) for rank in range(self.world) if rank not in gone}
        busy = {rank: text for rank, text in reports.items() if text not in (None, WAITING)}
        found = [
            f"rank {rank} on {self.node_of(rank)} does not respond (it or its node stopped)" for rank in gone
        ]
        found += [f"rank {rank} on {self.node_of(rank)} hangs {text}" for rank, text in busy.items()]
        who = "; ".join(found) if found else "all ranks wait for each other"
        return (
            f"no progress for {self.timeout:g} s (parallel.timeout): {who}. The run ends, to be resumed from "
            "its last checkpoint. If a step takes that long, raise parallel.timeout."
        )

    def _reported(self, rank: int) -> str | None:
        key = f"stuck/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _doing(self) -> str:
        """The state of this rank's threads: WAITING if any waits for others, else where the main one is."""
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - the only way to see them
        files = [file for frame in frames.values() for file in _files(frame)]
        if any(part in file for file in files for part in _WAITS):
            return WAITING
        frame = frames.get(self._main or 0)
        return "at an unknown place" if frame is None else f"in {frame.f_code.co_filename}:{frame.f_lineno}"


def _files(frame: Any) -> list[str]:
    """The files of a stack of frames."""
    found: list[str] = []
    while frame is not None:
        found.append(frame.f_code.co_filename.replace(os.sep, "/"))
        frame = frame.f_back
    return found
